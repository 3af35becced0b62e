"""`sliced_attention`: what a model calls instead of `F.scaled_dot_product_attention`.

The forward of a slice appends its keys and values to the slice store and attends to all tokens so far; the backward adds
to the gradients of the prefix that the store holds and returns the complete gradients of the slice's own tokens. Nothing
of the store is saved for the backward (later slices write the same buffers): each node keeps its queries, its output and
the log-sum-exp of its scores, and reads keys and values where they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from terapipe_ds.attention.active_slice import ActiveSlice, active_slice
from terapipe_ds.attention.backends import choose_backend
from terapipe_ds.attention.kernels import Backend
from terapipe_ds.attention.slice_store import SliceEntry, SliceStore, SliceStoreError

Tensor = torch.Tensor


def sliced_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: Hashable, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Causal self-attention of the active slice's tokens over all tokens of the sequence so far.

    q: [B, H, T, D]; k, v: [B, H_kv, T, D] with H a multiple of H_kv (query head h reads key head h // (H / H_kv)). Returns
    [B, H, T, D]. T is the length of the active slice; k and v are those of its own tokens only, with positions already
    applied. `layer` is any hashable name that is unique within the part (a layer index, a module path). `scale` defaults to
    1 / sqrt(D). Like `F.scaled_dot_product_attention`, `dropout_p` is applied whenever it is not 0: pass 0.0 outside of training.

    Without an active slice, and where the slice is the whole sequence, it is plain causal attention and keeps nothing.

    Raises ValueError for shapes that do not fit or a forced backend that does not take them, SliceStoreError where slices
    run in an order that cannot give the right result.
    """
    active = active_slice()
    if active is not None:
        _check_tokens(q, active, layer)
    if active is None or active.is_whole:
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale, enable_gqa=grouped
        )
    q, k, v = _autocast(q, k, v)
    _check_shapes(q, k, v, layer, dropout_p)
    if active.store is None:
        raise SliceStoreError(
            f"layer {layer!r}: slice [{active.start}, {active.stop}) of {active.sequence_length} tokens needs a slice store; "
            f"push an ActiveSlice with store=SliceStore()"
        )
    call = _Call(active, active.store, layer, choose_backend(q, k, dropout_p), _scale(q, scale), dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _SlicedAttention.apply(q, k, v, call)  # type: ignore[no-any-return,no-untyped-call]
        return call.forward(q, k, v)[0]


class _Call:
    """The arguments of one call that are no tensors, and what its backward needs of the store."""

    def __init__(
        self, active: ActiveSlice, store: SliceStore, layer: Hashable, backend: Backend, scale: float, dropout_p: float
    ) -> None:
        self.active, self.store, self.layer = active, store, layer
        self.backend, self.scale, self.dropout_p = backend, scale, dropout_p
        self.entry: SliceEntry | None = None
        self.state: tuple[Any, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v to the store and attend; returns the output and the log-sum-exp."""
        self.entry = self.store.write(self.active, self.layer, k, v)
        keys, values = self.entry.keys_values(0, self.active.stop)
        out, lse, self.state = self.backend.forward(q, keys, values, self.active.start, self.scale, self.dropout_p)
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV of the slice, complete because all later slices have run."""
        assert self.entry is not None
        start, stop = self.active.start, self.active.stop
        self.store.begin_backward(self.entry, start, stop)
        keys, values = self.entry.keys_values(0, stop)
        dq = self.backend.backward(
            grad, q, keys, values, out, lse, start, self.scale, self.dropout_p, self.state, self.entry.add_grads
        )
        return dq, *(self.store.end_backward(self.entry, start, stop) or (None, None))


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        q = _own_memory(q)
        out, lse = call.forward(q, k, v)
        assert call.entry is not None
        call.entry.record(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        ctx.call = call
        ctx.save_for_backward(q, out, lse)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            grads = ctx.call.backward(grad, *ctx.saved_tensors)
        return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _own_memory(q: Tensor) -> Tensor:
    """q itself, or a copy where it is a view of something larger, which saving it would keep alive (a fused QKV)."""
    owns = q.untyped_storage().nbytes() <= q.numel() * q.element_size()
    return q if owns else q.clone(memory_format=torch.contiguous_format)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does with the inputs of the fused function: all but fp64 in the autocast dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _check_tokens(q: Tensor, active: ActiveSlice, layer: Hashable) -> None:
    if q.dim() != 4 or q.shape[2] != active.num_tokens:
        raise ValueError(
            f"layer {layer!r}: the active slice [{active.start}, {active.stop}) has {active.num_tokens} tokens, so q must be "
            f"[B, H, {active.num_tokens}, D], got {tuple(q.shape)}; attention must run on the slice's own tokens"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, layer: Hashable, dropout_p: float) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    batch, heads, tokens, dim = q.shape
    if k.dim() != 4 or k.shape != v.shape or (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, dim):
        raise ValueError(f"layer {layer!r}: need q [B, H, T, D] and k, v [B, H_kv, T, D] each, got {shapes}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"layer {layer!r}: the query heads must be a multiple of the key heads, got {shapes}")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(
            f"layer {layer!r}: q, k and v need one dtype and one device, got {q.dtype}, {k.dtype}, {v.dtype} on "
            f"{q.device}, {k.device}, {v.device}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"layer {layer!r}: dropout_p must be in [0, 1), got {dropout_p}")
