"""Define `sliced_attention`, which a model calls instead of `F.scaled_dot_product_attention`.

The forward of a slice appends its keys and values to the slice store and attends to all tokens so far; the backward
adds to the gradients that the store holds for [0, stop) and returns those of the slice's own tokens, which are complete
by then. Nothing of the store is saved for the backward (later slices write the same buffers): a node keeps its queries,
its output and the log-sum-exp of its scores, and reads keys and values where they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from terapipe_ds.attention.active_slice import ActiveSlice, AppendingStore, Entry, active_slice
from terapipe_ds.attention.backends import Backend, choose_backend
from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries
from terapipe_ds.attention.checks import Options, check_inputs, check_options
from terapipe_ds.attention.compiled_layer import next_call, running
from terapipe_ds.attention.reach import Reach, Span, reach_of
from terapipe_ds.attention.slice_store import SliceStoreError

Tensor = torch.Tensor
_OUT_OF_GRAPH = (
    "is to be compiled (terapipe.compile), but torch runs its attention outside of the graph: something in the layer "
    "cannot be traced, or it was compiled too often. TORCH_LOGS=graph_breaks,recompiles shows what; mend it, or leave "
    "compile_safe out of the layer's class, or set terapipe.compile to false"
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

    Without an active slice, and where the slice is the whole sequence, it attends to those tokens and keeps nothing.
    Where sequence ranks divide the slice, T are the tokens of this rank, and heads are exchanged for tokens meanwhile.

    Raises ValueError for shapes or values that do not fit or a forced backend that does not take them, SliceStoreError
    where slices run in an order that cannot give the right result, or without a store.
    """
    if torch.compiler.is_compiling():  # `layer` is not read here: each one would have a graph of its own
        q, k, v = _autocast(q, k, v)
        kv_needs_grad = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        needs_grad = kv_needs_grad or (
            torch.is_grad_enabled() and (q.requires_grad or (sinks is not None and sinks.requires_grad))
        )
        of_call = scale, dropout_p, window, softcap, needs_grad, kv_needs_grad, next_call()
        compiled_out: Tensor = torch.ops.terapipe_ds.attend(q, k, v, sinks, *of_call)[0]
        return compiled_out
    if running.name is not None:
        raise SliceStoreError(f"layer {layer!r} {_OUT_OF_GRAPH}")
    active = active_slice()
    if active is not None and active.exchange is not None:

        def of_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            return sliced_attention(q, k, v, layer, scale, dropout_p, window=window, softcap=softcap, sinks=sinks)

        return active.exchange.attend(of_heads, q, k, v, layer, sinks)
    is_whole = active is None or active.is_whole
    asks_nothing = window is None and softcap is None and sinks is None and v.shape[-1] == q.shape[-1]
    if is_whole and asks_nothing and (active is None or reach_of(active, window).starts is None):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
    call, q, k, v = prepare(q, k, v, layer, scale, dropout_p, window=window, softcap=softcap, sinks=sinks)
    with torch.autocast(q.device.type, enabled=False):
        needs_grad = (
            q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        )
        if torch.is_grad_enabled() and needs_grad:
            return _SlicedAttention.apply(q, k, v, sinks, call)
        return call.forward(q, k, v, sinks)[0]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Hashable,
    scale: float | None,
    dropout_p: float,
    *,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Call, Tensor, Tensor, Tensor]:
    """Return the call that `sliced_attention` makes, and q, k, v as it takes them. Raises as that does."""
    active = active_slice()
    is_whole = active is None or active.is_whole
    q, k, v = _autocast(q, k, v)
    if active is None:
        tokens = q.shape[2] if q.dim() == 4 else 1
        active = ActiveSlice(0, tokens, tokens)
    check_inputs(q, k, v, active, layer, dropout_p)
    options = Options(1 / math.sqrt(q.shape[-1]) if scale is None else scale, dropout_p, window, softcap)
    check_options(q, active, layer, options, sinks)
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernels take this for granted
    if is_whole:
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    elif active.store is None:
        raise SliceStoreError(
            f"layer {layer!r}: slice [{active.start}, {active.stop}) of {active.sequence_length} tokens needs a slice "
            f"store; push an ActiveSlice with store=SliceStore()"
        )
    reach = reach_of(active, window)
    value_dim = None if v.shape[3] == q.shape[3] else v.shape[3]
    need = Need(dropout_p > 0, reach.window is not None, softcap is not None, reach.starts is not None, value_dim)
    store = _Whole() if is_whole or active.store is None else active.store
    return Call(active, store, layer, choose_backend(q, need), reach, options), q, k, v


class _Whole:
    """Stands in for a slice store and its entry where the slice is the whole sequence: nothing is kept for others."""

    keys_values_of_slice: tuple[Tensor, ...] = ()
    _grads: tuple[Tensor, ...] = ()

    def write(self, active: ActiveSlice, layer: Hashable, k: Tensor, v: Tensor, window: int | None = None) -> _Whole:
        self.keys_values_of_slice = k.detach(), v.detach()
        return self

    def keys_values(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = self.keys_values_of_slice
        return k[:, :, start:stop], v[:, :, start:stop]

    def record(self, kv_needs_grad: bool) -> None:
        """Let go of the keys and values: the node saves them."""
        self.keys_values_of_slice = ()

    def begin_backward(self, entry: _Whole, start: int, stop: int) -> None:
        self._grads = tuple(
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.keys_values_of_slice
        )

    def add_grads(self, offset: int, dk: Tensor, dv: Tensor, again: bool = False, rows: slice | None = None) -> None:
        for total, part in zip(self._grads, (dk, dv), strict=True):
            total[rows or slice(None), :, offset : offset + part.shape[2]].add_(part)

    def end_backward(self, entry: _Whole, start: int, stop: int) -> tuple[Tensor, Tensor]:
        (k, v), (dk, dv) = self.keys_values_of_slice, self._grads
        self.keys_values_of_slice = self._grads = ()
        return dk.to(k.dtype), dv.to(v.dtype)


class Call:
    """What one call has besides tensors, and what its backward needs of the store."""

    def __init__(
        self,
        active: ActiveSlice,
        store: AppendingStore,
        layer: Hashable,
        backend: Backend,
        reach: Reach,
        options: Options,
    ) -> None:
        self.active, self.store, self.layer = active, store, layer
        self.backend, self.reach, self.options = backend, reach, options
        self.is_limited = reach.is_limited
        self.entry: Entry | None = None
        self.states: list[tuple[Any, ...]] = []

    @property
    def is_whole(self) -> bool:
        """Return whether the slice is the whole sequence, so that keys and values are the caller's to keep."""
        return isinstance(self.store, _Whole)

    def keep(self, kv_needs_grad: bool, keys_values: tuple[Tensor, Tensor]) -> None:
        """Note that a backward will come; where the slice is the whole sequence, hold its keys and values for it."""
        assert self.entry is not None
        self.entry.record(kv_needs_grad)
        if isinstance(self.entry, _Whole):
            self.entry.keys_values_of_slice = keys_values

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Append k and v to the store and attend; return the output and the log-sum-exp, with that of the sinks."""
        self.entry = self.store.write(self.active, self.layer, k, v, self.options.window)
        results = [(span, self.backend.forward(queries)) for span, queries in self._spans(q, self.entry)]
        self.states = [attended.state for _, attended in results]
        out, lse, _ = results[0][1]
        if len(results) > 1:
            out = q.new_empty(*q.shape[:3], v.shape[3])
            lse = lse.new_empty(q.shape[:3])
            for span, attended in results:
                self._part(out, span).copy_(attended.out)
                self._part(lse, span).copy_(attended.lse)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
        """Return dQ, dK, dV of the slice, complete because all later slices have run."""
        assert self.entry is not None
        start, stop = self.active.start, self.active.stop
        self.store.begin_backward(self.entry, start, stop)
        parts = [
            (span, self._backward_of(span, state, queries, (grad, out, lse)))
            for (span, queries), state in zip(self._spans(q, self.entry), self.states, strict=True)
        ]
        dq = parts[0][1]
        if len(parts) > 1:
            dq = torch.empty_like(q)
            for span, part in parts:
                self._part(dq, span).copy_(part)
        return dq, *(self.store.end_backward(self.entry, start, stop) or (None, None))

    def _backward_of(
        self, span: Span, state: tuple[Any, ...], queries: Queries, tensors: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        grad, out, lse = (self._part(x, span) for x in tensors)
        return self.backend.backward(grad, queries, Attended(out, lse, state), self._add_grads_of(span))

    def _add_grads_of(self, span: Span) -> AddGrads:
        """Return what takes the gradients of a span, whose keys and rows count from its own first ones."""
        entry, first = self.entry, span.rows.start
        assert entry is not None
        if not self.is_limited:
            return entry.add_grads

        def add(offset: int, dk: Tensor, dv: Tensor, again: bool = False, rows: slice | None = None) -> None:
            own = span.rows if rows is None else slice(first + rows.start, first + rows.stop)
            entry.add_grads(span.first_key + offset, dk, dv, again, own)

        return add

    def _spans(self, q: Tensor, entry: Entry) -> Iterator[tuple[Span, Queries]]:
        """Yield what the backend computes in one call: a document of some rows, or all where it takes documents."""
        start, stop, batch, options = self.active.start, self.active.stop, q.shape[0], self.options
        if not self.is_limited:
            keys, values = entry.keys_values(0, stop)
            queries = Queries(q, keys, values, start, options.scale, options.dropout_p, None, options.softcap)
            yield Span(slice(0, batch), 0, start, stop), queries
            return
        spans = of_documents = self.reach.spans(start, stop, batch)
        if len(spans) > 1 and self.backend.takes_documents:
            spans = (Span(slice(0, batch), self.reach.first_key(start), start, stop),)
        for span in spans:
            first, window = span.first_key, self.reach.window
            keys, values = (x[span.rows] for x in entry.keys_values(first, span.stop))
            queries = Queries(
                self._part(q, span),
                keys,
                values,
                span.start - first,
                options.scale,
                options.dropout_p,
                window if window is not None and window < span.stop - first else None,  # else all see all
                options.softcap,
                tuple(each.counted_from(first) for each in of_documents) if len(spans) < len(of_documents) else (),
            )
            yield span, queries

    def _part(self, x: Tensor, span: Span) -> Tensor:
        if not self.is_limited:
            return x
        return x[span.rows, :, span.start - self.active.start : span.stop - self.active.start]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp after a sink has joined: a key with a logit per head, and a value of zeros."""
    total = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, a sum over rows and queries; `out` and `lse` are those with sinks.

    A sink's probability p changes the output by p * (0 - out), as its value is 0.
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return (-(sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        q = _own_memory(q)
        out, lse = call.forward(q, k, v, sinks)
        assert call.entry is not None
        call.entry.record(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        ctx.call, is_whole = call, isinstance(call.entry, _Whole)
        out = out.detach()  # no view, so that what changes it in place is met in the backward, with the layer's name
        ctx.save_for_backward(q, out, lse, sinks, *((k, v) if is_whole else ()))
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
        if keys_values:
            ctx.call.entry.keys_values_of_slice = tuple(keys_values)
        with torch.autocast(grad.device.type, enabled=False):
            grads = list(ctx.call.backward(grad, q, out, lse))
            d_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        grads = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)]
        return *grads, d_sinks, None


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
