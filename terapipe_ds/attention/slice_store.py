"""Keep what later slices need of earlier ones, and the gradients that flow back.

Kind "appended": a layer appends the keys and values of each slice to the earlier ones, and later slices read the part
of [0, start) within their reach. Backward runs over the slices in reverse and adds to the gradients of these keys and
values, so that a slice's gradients are complete when its own backward has run. Two frontiers per layer and micro-batch
check that order: `filled` grows with the forwards, `frontier` shrinks with the backwards. Any other order raises an
error at once, and never gives a wrong gradient. Kind "carried", one state per slice, is in `carry.states`.

Memory per layer (B batch, L sequence, H_kv key heads, D head dim):
  keys and values   2 * B * L * H_kv * D * itemsize           from the first forward of a micro-batch to `release`
  their gradients   2 * B * L * H_kv * D * max(4, itemsize)   from its last slice's backward to its first slice's
With a window, or documents, tokens out of reach are dropped: gradients take window - 1 + T tokens instead of L, where T
is the largest slice. In evaluation keys and values take no more either, because no backward comes back to them.
All come from a pool and return to it: a batch after the first one allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.attention.active_slice import SliceStoreError as SliceStoreError  # who uses the store catches it
from terapipe_ds.attention.buffers import BufferPool, TensorPair, TokenBuffer, layout_of
from terapipe_ds.attention.carry.states import CarriedStates
from terapipe_ds.attention.reach import Reach


class LayerBytes(NamedTuple):
    """Hold a layer's bytes of all tokens' keys and values, and of their gradients, and how far back its tokens see."""

    keys_values: int
    grads: int
    window: int | None


class SliceEntry:
    """Keys, values and their gradients of one layer and micro-batch, from its first forward to its release.

                 write, in slice order          begin_backward ... end_backward, in reverse        release
        empty ------------------------> filling ------------------------------------> draining ------------> closed
        filled     0                    0 < filled <= L                                L
        frontier   L                    L                                              L > frontier >= 0
        kept                            taken ---------------------------------------------------------->  given back
        grads                                            last slice's backward: taken --> first slice's: given back

    Evaluation goes from filling to closed. Modes "recompute" and "weight" come back to slices below `filled` and move
    nothing; "probe" moves both frontiers to wherever it runs. `grads` hold what the slices after the frontier have
    added to the tokens from `touched` on; tokens before have no gradients yet. `kv_needs_grad` says that a node needs
    `grads`.
    """

    def __init__(self, active: ActiveSlice, layer: Hashable, like: TensorPair, reach: Reach, store: SliceStore) -> None:
        self.layer, self.reach, self._store = layer, reach, store
        self.part_id = active.part_id
        self.micro_batch_id = active.micro_batch_id
        self.sequence_length = active.sequence_length
        self.mode = active.mode
        self.layout, self.dtype = layout_of(like, active.sequence_length), like[0].dtype
        self.kept = TokenBuffer(store.pool, like, self.dtype)
        self.grads = TokenBuffer(store.pool, like, torch.promote_types(self.dtype, torch.float32))
        self.filled = self.reached = 0  # tokens: up to which slices ran, the most that one of them sees
        self.frontier = self.touched = active.sequence_length
        self._own_stop: int | None = None  # the end of the slice whose backward runs, if its own share may stay apart
        self._own: TensorPair | None = None  # this share
        self.kv_needs_grad: bool | None = None  # None: no node was recorded
        self.closed = False

    def __str__(self) -> str:
        return f"layer {self.layer!r} (part {self.part_id}, micro-batch {self.micro_batch_id})"

    def keys_values(self, start: int, stop: int) -> TensorPair:
        """Return views of the keys and values of the tokens [start, stop), [B, H_kv, stop - start, D] each."""
        if not self.kept.holds(start, stop):
            raise SliceStoreError(f"{self}: the keys of tokens [{start}, {stop}) are not kept; they are out of reach")
        return self.kept.at(start, stop)

    def record(self, kv_needs_grad: bool) -> None:
        """Note that an autograd node was recorded for a slice, and whether it needs `grads`.

        Raises SliceStoreError if an earlier node needs them and this one does not, or the other way round.
        """
        if self.kv_needs_grad not in (None, kv_needs_grad):
            raise SliceStoreError(
                f"{self}: keys and values require gradients in some slices, and not in others; let k and v require "
                "gradients in all slices of a micro-batch or in none: detach none by slice, and add what is trained to "
                "the hidden states of all slices, with zeros where it adds nothing"
            )
        self.kv_needs_grad = kv_needs_grad

    def add_grads(
        self, offset: int, dk: torch.Tensor, dv: torch.Tensor, again: bool = False, rows: slice | None = None
    ) -> None:
        """Add the running backward's gradients to the gradients of the keys and values from token `offset` on.

        dk, dv: [B, H_kv, n, D], or of some `rows` of the micro-batch. A backward covers [0, stop) in pieces of any
        size; `again` says that it has added to these tokens before. If all tokens are in reach, the first backward
        copies its pieces, so that nothing has to be zeroed. Otherwise all pieces are added.
        """
        if not self.grads.is_taken:  # keys and values need no gradients
            return
        is_first, stop = self.touched > offset, offset + dk.shape[2]
        # one piece for all of the slice's own tokens, which get no more: `end_backward` adds it on the way to the layer
        if stop == self._own_stop and offset <= self.frontier:
            before = self.frontier - offset
            self._own_stop, self._own = None, (dk[:, :, before:], dv[:, :, before:])
            if not before:
                return
            dk, dv, stop = dk[:, :, :before], dv[:, :, :before], self.frontier
        for total, part in zip(self.grads.at(offset, stop), (dk, dv), strict=True):
            target = total if rows is None else total[rows]
            if is_first and not again:
                target.copy_(part)
            else:
                target.add_(part)

    def accumulated(self, stop: int) -> tuple[int, TensorPair]:
        """Return the first token that got gradients so far, and views of the gradients from there to `stop`."""
        return self.touched, self.grads.at(self.touched, stop)

    def make_room(self, active: ActiveSlice) -> None:
        """Make room for the keys and values of a slice, and drop those before it that it does not reach.

        A backward reads the keys and values of its slice again, so that only evaluation may drop some.
        """
        start, stop, length = active.start, active.stop, self.sequence_length
        self.reached = max(self.reached, stop - self.reach.first_key(start))
        if self.kept.holds(start, stop):
            return
        if self.mode != "eval" or not self.reach.is_limited:
            self.kept.reserve(0, length)
            return
        # in evaluation no backward comes back to keys that are out of reach: room for those in reach is enough
        first, room = self.reach.first_key(start), self.kept.room
        if self.reach.window is not None:
            room = max(room, min(active.num_tokens + self.reach.window - 1, length - first))
        elif stop - first > room:  # a document that goes on: do not grow the buffer a little for each of its slices
            room = min(max(stop - first, 2 * room), length - first)
        self.kept.reserve(first, room, (first, start))

    def make_room_for_grads(self, start: int, stop: int) -> None:
        """Provide gradients for all tokens that the slice [start, stop) reaches; tokens that got nothing yet have 0.

        If all tokens are in reach, its pieces are copied instead.
        """
        if self.mode == "probe":  # any slice may come next
            if not self.grads.is_taken:
                self.grads.reserve(0, self.sequence_length)
                for total in self.grads.at(0, self.sequence_length):
                    total.zero_()
            # later slices never ran; adding to their share costs the same
            self.touched = 0 if stop < self.sequence_length or self.reach.is_limited else stop
            return
        # gradients move with the window: room for what one slice reaches is enough
        first = self.reach.first_key(start)
        if not self.grads.holds(first, stop):
            self.grads.reserve(stop - self.reached, self.reached, (self.touched, stop))
        if self.reach.is_limited:
            for total in self.grads.at(first, self.touched):
                total.zero_()
            self.touched = first

    def advance(self, active: ActiveSlice) -> None:
        """Move the forward frontier over the slice, or raise SliceStoreError."""
        start, stop = active.start, active.stop
        if active.mode == "probe":
            self.filled = self.frontier = stop
        elif active.mode in ("train", "eval"):
            if start != self.filled:
                raise SliceStoreError(f"{self}: slice [{start}, {stop}) {self._problem_of_order(stop)}")
            self.filled = stop
        elif stop > self.filled:
            raise SliceStoreError(
                f"{self}: mode {active.mode!r} runs slice [{start}, {stop}) again, but only [0, {self.filled}) has "
                f"run; the first forward of a slice needs mode 'train'"
            )

    def _problem_of_order(self, stop: int) -> str:
        if stop > self.filled:
            why = f"out of order, the next one must start at token {self.filled}; run the forwards in slice order"
            return f"{why}, without gaps"
        return (
            f"comes a second time, [0, {self.filled}) is filled. Either two attention layers of this part share the "
            f"name {self.layer!r} (give each its own), or a module with plain attention runs twice in a slice, as a "
            "tied layer does (let it call sliced_attention, with a name for each run), or a forward inside a backward "
            f"runs in mode {self.mode!r} (use 'recompute'), or the micro-batch before was not released"
        )

    def begin_backward(self, start: int, stop: int) -> None:
        """Move the backward frontier over [start, stop) and make room for gradients that `add_grads` adds.

        Raises SliceStoreError unless [start, stop) is the next slice of the reverse order.
        """
        if self.closed or (stop != self.frontier and self.mode != "probe"):
            order = f"out of order, the next one must end at token {self.frontier}; run the backwards in reverse slice"
            released = "after the micro-batch was released; release it after its last backward"
            problem = released if self.closed else f"{order} order, each slice once"
            raise SliceStoreError(f"{self}: backward of slice [{start}, {stop}) {problem}")
        self.frontier = start
        is_all_in_grads = self.reach.is_limited or self._store.on_gradients is not None
        self._own_stop, self._own = None if is_all_in_grads else stop, None
        if self.kv_needs_grad:
            self.make_room_for_grads(start, stop)

    def end_backward(self, start: int, stop: int) -> TensorPair | None:
        """Return the complete dK, dV of [start, stop), [B, H_kv, T, D] each: all later slices have added their share.

        None if keys and values need no gradients. The backward of the first slice gives `grads` back to the pool.
        """
        if not self.grads.is_taken:
            return None
        is_first = self.touched > start
        # from here on, pieces of earlier slices add to the gradients that this one has left
        self.touched = self.reach.first_key(start)
        if self._store.on_gradients is not None:
            self._store.on_gradients(self, stop)
        totals, own = self.grads.at(start, stop), self._own or (None, None)
        if is_first and self._own is not None:
            totals, own = self._own, (None, None)
        self._own = None
        dk, dv = (_tokens_first(each, part, self.dtype) for each, part in zip(totals, own, strict=True))
        if start == 0 and self.mode != "probe":  # which runs others after it
            self.grads.give_back()
        return dk, dv

    def check_drained(self) -> None:
        """Raise SliceStoreError if some of the micro-batch's slices or their backwards have not run."""
        if self.mode != "train":
            return
        # without any backward no gradient is lost, unless the whole sequence has one
        if self.kv_needs_grad is not None and self.frontier == self.sequence_length == self.filled:
            self._store.on_unused(self)
        if 0 < self.frontier < self.sequence_length:
            what = f"with the gradients of [0, {self.frontier}) still waiting; run the backward of every slice first"
        elif self.filled < self.sequence_length:
            what = f"after the forward of [0, {self.filled}) of {self.sequence_length} tokens; run all slices first"
        else:
            return
        raise SliceStoreError(f"{self}: released {what}")

    def close(self) -> None:
        """Give all memory back; a backward that still comes is an error."""
        self.closed = True
        self.kept.give_back()
        self.grads.give_back()


class SliceStore:
    """The store of one engine, keyed by (part_id, layer, micro_batch_id).

    The store calls `on_gradients`, if set, after each backward that has added to gradients of the tokens before a stop,
    and `on_unused` for a layer whose output got no gradient in any slice.
    `pool` counts the bytes of keys, values, their gradients and carried states.
    """

    def __init__(self) -> None:
        self.on_gradients: Callable[[SliceEntry, int], None] | None = None
        self.on_unused: Callable[[SliceEntry], None] = lambda entry: None
        # by part and micro-batch: attention's by layer, carried states' by (CarriedEntry, layer, name)
        self._entries: dict[tuple[int, int], dict[Hashable, Any]] = {}
        self.pool = BufferPool()
        self.carried = CarriedStates(self._entries, self.pool.count)

    def write(
        self, active: ActiveSlice, layer: Hashable, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> SliceEntry:
        """Keep the keys and values ([B, H_kv, T, D]) of the active slice; return the entry to read the prefix from.

        `window` says how far back the layer's tokens see, with their own. Mode "weight" only reads. Raises
        SliceStoreError if the slice does not continue the forward frontier (modes train and eval), has not run yet
        (recompute, weight), or differs from earlier slices in shape, dtype or reach.
        """
        # a module that attends by itself would see a share of the tokens and train wrongly
        if active.exchange is not None:
            raise SliceStoreError(
                f"layer {layer!r}: attention by code of its own sees the tokens of one sequence rank only: use "
                "sliced_attention, which exchanges them, or a topology without a 'sequence' axis"
            )
        # the order is checked before memory is touched
        entry = self._lookup(active, layer, (k, v), active.reach(window))
        entry.advance(active)
        # a weight pass runs beside slices that read the same keys
        if active.mode != "weight":
            entry.make_room(active)
            for target, source in zip(entry.kept.at(active.start, active.stop), (k, v), strict=True):
                target.copy_(source)
        return entry

    def _lookup(self, active: ActiveSlice, layer: Hashable, like: TensorPair, reach: Reach) -> SliceEntry:
        of_micro_batch = self._entries.setdefault((active.part_id, active.micro_batch_id), {})
        entry: SliceEntry | None = of_micro_batch.get(layer)
        if entry is None:
            entry = SliceEntry(active, layer, like, reach, self)
            if active.mode == "probe":  # the prefix never ran; its numbers only have to cost what real ones cost
                entry.make_room(active)
                for x in entry.kept.at(0, active.sequence_length):
                    x.fill_(0.5)
            of_micro_batch[layer] = entry  # with its prefix: a probe that ran out of memory may be tried again
        elif entry.layout != (layout := layout_of(like, active.sequence_length)):
            raise SliceStoreError(
                f"{entry}: slice [{active.start}, {active.stop}) brings keys and values for {layout}, but the "
                f"micro-batch began with {entry.layout}; all slices of a micro-batch need the same batch, heads, "
                "length, dtype and device"
            )
        elif entry.reach != reach:
            raise SliceStoreError(
                f"{entry}: slice [{active.start}, {active.stop}) comes with window {reach.window} where the "
                f"micro-batch began with {entry.reach.window}, or with other documents; all slices of a micro-batch "
                "need the same"
            )
        return entry

    def release(self, part_id: int, micro_batch_id: int) -> None:
        """Give back the buffers of a micro-batch, after its last backward (training) or last forward (evaluation).

        Raises SliceStoreError if a layer is only partly drained, or waits for a backward that never came.
        """
        for entry in self._entries.get((part_id, micro_batch_id), {}).values():
            # all entries are checked before any is closed, so that the message can name the first cause
            entry.check_drained()
        for entry in self._entries.pop((part_id, micro_batch_id), {}).values():
            entry.close()

    def reset(self) -> None:
        """Drop all entries in whatever state, after an exception; their buffers go back to the pool."""
        for entry in self._all():
            entry.close()
        self._entries.clear()

    def assert_drained(self) -> None:
        """Raise SliceStoreError if any entry is left; called at the end of a batch."""
        if left := [str(entry) for entry in self._all()]:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise SliceStoreError(
                f"the slice store is not drained at the end of the batch: {', '.join(left[:4])}{more}; release() every "
                f"micro-batch of every part"
            )

    def layers_of(self, part_id: int, micro_batch_id: int) -> list[LayerBytes]:
        """Return the bytes that each layer of a part takes for all tokens of a micro-batch, in reach or not."""
        layers = []
        entries = self._entries.get((part_id, micro_batch_id), {}).values()
        for entry in (entry for entry in entries if isinstance(entry, SliceEntry)):
            length, per_token = entry.sequence_length, entry.grads.bytes_per_token if entry.kv_needs_grad else 0
            layers.append(LayerBytes(length * entry.kept.bytes_per_token, length * per_token, entry.reach.window))
        return layers

    def _all(self) -> Iterator[Any]:
        for of_micro_batch in self._entries.values():
            yield from of_micro_batch.values()


def _tokens_first(x: torch.Tensor, part: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Copy x, or x + part, [B, H, T, D], in the memory order [B, T, H, D], which a projection's backward reads."""
    batch, heads, tokens, dim = x.shape
    target = torch.empty(batch, tokens, heads, dim, dtype=dtype, device=x.device).transpose(1, 2)
    return target.copy_(x) if part is None else torch.add(x, part, out=target)
