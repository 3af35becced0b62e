"""Take buffers once and reuse them from batch to batch.

Free buffers are flat and lent to whatever fits in, so that sequence lengths that change from batch to batch do not
pile up one set of buffers per length: where no free one is large enough, the new buffer replaces a smaller free one.
There are never more buffers than were in use at once.
"""

from __future__ import annotations

import math

import torch

_Kind = tuple[torch.dtype, torch.device]


class BufferPool:
    """Lends tensors of any shape, by dtype and device. Their contents are undefined."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[torch.Tensor]] = {}
        self._lent: dict[int, tuple[torch.Tensor, int]] = {}  # id of the lent view -> (flat buffer, bytes asked for)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.reserved_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of that shape; give the same object back with `give`."""
        numel = math.prod(shape)
        # Not an inference tensor even where the caller evaluates: the next user may train.
        with torch.inference_mode(False), torch.no_grad():
            flat = self._fitting(numel, self._free.setdefault((dtype, device), []))
            if flat is None:
                flat = torch.empty(numel, dtype=dtype, device=device)
                self.reserved_bytes += _bytes(flat)
            lent = flat[:numel].view(shape)
        num_bytes = numel * flat.element_size()
        self._lent[id(lent)] = (flat, num_bytes)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return lent

    def _fitting(self, numel: int, free: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the smallest free buffer that is large enough; without one, drop the largest of those too small."""
        free.sort(key=torch.Tensor.numel)
        for place, flat in enumerate(free):
            if flat.numel() >= numel:
                return free.pop(place)
        if free:
            self.reserved_bytes -= _bytes(free.pop())
        return None

    def give(self, lent: torch.Tensor) -> None:
        """Take back a tensor that `take` lent."""
        flat, num_bytes = self._lent.pop(id(lent))
        self.live_bytes -= num_bytes
        self._free.setdefault((flat.dtype, flat.device), []).append(flat)

    def drop_free(self) -> None:
        """Let go of what is not lent now."""
        self.reserved_bytes -= sum(_bytes(flat) for free in self._free.values() for flat in free)
        self._free.clear()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
