"""Keep the states that layers hand from slice to slice: the second kind of the slice store, "carried".

The slice that ends at token b writes the state of boundary b; the slice that begins there reads it. The state is then a
leaf of that slice's graph, and autograd leaves its gradient there. Backward runs over the slices in reverse, so the
gradient is complete when the backward of the slice that wrote the state takes it. Two frontiers check that order as
for keys and values: `filled` grows with the forwards, `frontier` shrinks with the backwards.

Memory per layer: one state per boundary in training, from the forward of the slice that writes it to its backward; in
evaluation only the newest one. States have memory of their own, outside of the pool: a graph, or work that waits for a
split weight gradient, may hold them longer than the store does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terapipe_ds.attention.active_slice import ActiveSlice, SliceStoreError


class _Kept(NamedTuple):
    """Hold the state of one boundary: its leaf (None where a document starts in each row) and the rows set to zero."""

    state: Tensor | None
    version: int = 0
    begun: tuple[int, ...] = ()


class CarriedEntry:
    """Hold the states of one layer, name and micro-batch by boundary."""

    def __init__(self, active: ActiveSlice, layer: Hashable, name: str, owner: CarriedStates) -> None:
        self.layer, self.name = layer, name
        self.part_id = active.part_id
        self.micro_batch_id = active.micro_batch_id
        self.sequence_length = active.sequence_length
        self.mode = active.mode
        self.filled = 0
        self.frontier = active.sequence_length
        self.recorded = False  # an autograd node waits for its backward
        self.closed = False
        self._owner = owner
        self._kept: dict[int, _Kept] = {}
        self._without_state: ActiveSlice | None = None  # a probe that found none, and none in its recomputation either

    def __str__(self) -> str:
        return f"state {self.name!r} of layer {self.layer!r} (part {self.part_id}, micro-batch {self.micro_batch_id})"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the states that are kept now."""
        return sum(kept.state.nbytes for kept in self._kept.values() if kept.state is not None)

    def read(self, active: ActiveSlice) -> Tensor | None:
        """Return the state of the boundary where the slice starts."""
        if active.mode == "probe":
            return self._state_to_measure_with(active)
        self._check_order(active, "reads")
        if active.start == 0:
            return None
        # a layer that runs again finds the very leaf of its first run, and its gradient adds up there
        kept = self._kept.get(active.start)
        if kept is None:
            raise SliceStoreError(
                f"{self}: mode {active.mode!r} reads the state at token {active.start} again, but the slice before has "
                "run its backward, which ends the state; read it before that, and cut all passes alike"
            )
        if kept.state is not None and kept.state._version != kept.version:
            raise SliceStoreError(
                f"{self}: the state at token {active.start} was changed in place after carry.read() gave it; the layer "
                "may run again in its backward, so compute the new state in a tensor of its own"
            )
        return kept.state

    def _check_order(self, active: ActiveSlice, does: str) -> None:
        """Raise SliceStoreError unless it is the slice's turn."""
        start, stop = active.start, active.stop
        if active.mode in ("recompute", "weight"):
            if stop <= self.filled:
                return
            why = f"in mode {active.mode!r}, but only [0, {self.filled}) has run; the first forward needs mode 'train'"
        elif start == self.filled:
            return
        elif start > self.filled:
            why = f"but only [0, {self.filled}) has written it; every slice writes it, in slice order and without gaps"
        else:
            why = (
                f"but [0, {self.filled}) has written it already: two layers of this part share the name (give each its "
                "own), or the layer reads after it writes, or a forward inside a backward runs in mode "
                f"{active.mode!r} (use 'recompute'), or the micro-batch before was not released"
            )
        raise SliceStoreError(f"{self}: slice [{start}, {stop}) {does} it {why}")

    def _state_to_measure_with(self, active: ActiveSlice) -> Tensor | None:
        """Return what a probe reads, whose previous slice never ran: the last state written, as a leaf of its own."""
        kept = next(iter(self._kept.values()), None)
        if active.start == 0 or active is self._without_state or kept is None or kept.state is None:
            self._without_state = active
            return None
        return kept.state.detach().requires_grad_(kept.state.requires_grad)

    def write(self, active: ActiveSlice, state: Tensor) -> None:
        """Keep a copy of the state at the boundary where the slice ends.

        A forward that runs again writes nothing: the next slice, which read the state, has run its backward.
        """
        stop = active.stop
        if active.mode != "probe":
            self._check_order(active, "writes")
        if active.mode in ("recompute", "weight"):
            return
        self.filled = stop
        # no backward comes: the newest state alone is read again
        if active.mode != "train":
            self._drop_all()
        if stop < active.sequence_length or active.mode == "probe":
            self._kept[stop] = self._copy(active, state)

    def _copy(self, active: ActiveSlice, state: Tensor) -> _Kept:
        begun: tuple[int, ...] = ()
        if active.documents is not None:
            # a row whose document ends here hands on nothing, forward or backward
            starts = active.documents.starts
            begun = tuple(row for row, of_row in enumerate(starts) if active.stop in of_row)
            if len(begun) == len(starts):
                return _Kept(None)
            if begun and (state.dim() == 0 or len(state) != len(starts)):
                raise SliceStoreError(
                    f"{self}: a document starts at token {active.stop} in {len(begun)} of {len(starts)} rows, whose "
                    f"state has to be zero, but the state is {list(state.shape)}; give it the rows as dimension 0"
                )
        # Not an inference tensor, whatever the caller does; and no view, which would keep its base alive.
        with torch.inference_mode(False), torch.no_grad():
            kept = state.detach().clone()
            for row in begun:  # a list as an index would go to the device, and the host would wait
                kept[row].zero_()
        differentiable = kept.is_floating_point() or kept.is_complex()
        # Without gradients in training, this is the first forward of a reentrant checkpoint, which reveals nothing.
        needs_grad = differentiable and (state.requires_grad or not torch.is_grad_enabled())
        if needs_grad and active.mode != "eval":
            kept.requires_grad_().register_post_accumulate_grad_hook(self._gradient_hook(active.stop))
        self._owner.count(kept.nbytes)
        return _Kept(kept, kept._version, begun)

    def _gradient_hook(self, boundary: int) -> Callable[[Tensor], None]:
        """Return the hook that runs when autograd has added to the gradient of the state at `boundary`."""

        def look(leaf: Tensor) -> None:
            if self.closed or self.frontier < boundary:
                raise SliceStoreError(
                    f"{self}: the state at token {boundary} got a gradient after the slice before had run its "
                    "backward; run the backwards in reverse slice order, each slice once"
                )
            if self._owner.on_gradient is not None and leaf.grad is not None:
                self._owner.on_gradient(self, boundary, leaf.grad)

        return look

    def take_gradient(self, active: ActiveSlice) -> Tensor | None:
        """Move the backward frontier over the slice and return the gradient of the state that it wrote.

        It is None if no later slice left one. Raises SliceStoreError unless the slice is the next one in reverse.
        """
        start, stop = active.start, active.stop
        if self.closed:
            problem = "after the micro-batch was released; release it after its last backward"
        elif active.mode == "probe":
            return None
        elif stop != self.frontier:
            problem = (
                f"out of order, the next one must end at token {self.frontier}; run the backwards in reverse slice "
                "order, each slice once, and use the tensor that carry.write() returns in every slice"
            )
        else:
            self.frontier = start
            # popped: the memory of a state ends with the backward of the slice that wrote it
            kept = self._kept.pop(stop, _Kept(None))
            if kept.state is None:
                return None
            self._owner.count(-kept.state.nbytes)
            gradient = kept.state.grad
            if gradient is not None and kept.begun:
                gradient = gradient.clone()  # autograd may have given its memory to others, such as a waiting W
                for row in kept.begun:
                    gradient[row].zero_()
            return gradient
        raise SliceStoreError(f"{self}: backward of slice [{start}, {stop}) {problem}")

    def pass_over(self, active: ActiveSlice) -> None:
        """Move the backward frontier over a slice that ran again, and whose state and output need no gradient."""
        if active.mode == "recompute" and active.stop == self.frontier:
            self.take_gradient(active)

    def check_drained(self) -> None:
        """Raise SliceStoreError if some of the micro-batch's slices or their backwards have not run."""
        if self.mode == "probe":
            return
        if self.filled < self.sequence_length:
            what = f"after [0, {self.filled}) of {self.sequence_length} tokens had written it; every slice writes it"
        elif 0 < self.frontier < self.sequence_length:
            what = f"with the gradients of [0, {self.frontier}) still waiting; run the backward of every slice first"
        elif self.frontier and self.recorded:
            what = (
                "before any backward although its output needs gradients; use the tensor that carry.write() returns, "
                "and run the backward of every slice first, or freeze the layer if the loss does not use it"
            )
        elif any(kept.state is not None and kept.state.grad is not None for kept in self._kept.values()):
            what = (
                "with gradients of its states that no backward has taken: carry.write() was called without gradients; "
                "call it outside of torch.no_grad(), and use the tensor that it returns"
            )
        else:
            return
        raise SliceStoreError(f"{self}: released {what}")

    def close(self) -> None:
        """Drop all states; a backward that still comes is an error."""
        self.closed = True
        self._drop_all()

    def _drop_all(self) -> None:
        self._owner.count(-self.num_bytes)
        self._kept.clear()


class CarriedStates:
    """Read and write the carried states of one engine. The slice store holds their entries and attention's.

    The store calls `count` with the bytes that come and go. It calls `on_gradient`, if set, for each gradient that a
    slice's backward has left for the state at a token.
    """

    def __init__(self, entries: dict[tuple[int, int], dict[Hashable, Any]], count: Callable[[int], None]) -> None:
        self.count = count
        self.on_gradient: Callable[[CarriedEntry, int, Tensor], None] | None = None
        self._entries = entries

    def read(self, active: ActiveSlice, layer: Hashable, name: str) -> Tensor | None:
        """Return the state that the slice reads; see `carry.read`."""
        of_micro_batch, key = self._of(active.part_id, active.micro_batch_id), (CarriedEntry, layer, name)
        if active.mode == "probe" and key not in of_micro_batch:  # a recomputation must find none either
            of_micro_batch[key] = CarriedEntry(active, layer, name, self)
        if key in of_micro_batch:
            state: Tensor | None = of_micro_batch[key].read(active)
            return state
        if active.start == 0:
            return None
        raise SliceStoreError(
            f"layer {layer!r} (part {active.part_id}, micro-batch {active.micro_batch_id}): slice [{active.start}, "
            f"{active.stop}) reads the state {name!r}, which no slice before it has written; every slice calls "
            "carry.write() with the same layer and name, the first one too, and slices run in order"
        )

    def write(self, active: ActiveSlice, layer: Hashable, name: str, state: Tensor) -> CarriedEntry:
        """Keep the state that the slice writes; see `carry.write`."""
        of_micro_batch, key = self._of(active.part_id, active.micro_batch_id), (CarriedEntry, layer, name)
        entry: CarriedEntry | None = of_micro_batch.get(key)
        if entry is None:
            entry = of_micro_batch[key] = CarriedEntry(active, layer, name, self)
        entry.write(active, state)
        return entry

    def bytes_of(self, part_id: int, micro_batch_id: int) -> int:
        """Return the bytes of the states that a micro-batch keeps now on all layers of a part."""
        entries = self._of(part_id, micro_batch_id).values()
        return sum(entry.num_bytes for entry in entries if isinstance(entry, CarriedEntry))

    def _of(self, part_id: int, micro_batch_id: int) -> dict[Hashable, Any]:
        return self._entries.setdefault((part_id, micro_batch_id), {})
