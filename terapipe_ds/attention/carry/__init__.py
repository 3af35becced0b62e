"""Hand a layer's state from slice to slice, and its gradient back, as `sliced_attention` does with keys and values.

A recurrence, a convolution or a token shift needs of the tokens before a slice only what fits in one tensor:

    state = carry.read(layer, "recurrent")            # None on the first slice
    out, last = mixer(x, initial_state=state)
    out = carry.write(layer, "recurrent", last, out)  # the gradient of `last` arrives through `out`

Outside of sliced execution, and if one slice is the whole sequence, `read` returns None and `write` returns `output`.

In a compiled layer both run outside of its graphs: only then is it known whether there is a state, and its shape.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe_ds.attention.active_slice import ActiveSlice, SliceStoreError, active_slice
from terapipe_ds.attention.carry.states import CarriedEntry, CarriedStates

__all__ = ["read", "write"]


@torch.compiler.disable(recursive=True)
def read(layer: Hashable, name: str) -> Tensor | None:
    """Return the state that the previous slice wrote: a leaf, whose gradient goes back to that slice.

    `layer` is any hashable name that is unique within the part, `name` tells its states apart. Rows in which a document
    starts at the slice's start are zero. The result is None on the first slice, if a document starts in all rows, and
    if the slice is the whole sequence; begin with zeros then. Read a state before you write it.

    Raises SliceStoreError if the previous slice wrote no such state, or slices run in an order that cannot be right.
    """
    active = active_slice()
    if active is None or active.is_whole:
        return None
    return _states(active, layer, name).read(active, layer, name)


@torch.compiler.disable(recursive=True)
def write(layer: Hashable, name: str, state: Tensor, output: Tensor) -> Tensor:
    """Keep a copy of `state` for the next slice; return `output`, tied to it: use the returned tensor from then on.

    The backward of the returned tensor adds the gradient that the next slice has left for `state`. Rows of the batch
    are dimension 0 of `state`; its dtype is kept. Every slice writes, the last one too.

    Raises SliceStoreError where slices run in an order that cannot be right, or without a store, TypeError where state
    or output is no tensor.
    """
    active = active_slice()
    if active is None or active.is_whole:
        return output
    if not (torch.is_tensor(state) and torch.is_tensor(output)):
        raise TypeError(
            f"layer {layer!r}, state {name!r}: carry.write() takes a state and an output that are one tensor each, got "
            f"{type(state).__name__} and {type(output).__name__}; ask the kernel for its last state (of fla: "
            "output_final_state=True), and write one tensor of a tuple of outputs"
        )
    # written also where nothing needs gradients: the next slice reads it
    entry = _states(active, layer, name).write(active, layer, name, state)
    if not torch.is_grad_enabled():
        return output
    # no node will come back for this slice, so the frontier moves now
    if not (output.requires_grad or state.requires_grad):
        entry.pass_over(active)
        return output
    entry.recorded = True
    tied: Tensor = _Tie.apply(output, state, entry, active)
    return tied


def _states(active: ActiveSlice, layer: Hashable, name: str) -> CarriedStates:
    if active.exchange is not None:
        raise SliceStoreError(
            f"layer {layer!r}, state {name!r}: carried states cannot be combined with a 'sequence' axis of the "
            "topology: the ranks run their tokens of a slice at the same time, and a recurrence needs them one after "
            "the other; give these ranks to the pipeline or to data parallelism"
        )
    if active.store is None:
        raise SliceStoreError(
            f"layer {layer!r}, state {name!r}: slice [{active.start}, {active.stop}) of {active.sequence_length} "
            "tokens needs a slice store; push an ActiveSlice with store=SliceStore()"
        )
    carried: CarriedStates = active.store.carried
    return carried


class _Tie(torch.autograd.Function):
    """Hand on a slice's output; its backward takes the gradient of the slice's state, which is complete by then."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, state: Tensor, entry: CarriedEntry, active: ActiveSlice) -> Tensor:
        ctx.entry, ctx.active, ctx.like = entry, active, (state.shape, state.dtype, state.device)
        return output.detach()  # no view: the layer may go on in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # all later slices have run: the gradient that they left for the state is complete
        gradient = ctx.entry.take_gradient(ctx.active)
        if ctx.active.mode == "probe" and ctx.active.stop < ctx.active.sequence_length:
            shape, dtype, device = ctx.like  # no slice came after; ordinary numbers cost what they do in training
            gradient = torch.full(shape, 1e-3, dtype=dtype, device=device)
        return grad, gradient if ctx.needs_input_grad[1] else None, None, None
