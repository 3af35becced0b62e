"""Make one call of sliced attention: check it, choose its backend, and use the slice store forward and backward.

`sliced` makes calls for eager layers, `opaque` for compiled ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terapipe_ds.attention.active_slice import ActiveSlice, SliceStoreError, active_slice
from terapipe_ds.attention.backends import Backend, choose_backend
from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries
from terapipe_ds.attention.reach import Reach, Span
from terapipe_ds.attention.slice_store import SliceEntry

_NOTHING = nullcontext()


class Options(NamedTuple):
    """Hold the numbers of one call; see `sliced_attention`."""

    scale: float | None
    dropout_p: float
    window: int | None
    softcap: float | None

    def scale_of(self, q: Tensor) -> float:
        """Return the factor that multiplies the scores of `q`."""
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale


def prepare(
    q: Tensor, k: Tensor, v: Tensor, layer: Hashable, options: Options, sinks: Tensor | None
) -> tuple[Call, Tensor, Tensor, Tensor]:
    """Return the call that `sliced_attention` makes, and q, k, v as the backend takes them. Raises the same errors."""
    q, k, v = autocast(q, k, v)
    active = active_slice()
    # outside of the engine
    if active is None:  # the tokens are a sequence of their own
        tokens = q.shape[2] if q.dim() == 4 else 1
        active = ActiveSlice(0, tokens, tokens)
    check_inputs(q, k, v, active, layer, options.dropout_p)
    check_options(q, active, layer, options, sinks)
    # kernels take it for granted that numbers of a head lie side by side; a slice store lays out its copies so
    q = q if q.stride(-1) == 1 else q.contiguous()
    if active.is_whole:
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    elif active.store is None:
        raise SliceStoreError(
            f"layer {layer!r}: slice [{active.start}, {active.stop}) of {active.sequence_length} tokens needs a slice "
            f"store; push an ActiveSlice with store=SliceStore()"
        )
    # the needs beyond plain causal attention decide which backends can take the call
    reach = active.reach(options.window)
    need = Need(
        dropout=options.dropout_p > 0,
        window=reach.window is not None,
        softcap=options.softcap is not None,
        documents=reach.starts is not None,
        value_dim=None if v.shape[3] == q.shape[3] else v.shape[3],
    )
    return Call(active, layer, choose_backend(q, need), reach, options), q, k, v


class WholeSequence:
    """Stand in for a slice store's entry if the slice is the whole sequence: nothing is kept for other slices."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.keys_values_of_slice: tuple[Tensor, ...] = k.detach(), v.detach()
        self._grads: tuple[Tensor, ...] = ()

    def keys_values(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = self.keys_values_of_slice
        return k[:, :, start:stop], v[:, :, start:stop]

    def record(self, kv_needs_grad: bool) -> None:
        """Drop the keys and values: the node saves them."""
        self.keys_values_of_slice = ()

    def begin_backward(self, start: int, stop: int) -> None:
        self._grads = tuple(
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.keys_values_of_slice
        )

    def add_grads(self, offset: int, dk: Tensor, dv: Tensor, again: bool = False, rows: slice | None = None) -> None:
        for total, part in zip(self._grads, (dk, dv), strict=True):
            total[rows or slice(None), :, offset : offset + part.shape[2]].add_(part)

    def end_backward(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        (k, v), (dk, dv) = self.keys_values_of_slice, self._grads
        self.keys_values_of_slice = self._grads = ()
        return dk.to(k.dtype), dv.to(v.dtype)


class Call:
    """Hold what one call has in addition to tensors, and what its backward needs of the store."""

    def __init__(self, active: ActiveSlice, layer: Hashable, backend: Backend, reach: Reach, options: Options) -> None:
        self.active, self.layer = active, layer
        self.backend, self.reach, self.options = backend, reach, options
        self.is_limited = reach.is_limited
        self.entry: SliceEntry | WholeSequence | None = None
        self.states: list[tuple[Any, ...]] = []

    def record(self, kv_needs_grad: bool) -> None:
        """Note that an autograd node was recorded: a backward will come."""
        assert self.entry is not None
        self.entry.record(kv_needs_grad)

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Hold the keys and values for the backward if the slice is the whole sequence: no store has them."""
        if isinstance(self.entry, WholeSequence):
            self.entry.keys_values_of_slice = keys, values

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Append k and v to the store and attend; return the output and the log-sum-exp, both with the sinks."""
        if self.active.is_whole:
            self.entry = WholeSequence(k, v)
        else:
            assert self.active.store is not None
            self.entry = self.active.store.write(self.active, self.layer, k, v, self.options.window)
        kept = self.active.kept
        if kept is None:
            out, lse, self.states = self._attend(q, v, sinks)
        else:
            run = functools.partial(self._attend, q, v, sinks)
            out, lse, self.states = kept(self.layer, self.options.dropout_p, run, q.device)
        return out, lse

    def _attend(self, q: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, list[tuple[Any, ...]]]:
        """Return output, log-sum-exp and the states of the kernels."""
        assert self.entry is not None
        # one call where the backend takes all rows and documents at once, which is the usual case
        results = [(span, self.backend.forward(queries)) for span, queries in self._spans(q, self.entry)]
        states = [attended.state for _, attended in results]
        out, lse, _ = results[0][1]
        if len(results) > 1:
            out = q.new_empty(*q.shape[:3], v.shape[3])
            lse = lse.new_empty(q.shape[:3])
            for span, attended in results:
                self._part(out, span).copy_(attended.out)
                self._part(lse, span).copy_(attended.lse)
        return *((out, lse) if sinks is None else with_sinks(out, lse, sinks)), states

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
        """Return dQ, dK, dV of the slice, complete because all later slices have run."""
        assert self.entry is not None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # as q in `prepare`
        start, stop = self.active.start, self.active.stop
        self.entry.begin_backward(start, stop)
        # the same spans in the same order as in the forward: each finds the state that its kernel left
        parts = []
        for (span, queries), state in zip(self._spans(q, self.entry), self.states, strict=True):
            attended = Attended(self._part(out, span), self._part(lse, span), state)
            of_span = self.backend.backward(self._part(grad, span), queries, attended, self._add_grads_of(span))
            parts.append((span, of_span))
        dq = parts[0][1]
        if len(parts) > 1:
            dq = torch.empty_like(q)
            for span, part in parts:
                self._part(dq, span).copy_(part)
        return dq, *(self.entry.end_backward(start, stop) or (None, None))

    def _add_grads_of(self, span: Span) -> AddGrads:
        """Return the function that takes the gradients of a span, whose keys and rows count from its own first ones."""
        entry, first = self.entry, span.rows.start
        assert entry is not None
        # without a limit, pieces count from the start of the sequence, and no wrapper costs time in the hot path
        if not self.is_limited:
            return entry.add_grads

        def add(offset: int, dk: Tensor, dv: Tensor, again: bool = False, rows: slice | None = None) -> None:
            own = span.rows if rows is None else slice(first + rows.start, first + rows.stop)
            entry.add_grads(span.first_key + offset, dk, dv, again, own)

        return add

    def _spans(self, q: Tensor, entry: SliceEntry | WholeSequence) -> Iterator[tuple[Span, Queries]]:
        """Yield what the backend computes in one call: a document of some rows, or all where it takes documents."""
        start, stop, batch, options = self.active.start, self.active.stop, q.shape[0], self.options
        if not self.is_limited:
            keys, values = entry.keys_values(0, stop)
            queries = Queries(q, keys, values, start, options.scale_of(q), options.dropout_p, None, options.softcap)
            yield Span(slice(0, batch), 0, start, stop), queries
            return
        # each document of each row sees keys of its own
        spans = of_documents = self.reach.spans(start, stop, batch)
        at_once = len(spans) > 1 and self.backend.takes_documents
        if at_once:
            spans = (Span(slice(0, batch), self.reach.first_key(start), start, stop),)
        # keys count from the first one in reach, as if the sequence began there
        for span in spans:
            first, window = span.first_key, self.reach.window
            keys, values = (x[span.rows] for x in entry.keys_values(first, span.stop))
            queries = Queries(
                self._part(q, span),
                keys,
                values,
                span.start - first,
                options.scale_of(q),
                options.dropout_p,
                window if window is not None and window < span.stop - first else None,  # else all see all
                options.softcap,
                tuple(document.counted_from(first) for document in of_documents) if at_once else (),
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
    """Return the gradient of the sinks, a sum over rows and queries; `out` and `lse` include the sinks.

    A sink's probability p changes the output by p * (0 - out), as its value is 0.
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return (-(sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast; entering torch's own takes longer than all checks of a call."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast casts the inputs of the plain function: all but fp64 to the autocast dtype."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def check_inputs(q: Tensor, k: Tensor, v: Tensor, active: ActiveSlice, layer: Hashable, dropout_p: float) -> None:
    """Raise ValueError if shapes, dtypes or the dropout rate do not fit the active slice."""
    tokens, of_q, of_k, of_v = active.num_tokens, q.shape, k.shape, v.shape
    if len(of_q) != 4 or of_q[2] != tokens:
        problem = (
            f"the active slice [{active.start}, {active.stop}) has {tokens} tokens"
            f"{'' if active.exchange is None else ' on this sequence rank'}, so q must be [B, H, {tokens}, D], "
            f"got {_shapes(q, k, v)}; pass the slice's own tokens, and no others"
        )
    elif len(of_k) != 4 or len(of_v) != 4 or of_k[:3] != of_v[:3] or of_k != (of_q[0], of_k[1], tokens, of_q[3]):
        problem = f"q must be [B, H, T, D], k [B, H_kv, T, D] and v [B, H_kv, T, D_v], got {_shapes(q, k, v)}"
    elif of_k[1] == 0 or of_q[1] % of_k[1]:
        problem = f"the query heads must be a multiple of the key heads, got {_shapes(q, k, v)}"
    elif not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = f"{q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}"
        problem = f"q, k and v need one dtype and one device, got {kinds}"
    elif not 0.0 <= dropout_p < 1.0:
        problem = f"dropout_p must be in [0, 1), got {dropout_p}"
    else:
        return
    raise ValueError(f"layer {layer!r}: {problem}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def check_options(q: Tensor, active: ActiveSlice, layer: Hashable, options: Options, sinks: Tensor | None) -> None:
    """Raise ValueError for numbers and sinks that attention cannot have."""
    scale, window, softcap = options.scale, options.window, options.softcap
    rows = None if active.documents is None else len(active.documents.starts)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        problem = f"window must be a number of tokens >= 1, its own included, or None for all, got {window!r}"
    elif scale is not None and not _is_positive(scale):
        problem = f"scale must be a finite number > 0, or None, got {scale!r}; multiply q by any other"
    elif softcap is not None and not _is_positive(softcap):
        problem = f"softcap must be a finite number > 0, or None, got {softcap!r}; a tensor would get no gradient"
    elif sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        problem = f"sinks must be one number per query head, [{q.shape[1]}], got {list(sinks.shape)} of {sinks.dtype}"
    elif sinks is not None and sinks.device != q.device:
        problem = f"sinks must be on the device of q, {q.device}, not on {sinks.device}"
    elif rows is not None and rows != q.shape[0]:
        problem = f"the documents are those of {rows} rows, but q has {q.shape[0]}: {tuple(q.shape)}"
    else:
        return
    raise ValueError(f"layer {layer!r}: {problem}")


def _is_positive(x: float) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and 0.0 < x < math.inf
