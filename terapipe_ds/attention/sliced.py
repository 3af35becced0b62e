"""Define `sliced_attention`, which a model calls instead of `F.scaled_dot_product_attention`.

The forward of a slice appends its keys and values to the slice store and attends to all tokens so far; the backward
adds to the gradients that the store holds for [0, stop) and returns those of the slice's own tokens, which are complete
by then. Nothing of the store is saved for the backward (later slices write the same buffers): a node keeps its queries,
its output and the log-sum-exp of its scores, and reads keys and values where they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from terapipe_ds.attention.active_slice import ActiveSlice, Store, active_slice
from terapipe_ds.attention.backends import Backend, choose_backend
from terapipe_ds.attention.backends.base import Attended, Queries
from terapipe_ds.attention.slice_store import SliceEntry, SliceStoreError

Tensor = torch.Tensor


def sliced_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: Hashable, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Return the causal self-attention of the active slice's tokens over all tokens of the sequence so far.

    q: [B, H, T, D]; k, v: [B, H_kv, T, D], H a multiple of H_kv (query head h reads key head h // (H / H_kv)). Returns
    [B, H, T, D]. T is the length of the active slice; k and v are those of its own tokens, positions already applied.
    `layer` is any hashable name that is unique within the part (a layer index, a module path). `scale` defaults to
    1 / sqrt(D). As in `F.scaled_dot_product_attention`, `dropout_p` acts whenever it is not 0: pass 0.0 in evaluation.

    Without an active slice, and where the slice is the whole sequence, it is plain causal attention and keeps nothing.

    Raises ValueError for shapes that do not fit or a forced backend that does not take them, SliceStoreError where
    slices run in an order that cannot give the right result, or without a store.
    """
    active = active_slice()
    if active is None or active.is_whole:
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale, enable_gqa=grouped
        )
    q, k, v = _autocast(q, k, v)
    _check_inputs(q, k, v, active, layer, dropout_p)
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernels take this for granted; k and v are copied anyway
    if active.store is None:
        raise SliceStoreError(
            f"layer {layer!r}: slice [{active.start}, {active.stop}) of {active.sequence_length} tokens needs a slice "
            f"store; push an ActiveSlice with store=SliceStore()"
        )
    backend = choose_backend(q, dropout_p)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    call = _Call(active, active.store, layer, backend, scale, dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _SlicedAttention.apply(q, k, v, call)
        return call.forward(q, k, v)[0]


class _Call:
    """What one call has besides tensors, and what its backward needs of the store."""

    def __init__(
        self, active: ActiveSlice, store: Store, layer: Hashable, backend: Backend, scale: float, dropout_p: float
    ) -> None:
        self.active, self.store, self.layer = active, store, layer
        self.backend, self.scale, self.dropout_p = backend, scale, dropout_p
        self.entry: SliceEntry | None = None
        self.state: tuple[Any, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v to the store and attend; return the output and the log-sum-exp."""
        self.entry = self.store.write(self.active, self.layer, k, v)
        out, lse, self.state = self.backend.forward(self._queries(q, self.entry))
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
        """Return dQ, dK, dV of the slice, complete because all later slices have run."""
        assert self.entry is not None
        start, stop = self.active.start, self.active.stop
        self.store.begin_backward(self.entry, start, stop)
        queries, attended = self._queries(q, self.entry), Attended(out, lse, self.state)
        dq = self.backend.backward(grad, queries, attended, self.entry.add_grads)
        return dq, *(self.store.end_backward(self.entry, start, stop) or (None, None))

    def _queries(self, q: Tensor, entry: SliceEntry) -> Queries:
        return Queries(q, *entry.keys_values(0, self.active.stop), self.active.start, self.scale, self.dropout_p)


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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            grads = ctx.call.backward(grad, *ctx.saved_tensors)
        return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)), None


def _own_memory(q: Tensor) -> Tensor:
    """Return q, or a copy where q is a view: saving a view of a fused QKV would keep K and V alive twice."""
    owns = q.untyped_storage().nbytes() <= q.numel() * q.element_size()
    return q if owns else q.clone(memory_format=torch.contiguous_format)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast casts the inputs of the plain function: all but fp64 to the autocast dtype."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, active: ActiveSlice, layer: Hashable, dropout_p: float) -> None:
    tokens, shapes = active.num_tokens, f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or q.shape[2] != tokens:
        problem = (
            f"the active slice [{active.start}, {active.stop}) has {tokens} tokens, so q must be [B, H, {tokens}, D], "
            f"got {shapes}; pass the slice's own tokens, and no others"
        )
    elif k.dim() != 4 or k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (q.shape[0], tokens, q.shape[3]):
        problem = f"q must be [B, H, T, D], k and v [B, H_kv, T, D] each, got {shapes}"
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        problem = f"the query heads must be a multiple of the key heads, got {shapes}"
    elif not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = f"{q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}"
        problem = f"q, k and v need one dtype and one device, got {kinds}"
    elif not 0.0 <= dropout_p < 1.0:
        problem = f"dropout_p must be in [0, 1), got {dropout_p}"
    else:
        return
    raise ValueError(f"layer {layer!r}: {problem}")
