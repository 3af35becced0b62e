"""Bytes on the host that saved tensors wait in: pinned memory beside an accelerator, a file beside a CPU.

A file is what a CPU has that is not its own memory, so that tests measure what would leave a device. Buffers go back to
a pool by their size: pinned memory takes long to get.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict

import numpy as np
import torch


class HostBuffers:
    """Lend flat buffers of bytes; one that is given back is lent again, and never shrinks."""

    def __init__(self, is_pinned: bool) -> None:
        self.live_bytes = self.peak_bytes = self.reserved_bytes = 0
        self._is_pinned = is_pinned
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of exactly so many bytes."""
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if free := self._free[num_bytes]:
            return free.pop()
        self.reserved_bytes += num_bytes
        return self._new(num_bytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that `take` lent."""
        self.live_bytes -= buffer.numel()
        self._free[buffer.numel()].append(buffer)

    def _new(self, num_bytes: int) -> torch.Tensor:
        if self._is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        with tempfile.TemporaryFile(prefix="terapipe-offload-") as file:  # it lives as long as its mapping
            return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=(num_bytes,)))
