"""Keep what later slices need of earlier ones, and the gradients that flow back.

Kind "appended": a layer appends the keys and values of each slice to one buffer of the whole sequence, and later slices
read the prefix [0, start). Backward runs over the slices in reverse and adds to the gradients of the prefix, so that
those of a slice are complete when its own backward has run. Two frontiers per layer and micro-batch check that order:
`filled` grows with the forwards, `frontier` shrinks with the backwards. Any other order raises an error at once, and
never gives a wrong gradient. Kind "carried", one state per slice, is in `carry.states`.

Memory per layer (B batch, L sequence, H_kv key heads, D head dim):
  keys and values   2 * B * L * H_kv * D * itemsize           from the first forward of a micro-batch to `release`
  their gradients   2 * B * L * H_kv * D * max(4, itemsize)   from its last slice's backward to its first slice's
Both come from a pool and return to it: a batch after the first one allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator

import torch

from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.attention.active_slice import SliceStoreError as SliceStoreError  # who uses the store catches it
from terapipe_ds.attention.carry.states import CarriedStates

TensorPair = tuple[torch.Tensor, torch.Tensor]


class BufferPool:
    """Lends tensors of any shape, by dtype and device, from batch to batch. Their contents are undefined.

    Free buffers are flat and lent to whatever fits in, so that lengths that change from batch to batch do not pile up
    one set of buffers per length: where no free one is large enough, the new buffer replaces a smaller free one. There
    are never more buffers than were in use at once.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}  # id of the lent view -> flat buffer
        self.live_bytes = self.peak_bytes = self.reserved_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of that shape; give the same object back with `give`."""
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
        """Return the smallest free buffer that is large enough; without one, drop the largest of those too small."""
        free.sort(key=torch.Tensor.numel)
        for place, flat in enumerate(free):
            if flat.numel() >= numel:
                return free.pop(place)
        if free:
            self.reserved_bytes -= free.pop().nbytes
        return None

    def give(self, lent: torch.Tensor) -> None:
        """Take back a tensor that `take` lent."""
        flat = self._lent.pop(id(lent))
        self.live_bytes -= lent.nbytes
        self._free.setdefault((flat.dtype, flat.device), []).append(flat)

    def count(self, num_bytes: int) -> None:
        """Count bytes that are in use and not of the pool; fewer where `num_bytes` is negative."""
        self.live_bytes += num_bytes
        self.reserved_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop_free(self) -> None:
        """Drop the buffers that are not lent now."""
        self.reserved_bytes -= sum(flat.nbytes for free in self._free.values() for flat in free)
        self._free.clear()


class SliceEntry:
    """Keys, values and their gradients of one layer and micro-batch.

    `kv` is [2, B, H_kv, L, D]; so is `grads`, which is None outside of the micro-batch's backward.
    """

    def __init__(self, active: ActiveSlice, layer: Hashable, kv: torch.Tensor) -> None:
        self.layer = layer
        self.part_id = active.part_id
        self.micro_batch_id = active.micro_batch_id
        self.sequence_length = active.sequence_length
        self.mode = active.mode
        self.kv = kv
        self.grads: torch.Tensor | None = None
        self.filled = 0
        self.frontier = active.sequence_length
        self.recorded = False  # an autograd node waits for its backward
        self.kv_needs_grad = False
        self.has_later = False  # `grads` hold the share of slices after the one whose backward runs
        self.closed = False

    def __str__(self) -> str:
        return f"layer {self.layer!r} (part {self.part_id}, micro-batch {self.micro_batch_id})"

    def keys_values(self, start: int, stop: int) -> TensorPair:
        """Return views of the keys and values of the tokens [start, stop), [B, H_kv, stop - start, D] each."""
        return self.kv[0, :, :, start:stop], self.kv[1, :, :, start:stop]

    def record(self, kv_needs_grad: bool) -> None:
        """Note that an autograd node was recorded for a slice: its backward has to come before `release`."""
        self.recorded = True
        self.kv_needs_grad = self.kv_needs_grad or kv_needs_grad

    def add_grads(self, offset: int, dk: torch.Tensor, dv: torch.Tensor, again: bool = False) -> None:
        """Add the running backward's gradients to those of the keys and values from token `offset` on.

        dk, dv: [B, H_kv, n, D]. A backward covers [0, stop) in pieces of any size; `again` says that it has given to
        these tokens before. The pieces of the first backward are copied, so that nothing has to be zeroed.
        """
        if self.grads is None:  # keys and values need no gradients
            return
        for total, part in zip(self.grads, (dk, dv), strict=True):
            target = total[:, :, offset : offset + part.shape[2]]
            if self.has_later or again:
                target.add_(part)
            else:
                target.copy_(part)


class SliceStore:
    """The store of one engine, keyed by (part_id, layer, micro_batch_id).

    `on_gradients`, where it is set, is told of each backward that has added to the gradients of the tokens [0, stop).
    """

    def __init__(self) -> None:
        self.on_gradients: Callable[[SliceEntry, int], None] | None = None
        self._entries: dict[tuple[int, int], dict[Hashable, SliceEntry]] = {}
        self._pool = BufferPool()
        self.carried = CarriedStates(self._pool.count)

    def write(self, active: ActiveSlice, layer: Hashable, k: torch.Tensor, v: torch.Tensor) -> SliceEntry:
        """Keep the keys and values ([B, H_kv, T, D]) of the active slice; return the entry to read the prefix from.

        Mode "weight" only reads. Raises SliceStoreError where the slice does not continue the forward frontier (modes
        train and eval), has not run yet (recompute, weight), or has another shape or dtype than those before it.
        """
        entry = self._lookup(active, layer, k)
        self._advance(entry, active)
        if active.mode != "weight":
            keys, values = entry.keys_values(active.start, active.stop)
            keys.copy_(k)
            values.copy_(v)
        return entry

    def _lookup(self, active: ActiveSlice, layer: Hashable, k: torch.Tensor) -> SliceEntry:
        batch, heads, _, dim = k.shape
        shape = (2, batch, heads, active.sequence_length, dim)
        entry = self._entries.get((active.part_id, active.micro_batch_id), {}).get(layer)
        if entry is None:
            entry = SliceEntry(active, layer, self._pool.take(shape, k.dtype, k.device))
            if active.mode == "probe":  # the prefix never ran; its numbers only have to cost what real ones cost
                entry.kv.fill_(0.5)
            self._entries.setdefault((active.part_id, active.micro_batch_id), {})[layer] = entry
        elif tuple(entry.kv.shape) != shape or entry.kv.dtype != k.dtype or entry.kv.device != k.device:
            _, *first = entry.kv.shape
            raise SliceStoreError(
                f"{entry}: slice [{active.start}, {active.stop}) brings keys for [B, H_kv, L, D] = {list(shape[1:])}, "
                f"{k.dtype} on {k.device}, but the micro-batch began with {first}, {entry.kv.dtype} on "
                f"{entry.kv.device}; all slices of a micro-batch need the same batch, heads, length, dtype and device"
            )
        return entry

    @staticmethod
    def _advance(entry: SliceEntry, active: ActiveSlice) -> None:
        start, stop = active.start, active.stop
        if active.mode == "probe":
            entry.filled = entry.frontier = stop
        elif active.mode in ("train", "eval"):
            if start != entry.filled:
                raise SliceStoreError(_forward_order_message(entry, start, stop))
            entry.filled = stop
        elif stop > entry.filled:
            raise SliceStoreError(
                f"{entry}: mode {active.mode!r} runs slice [{start}, {stop}) again, but only [0, {entry.filled}) has "
                f"run; the first forward of a slice needs mode 'train'"
            )

    def begin_backward(self, entry: SliceEntry, start: int, stop: int) -> None:
        """Move the backward frontier over [start, stop) and have `grads` ready for `SliceEntry.add_grads`.

        Raises SliceStoreError unless [start, stop) is the next slice of the reverse order.
        """
        self._check_backward(entry, start, stop)
        entry.frontier = start
        is_probe = entry.mode == "probe"  # later slices never ran; adding to their share costs what it does in training
        entry.has_later = stop < entry.sequence_length if is_probe else entry.grads is not None
        if entry.kv_needs_grad and entry.grads is None:
            dtype = torch.float32 if entry.kv.element_size() < 4 else entry.kv.dtype
            entry.grads = self._pool.take(tuple(entry.kv.shape), dtype, entry.kv.device)
            if is_probe:
                entry.grads.zero_()

    @staticmethod
    def _check_backward(entry: SliceEntry, start: int, stop: int) -> None:
        is_probe = entry.mode == "probe"
        if entry.closed:
            problem = "after the micro-batch was released; release it after its last backward"
        elif stop != entry.frontier and not is_probe:
            problem = (
                f"out of order, the next one must end at token {entry.frontier}; run the backwards in reverse slice "
                f"order, each slice once"
            )
        elif entry.kv_needs_grad and entry.grads is None and stop < entry.sequence_length and not is_probe:
            problem = (
                "has keys or values that need gradients but did not in the slices after it, so that their share is "
                "lost; let k and v require gradients in all slices of a micro-batch or in none"
            )
        else:
            return
        raise SliceStoreError(f"{entry}: backward of slice [{start}, {stop}) {problem}")

    def end_backward(self, entry: SliceEntry, start: int, stop: int) -> TensorPair | None:
        """Return the complete dK, dV of [start, stop), [B, H_kv, T, D] each: all later slices have added their share.

        None where keys and values need no gradients. The backward of the first slice gives `grads` back to the pool.
        """
        if entry.grads is None:
            return None
        if self.on_gradients is not None:
            self.on_gradients(entry, stop)
        dk, dv = (_copy_tokens_first(total[:, :, start:stop], entry.kv.dtype) for total in entry.grads)
        if start == 0 and entry.mode != "probe":  # which runs others after it
            self._give_grads(entry)
        return dk, dv

    def release(self, part_id: int, micro_batch_id: int) -> None:
        """Give back the buffers of a micro-batch, after its last backward (training) or last forward (evaluation).

        Raises SliceStoreError where a layer is only partly drained, or waits for a backward that never came.
        """
        for entry in self._entries.get((part_id, micro_batch_id), {}).values():
            _check_drained(entry)
        self.carried.check_drained(part_id, micro_batch_id)
        for entry in self._entries.pop((part_id, micro_batch_id), {}).values():
            self._close(entry)
        self.carried.release(part_id, micro_batch_id)

    def reset(self) -> None:
        """Drop all entries whatever their state, after an exception; their buffers go back to the pool."""
        for entry in self._all():
            self._close(entry)
        self._entries.clear()
        self.carried.reset()

    def assert_drained(self) -> None:
        """Raise SliceStoreError if any entry is left; called at the end of a batch."""
        left = [str(entry) for entry in (*self._all(), *self.carried)]
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise SliceStoreError(
                f"the slice store is not drained at the end of the batch: {', '.join(left[:4])}{more}; release() every "
                f"micro-batch of every part"
            )

    def bytes_of(self, part_id: int, micro_batch_id: int) -> tuple[int, int]:
        """Return the bytes of keys and values of a micro-batch on all layers of a part, and of their gradients."""
        layers = self._entries.get((part_id, micro_batch_id), {}).values()
        keys = sum(entry.kv.nbytes for entry in layers)
        grads = sum(entry.kv.numel() * max(4, entry.kv.element_size()) for entry in layers if entry.kv_needs_grad)
        return keys, grads

    def live_bytes(self) -> int:
        """Return the bytes of keys, values, their gradients and carried states in use now."""
        return self._pool.live_bytes

    def peak_bytes(self) -> int:
        """Return the largest `live_bytes` since the start."""
        return self._pool.peak_bytes

    def reserved_bytes(self) -> int:
        """Return the bytes held, in use or waiting in the pool."""
        return self._pool.reserved_bytes

    def drop_free(self) -> None:
        """Let go of the buffers that wait in the pool; a later batch takes new ones."""
        self._pool.drop_free()

    def _all(self) -> Iterator[SliceEntry]:
        for layers in self._entries.values():
            yield from layers.values()

    def _close(self, entry: SliceEntry) -> None:
        entry.closed = True
        self._pool.give(entry.kv)
        self._give_grads(entry)

    def _give_grads(self, entry: SliceEntry) -> None:
        if entry.grads is not None:
            self._pool.give(entry.grads)
            entry.grads = None


def _copy_tokens_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy [B, H, T, D] in the memory order [B, T, H, D], which is what the backward of a projection reads."""
    batch, heads, tokens, dim = x.shape
    return torch.empty(batch, tokens, heads, dim, dtype=dtype, device=x.device).transpose(1, 2).copy_(x)


def _forward_order_message(entry: SliceEntry, start: int, stop: int) -> str:
    if stop > entry.filled:
        why = f"out of order, the next one must start at token {entry.filled}; run the forwards in slice order"
        return f"{entry}: slice [{start}, {stop}) {why}, without gaps"
    return (
        f"{entry}: slice [{start}, {stop}) comes a second time, [0, {entry.filled}) is filled. Either two attention "
        f"layers of this part share the name {entry.layer!r} (give each its own), or a forward inside a backward runs "
        f"in mode {entry.mode!r} (use 'recompute'), or the micro-batch before was not released"
    )


def _check_drained(entry: SliceEntry) -> None:
    if entry.mode != "train":
        return
    if 0 < entry.frontier < entry.sequence_length:
        what = f"with the gradients of [0, {entry.frontier}) still waiting; run the backward of every slice first"
    elif entry.frontier and entry.recorded:
        what = (
            "before any backward although its output needs gradients; run the backward of every slice first, or "
            "freeze the layer if the loss does not use it"
        )
    elif entry.filled < entry.sequence_length:
        what = f"after the forward of [0, {entry.filled}) of {entry.sequence_length} tokens; run all slices first"
    else:
        return
    raise SliceStoreError(f"{entry}: released {what}")
