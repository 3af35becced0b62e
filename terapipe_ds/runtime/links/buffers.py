"""Keep the memory of messages and reuse it, so that no message over NCCL needs the allocator.

torch records the stream of each point-to-point message on its tensor. Freed memory must then wait for an event of that
stream. An allocator that runs out waits for all of them, even for receives that wait for this very rank.
"""

from __future__ import annotations

import math

import torch


class MessageBuffers:
    """Hand out memory for the messages of one end of a wire.

    Memory is free again when nothing else holds its storage: no tensor, no view and no graph. The current stream orders
    its next use behind all work that the host has launched before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[torch.UntypedStorage] = []
        self.num_allocated = 0  # in all, for tests

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with any content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        free = [storage for storage in self._storages if is_unused(storage)]
        fitting = min(
            (each for each in free if each.nbytes() >= num_bytes), key=torch.UntypedStorage.nbytes, default=None
        )
        if fitting is None:
            # lengths have grown: free buffers are too small for them, so drop these before taking more
            self._storages = [each for each in self._storages if not any(each is small for small in free)]
            fitting = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._device).untyped_storage()
            self._storages.append(fitting)
            self.num_allocated += 1
        return torch.empty(0, dtype=dtype, device=self._device).set_(fitting, 0, shape)


def is_unused(storage: torch.UntypedStorage) -> bool:
    """Return whether nothing but this one object holds the storage."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1
