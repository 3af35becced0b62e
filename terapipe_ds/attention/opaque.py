"""Define sliced attention and positions as custom operators, which torch's compiler calls and does not look into.

The compiler sees shapes alone. The active slice, its store and the name of the layer are read when an operator runs,
so that one graph serves all slices and all layers of a kind. A call that will have a backward leaves its `Call` here,
under a number that the graph saves as a tensor: the backward cannot run without it, nor before its forward.

A call is named by the layer that runs and by its number in that run. torch's compiler reads the number while it traces,
so that each call has its own in the graph: equal calls are not merged, and a call keeps its name wherever it is moved.

An operator changes only the store's data of its own call, once per run of the layer, so that the compiler may move it
among others as its tensors allow. The compiler may leave out an operator whose output is not used, in the forward and
the backward alike. No operator is in a list of those that the compiler may run a second time in the backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.attention.active_slice import SliceStoreError, active_slice
from terapipe_ds.attention.call import Call, Options, autocast, gradient_of_sinks, prepare
from terapipe_ds.attention.document_edges import Documents, to_device


# The engine names the layer before it runs. As arguments of the operators, names would each make a graph of their own.
class _Running:
    """Hold the compiled layer that runs now, and the count of its attention calls in this run."""

    name: str | None = None
    calls: int = 0


running = _Running()


@contextmanager
def running_layer(name: str) -> Iterator[None]:
    """Name the compiled layer that runs for the body, and count its calls from 0."""
    before = running.name, running.calls
    running.name, running.calls = name, 0
    try:
        yield
    finally:
        running.name, running.calls = before


def refuse_outside_of_graph(layer: Hashable) -> None:
    """Raise SliceStoreError where a compiled layer runs, and torch has left its graph for a call of attention."""
    if running.name is not None:
        raise SliceStoreError(
            f"layer {layer!r} is to be compiled (terapipe.compile), but torch runs its attention outside of the graph: "
            "something in the layer cannot be traced, or it was compiled too often. TORCH_LOGS=graph_breaks,recompiles "
            "shows what; mend it, or leave compile_safe out of the layer's class, or set terapipe.compile to false"
        )


def attend_in_graph(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> Tensor:
    """Attend while torch's compiler traces: by the operator below, whose call gets the layer's next number."""
    # an operator sees no autocast: the graph has the casts
    q, k, v = autocast(q, k, v)
    kv_needs_grad = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    of_others = q.requires_grad or (sinks is not None and sinks.requires_grad)
    needs_grad = kv_needs_grad or (torch.is_grad_enabled() and of_others)
    number, running.calls = running.calls, running.calls + 1
    out: Tensor = torch.ops.terapipe_ds.attend(q, k, v, sinks, *options, needs_grad, kv_needs_grad, number)[0]
    return out


_calls: dict[int, Call] = {}
_numbers = itertools.count()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.custom_op("terapipe_ds::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    dropout_p: float,
    window: int | None,
    softcap: float | None,
    needs_grad: bool,
    kv_needs_grad: bool,
    number_of_call: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `sliced_attention` does; return output, log-sum-exp and the number of the call, which is -1 without.

    The output lies in memory as [B, T, H, D_v]. `number_of_call` tells the calls of one layer apart.
    """
    # without a name two layers would write to one entry of the store
    if running.name is None:
        raise SliceStoreError(
            "sliced_attention runs in a layer that was compiled outside of the engine, so that its name is "
            "not known; leave torch.compile out and set terapipe.compile to true"
        )
    if (active := active_slice()) is not None and active.exchange is not None:
        raise SliceStoreError(
            "a compiled layer cannot exchange heads with sequence ranks: set terapipe.compile to false"
        )
    name = running.name, number_of_call
    call, q, k, v = prepare(q, k, v, name, Options(scale, dropout_p, window, softcap), sinks)
    if call.active.is_whole:  # the compiler may use the memory of k and v for something else
        k, v = k.clone(), v.clone()
    with torch.set_grad_enabled(needs_grad):  # the store asks for this; no tensor here has a graph
        out, lse = call.forward(q.detach(), k.detach(), v.detach(), sinks)
    # the backward finds its call by this number, which the graph saves as it saves any tensor
    number = torch.full((1,), -1, dtype=torch.int64, device="cpu")
    if needs_grad:
        call.record(kv_needs_grad)
        call.hold(k, v)
        number.fill_(next(_numbers))
        _calls[key := int(number)] = call
        weakref.finalize(number.untyped_storage(), _calls.pop, key, None)  # whoever saves it may detach it
    # nothing is copied if the output already lies as [B, T, H, D]
    out = out.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse.detach().to(_wide(q)).contiguous(), number


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, scale: Any, dropout_p: Any, window: Any, softcap: Any, *needs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
    lse = q.new_empty((batch, heads, tokens), dtype=_wide(q))
    return out, lse, torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.custom_op("terapipe_ds::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, number: Tensor, sinks: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, of the slice's keys and values, and of the sinks (empty without sinks)."""
    # taken out: a second backward of the same forward would add its gradients twice
    call = _calls.pop(int(number), None)
    if call is None:
        raise SliceStoreError("a compiled layer ran its backward twice, or after its forward had run again")
    batch, _, tokens, dim = q.shape
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        d_q, *d_kv = call.backward(grad, q, out, lse)
        d_sinks = q.new_empty(0) if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
    # the compiler has planned with these shapes and strides, whatever the kernel returns
    results = [q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dim)]
    results.append(q.new_empty(batch, heads, tokens, out.shape[3]))
    for result, gradient in zip(results, (d_q, *d_kv), strict=True):
        result.zero_() if gradient is None else result.copy_(gradient)
    return results[0], results[1], results[2], d_sinks


@attend_backward.register_fake
def _(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, number: Tensor, sinks: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, _, tokens, dim = q.shape
    d_k, d_v = q.new_empty(batch, heads, tokens, dim), q.new_empty(batch, heads, tokens, out.shape[3])
    return q.new_empty(q.shape), d_k, d_v, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, sinks, *_ = inputs
    out, lse, number = output
    ctx.mark_non_differentiable(lse, number)
    ctx.heads = k.shape[1]
    ctx.save_for_backward(q, out, lse, number, sinks)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    q, out, lse, number, sinks = ctx.saved_tensors
    d_q, d_k, d_v, d_sinks = attend_backward(grad, q, out, lse, number, sinks, ctx.heads)
    return d_q, d_k, d_v, None if sinks is None else d_sinks, None, None, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("terapipe_ds::position_ids", mutates_args=())
def position_ids(like: Tensor, table_size: int) -> Tensor:
    """Return the place of each token of `like` [B, T, ...] in its document, int64 [B, T].

    Raises ValueError if a place is `table_size` or more, unless `table_size` is 0.
    """
    active = active_slice()
    batch, tokens = like.shape[:2]
    start = 0 if active is None else active.start
    documents = None if active is None else active.documents
    places = (documents or Documents(((0,),), start, start + tokens)).position_ids().expand(batch, tokens)
    if table_size and int(places.max()) >= table_size:
        problem = f"a sequence of at least {int(places.max()) + 1} tokens, with learned positions for {table_size}"
        raise ValueError(f"{problem}: give max_sequence_length >= {int(places.max()) + 1} or shorter sequences")
    return to_device(places.contiguous(), like.device)


@position_ids.register_fake
def _(like: Tensor, table_size: int) -> Tensor:
    return like.new_empty(like.shape[:2], dtype=torch.int64)


@torch.library.custom_op("terapipe_ds::row_positions", mutates_args=())
def row_positions(like: Tensor) -> Tensor:
    """Return the positions in the row of the tokens of `like` [B, T, ...], int64 [T]."""
    active = active_slice()
    start = 0 if active is None else active.start
    return torch.arange(start, start + like.shape[1], device=like.device)


@row_positions.register_fake
def _(like: Tensor) -> Tensor:
    return like.new_empty((like.shape[1],), dtype=torch.int64)
