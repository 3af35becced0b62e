"""Lend the memory of the slice store: tensors from batch to batch, and keys and values of a range of tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

TensorPair = tuple[torch.Tensor, torch.Tensor]


class BufferPool:
    """Lends tensors of any shape, by dtype and device, from batch to batch. Their contents are undefined.

    Free buffers are flat, and the pool lends them for any tensor that fits in. So lengths that change from batch to
    batch do not pile up one set of buffers per length: if no free buffer is large enough, the new one replaces a
    smaller free one. There are never more buffers than were in use at once.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}  # id of the lent view -> flat buffer
        self.live_bytes = self.peak_bytes = self.reserved_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of that shape; the caller returns the same object with `give`."""
        numel = math.prod(shape)
        # Not an inference tensor even where the caller evaluates: the next user may train.
        with torch.inference_mode(False), torch.no_grad():
            flat = self._fitting(numel, self._free.setdefault((dtype, device), []))
            if flat is None:
                flat = torch.empty(numel, dtype=dtype, device=device)
                self.reserved_bytes += flat.nbytes
            lent = flat[:numel].view(shape)
        self._lent[id(lent)] = flat
        self.live_bytes += lent.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return lent

    def _fitting(self, numel: int, free: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the smallest free buffer that is large enough; without one, drop the largest free buffer."""
        # the smallest that fits, so that large ones stay for large tensors
        free.sort(key=torch.Tensor.numel)
        for place, flat in enumerate(free):
            if flat.numel() >= numel:
                return free.pop(place)
        # lengths that grow from batch to batch would pile up buffers that nothing fits in
        if free:
            self.reserved_bytes -= free.pop().nbytes
        return None

    def give(self, lent: torch.Tensor) -> None:
        """Take back a tensor that `take` lent."""
        flat = self._lent.pop(id(lent))
        self.live_bytes -= lent.nbytes
        self._free.setdefault((flat.dtype, flat.device), []).append(flat)

    def count(self, num_bytes: int) -> None:
        """Count bytes that are in use outside of the pool; a negative `num_bytes` takes bytes off the count."""
        self.live_bytes += num_bytes
        self.reserved_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop_free(self) -> None:
        """Drop the buffers that are not lent now."""
        self.reserved_bytes -= sum(flat.nbytes for free in self._free.values() for flat in free)
        self._free.clear()


class Layout(NamedTuple):
    """Hold what the keys and values of all slices of a micro-batch have in common."""

    batch: int
    heads: int
    length: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        of_values = "" if self.value_dim == self.dim else f" and D = {self.value_dim} of values"
        return f"[B, H_kv, L, D] = {[*self[:4]]}{of_values}, {self.dtype} on {self.device}"


def layout_of(pair: TensorPair, length: int) -> Layout:
    """Return the layout of keys and values of a slice, [B, H_kv, T, D], of sequences of `length` tokens."""
    (batch, heads, _, dim), value_dim = pair[0].shape, pair[1].shape[3]
    return Layout(batch, heads, length, dim, value_dim, pair[0].dtype, pair[0].device)


class TokenBuffer:
    """A pair of tensors [B, H_kv, tokens, D] of the pool for the tokens [first, first + room) of a sequence.

    The two may differ in D. There is no memory until the first `reserve`.
    """

    def __init__(self, pool: BufferPool, like: TensorPair, dtype: torch.dtype) -> None:
        self._pool, self._dtype, self._device = pool, dtype, like[0].device
        self._shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in like]
        self._pair: TensorPair | None = None
        self.first = self.room = 0

    @property
    def is_taken(self) -> bool:
        return self._pair is not None

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in both tensors."""
        return sum(math.prod(shape) for shape in self._shapes) * self._dtype.itemsize

    def holds(self, start: int, stop: int) -> bool:
        """Return whether there is room for the tokens [start, stop)."""
        return self.first <= start and stop <= self.first + self.room

    def at(self, start: int, stop: int) -> TensorPair:
        """Return views of the tokens [start, stop), which must be held."""
        assert self._pair is not None and self.holds(start, stop)
        keys, values = self._pair
        # no view if the range is the whole buffer: views cost more than the check
        if self.first == 0 and start == 0 and stop == self.room:
            return keys, values
        tokens = slice(start - self.first, stop - self.first)
        return keys[:, :, tokens], values[:, :, tokens]

    def reserve(self, first: int, room: int, kept: tuple[int, int] = (0, 0)) -> None:
        """Make room for the tokens [first, first + room); the contents of the tokens `kept` stay, all others go."""
        # Copied: the kept tokens take less than a second buffer, and their old and new places may overlap.
        moved = tuple(x.clone() for x in self.at(*kept)) if self.is_taken and kept[0] < kept[1] else ()
        self.give_back()
        keys, values = (self._pool.take((b, h, room, d), self._dtype, self._device) for b, h, d in self._shapes)
        self._pair, self.first, self.room = (keys, values), first, room
        if moved:
            for target, source in zip(self.at(*kept), moved, strict=True):
                target.copy_(source)

    def give_back(self) -> None:
        for lent in self._pair or ():
            self._pool.give(lent)
        self._pair, self.first, self.room = None, 0, 0
