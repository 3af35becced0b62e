"""Tell layers which slice is running: the one piece of global state of the package.

The engine pushes an immutable `ActiveSlice` around the forward *and* around the backward of a slice, because
activation checkpointing runs a forward again inside the backward and must see the same slice. The stack belongs to
the process and not to a thread: autograd runs CUDA backward passes in a thread of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from terapipe_ds.attention.document_edges import Documents, are_position_ids, have_edges, starts_of
from terapipe_ds.attention.reach import Reach

MODES = ("train", "eval", "recompute", "weight", "probe")


class SliceStoreError(RuntimeError):
    """Slices ran in an order that would give a wrong result, or a micro-batch was released too early."""


class Store(Protocol):
    """Declare the part of `SliceStore` that sliced attention and `carry` use; that class describes it."""

    @property
    def carried(self) -> Any: ...  # CarriedStates

    def write(self, active: ActiveSlice, layer: Hashable, k: Tensor, v: Tensor, window: int | None = None) -> Any: ...


@dataclass(frozen=True, eq=False)
class ActiveSlice:
    """The tokens [start, stop) of one micro-batch's sequences of `sequence_length` tokens, as one part runs them.

    `mode` says why the layers run:
      train      first forward of a training micro-batch (keys and values are appended to the store)
      eval       forward without a backward to come
      recompute  any forward inside a backward (activation checkpointing): the store is rewritten in place
      weight     a forward on behalf of a split weight-gradient pass: the store is read-only
      probe      a measurement: any slice may run at any time, even before its prefix
    `documents` says where documents begin in packed rows; None where each row is one document.
    `extras` carries whatever else the engine knows about the tokens.
    `exchange` is set if sequence ranks divide the tokens of a slice: [start, stop) are then the tokens of this rank,
    and `sliced_attention` reaches the other tokens through `exchange`.
    `kept` is set while a function runs that will run again in the backward, if it keeps the results of attention.
    `keeps_attention` is set in all runs of such a slice, so that attention takes one path; a layer may checkpoint too.
    `wants_logits` is False if the loss takes the input of the output matrix: the last layer then returns its input.
    """

    start: int
    stop: int
    sequence_length: int
    micro_batch_id: int = 0
    slice_id: int = 0
    part_id: int = 0
    mode: str = "train"
    documents: Documents | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    store: Store | None = None
    exchange: Callable[..., Tensor] | None = None
    wants_logits: bool = True
    kept: Callable[..., Any] | None = None
    keeps_attention: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.sequence_length:
            raise ValueError(
                f"a slice needs 0 <= start < stop <= sequence_length, got start={self.start}, stop={self.stop}, "
                f"sequence_length={self.sequence_length}"
            )
        if self.mode not in MODES:
            raise ValueError(f"unknown slice mode {self.mode!r}; use one of {', '.join(MODES)}")

    @property
    def num_tokens(self) -> int:
        """Return T, the tokens of this slice."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Return whether the slice is the whole sequence: nothing has to be kept for other slices."""
        return self.start == 0 and self.stop == self.sequence_length

    def reach(self, window: int | None) -> Reach:
        """Return how far back the tokens see in a layer with that window."""
        return Reach(
            None if window is None or window >= self.sequence_length else window,
            self.documents.starts if self.documents is not None and have_edges(self.documents.starts) else None,
        )

    def replace(self, **changes: Any) -> ActiveSlice:
        """Return a copy with some fields changed, e.g. `active.replace(mode="recompute")` around a backward."""
        return dataclasses.replace(self, **changes)


_stack: list[ActiveSlice] = []


def active_slice() -> ActiveSlice | None:
    """Return the slice that is running now, or None outside of sliced execution."""
    return _stack[-1] if _stack else None


@contextmanager
def push_slice(active: ActiveSlice) -> Iterator[ActiveSlice]:
    """Make a slice the running one for the body; on exit remove exactly what was pushed.

    An exception inside the body may have left other entries on top (a generator that was never closed).
    These are removed too, so that the stack returns to its earlier state.
    """
    depth = len(_stack)
    _stack.append(active)
    try:
        yield active
    finally:
        # entries above belong to generators that were left open; an entry below would be our own bug
        if len(_stack) <= depth or _stack[depth] is not active:
            raise RuntimeError(
                "the stack of active slices was changed meanwhile; leave push_slice() blocks in reverse order"
            )
        del _stack[depth:]


@contextmanager
def documents(position_ids: Tensor) -> Iterator[Documents]:
    """Have attention keep to the documents of packed rows for the body, outside the engine; yield them.

    position_ids: [B, L] integers, the rows of the batch that the body runs whole. A document starts where an id is not
    the one before + 1. Keep the block open for the backward too, where layers are recomputed in it.

    Raises RuntimeError where a slice is running: the engine takes documents from the batch (`"documents"` in its
    section).
    """
    if (active := active_slice()) is not None:
        raise RuntimeError(
            f"documents() was called while slice [{active.start}, {active.stop}) of {active.sequence_length} tokens "
            "runs; the engine gives its slices the documents of the batch itself, by the key 'documents' of its section"
        )
    if not are_position_ids(position_ids):
        kind = f"{list(position_ids.shape)} of {position_ids.dtype}"
        raise ValueError(f"documents() takes the position ids of whole rows, integers [B, L] and some, got {kind}")
    length = position_ids.shape[1]
    # a whole sequence, for which attention keeps nothing: there is no store
    edges = Documents(starts_of(position_ids), 0, length)
    with push_slice(ActiveSlice(0, length, length, documents=edges)):
        yield edges
