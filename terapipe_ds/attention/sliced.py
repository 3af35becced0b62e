"""Define `sliced_attention`, which a model calls instead of `F.scaled_dot_product_attention`.

The forward of a slice appends its keys and values to the slice store and attends to all tokens so far; the backward
adds to the gradients that the store holds for [0, stop) and returns the slice's own gradients, which are complete by
then. The graph saves nothing of the store (later slices write the same buffers): a node keeps its queries, its output
and the log-sum-exp of its scores, and reads keys and values in place.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe_ds.attention import opaque
from terapipe_ds.attention.active_slice import SliceStoreError, active_slice
from terapipe_ds.attention.call import (
    Call,
    Options,
    autocast,
    check_inputs,
    gradient_of_sinks,
    prepare,
    without_autocast,
)


def sliced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Hashable,
    scale: float | None = None,
    dropout_p: float = 0.0,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal self-attention of the active slice's tokens over all tokens of the sequence so far.

    q: [B, H, T, D]; k: [B, H_kv, T, D]; v: [B, H_kv, T, D_v], H a multiple of H_kv (query head h reads key head
    h // (H / H_kv)). Returns [B, H, T, D_v]. T is the length of the active slice; k and v are those of its own tokens,
    positions already applied. `layer` is any hashable name that is unique within the part (a layer index, a module
    path). `scale` defaults to 1 / sqrt(D). As in `F.scaled_dot_product_attention`, `dropout_p` acts whenever it is not
    0: pass 0.0 in evaluation.

    `window`: a token sees itself and the `window - 1` tokens before it, None all of them. `softcap`: a scaled score s
    becomes softcap * tanh(s / softcap). `sinks` [H]: a learned logit per query head that joins the denominator of the
    softmax. Where the active slice has documents, a token sees only tokens of its own document. In training, do not
    change q or the result in place: the backward needs both, as in torch's fused kernels.

    A call takes the first of these paths that fits:

        torch compiles the layer              one operator of the graph, which makes the call when it runs (`opaque`)
        sequence ranks divide the slice       the ranks exchange tokens for heads (`exchange`), then one of those below
        the whole sequence, plainly causal    `F.scaled_dot_product_attention`
        the whole sequence                    a `Call` of a backend; the node saves keys and values
        a slice                               a `Call` of a backend over the slice store

    Without an active slice the tokens are the whole sequence; if sequence ranks divide the slice, T counts this rank's.

    Raises ValueError for shapes or values that do not fit or a forced backend that does not take them, SliceStoreError
    if slices run in an order that cannot give the right result, or without a store.
    """
    # while torch traces nothing of this slice may become a constant of the graph
    if torch.compiler.is_compiling():  # `layer` is not read here: each one would have a graph of its own
        return opaque.attend_in_graph(q, k, v, sinks, Options(scale, dropout_p, window, softcap))
    opaque.refuse_outside_of_graph(layer)
    active = active_slice()
    # the call that the ranks make together runs with the whole slice as the active one, so that it ends up below
    if active is not None and active.exchange is not None:
        # on each rank before the first message: a rank alone in a collective would hang
        q, k, v = autocast(q, k, v)
        check_inputs(q, k, v, active, layer, dropout_p)
        options: Any = {"layer": layer, "scale": scale, "dropout_p": dropout_p, "window": window, "softcap": softcap}
        return active.exchange(functools.partial(sliced_attention, **options), q, k, v, layer, sinks)
    # torch's own function is the fastest where nothing has to be kept for other slices
    asks_nothing = window is None and softcap is None and sinks is None and v.shape[-1] == q.shape[-1]
    keeps = active is not None and active.keeps_attention
    is_plain = active is None or (active.is_whole and active.reach(window).starts is None)
    is_plain = is_plain and k.shape[-2] == q.shape[-2]  # else torch's causal mask is wrong, and `prepare` refuses
    if asks_nothing and is_plain and not keeps:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
    # checks come before anything is written, so that an error leaves the store unchanged
    call, q, k, v = prepare(q, k, v, layer, Options(scale, dropout_p, window, softcap), sinks)
    with without_autocast(q.device):
        needs_grad = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        if torch.is_grad_enabled() and needs_grad:
            return _SlicedAttention.apply(q, k, v, sinks, call)
        return call.forward(q, k, v, sinks)[0]


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        # q is saved until the backward, beside all other slices in flight: as a view it would keep K and V alive twice
        if q.untyped_storage().nbytes() > q.numel() * q.element_size():
            q = q.clone(memory_format=torch.contiguous_format)
        out, lse = call.forward(q, k, v, sinks)
        call.record(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        ctx.call = call
        out = out.detach()  # no view, so that the backward detects an in-place change and names the layer
        ctx.save_for_backward(q, out, lse, sinks, *((k, v) if call.active.is_whole else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        try:
            q, out, lse, sinks, *keys_values = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            what = f"layer {ctx.call.layer!r}: an input or output of sliced_attention() was changed in place before its"
            raise SliceStoreError(f"{what} backward, which needs it: work on a copy (out = out * gate)") from error
        # a checkpoint, or an offload to the host, may have made other tensors of them meanwhile
        if keys_values:
            ctx.call.hold(*keys_values)
        with without_autocast(grad.device):
            grads = list(ctx.call.backward(grad, q, out, lse))
            d_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        # autograd takes None, and nothing else, for what needs no gradient
        grads = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)]
        return *grads, d_sinks, None
