"""Call flash-attn 2, 3 and 4, where they are installed: windows, caps, and documents of a row in one call.

Their masks are aligned bottom-right and they know grouped heads: one call does a slice. With documents they take one
call per row, for packed queries and keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from terapipe_ds import compat
from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.blocks import as_wide
from terapipe_ds.attention.backends.first_use import wrong_kernel
from terapipe_ds.attention.backends.fused import NO_DROPOUT, cuda_capability, cuda_refusal
from terapipe_ds.attention.documents import to_device

_Lengths = tuple[Any, ...] | None
"""Of packed documents: cumulative lengths of queries and of keys, and the longest of each."""
_State = Tensor | None
_Tensors = Sequence[Tensor]


class FlashAttn:
    """Run the flash-attn package (2.7 or newer of version 2), which is looked up at run time.

    If values and keys differ in head dim, zeros pad the smaller ones.
    """

    name = "flash_attn"
    takes_documents = True

    def is_available(self) -> bool:
        return cuda_capability() >= (8, 0) and has_flash_attn()

    def refusal(self, q: Tensor, need: Need) -> str | None:
        return cuda_refusal(q, need) or wrong_kernel(self, q, need)

    def run(self, inputs: _Tensors, lengths: _Lengths, queries: Queries) -> tuple[Tensor, Tensor, _State]:
        """Return output, log-sum-exp and random state of q, k, v: [B, tokens, heads, D], or without B if packed."""
        from flash_attn import flash_attn_interface as package

        options, numbers = _fa2_options(queries), (queries.dropout_p, queries.scale)
        if lengths is None:
            results = package._flash_attn_forward(*inputs, *numbers, **options, return_softmax=False)
        else:
            results = package._flash_attn_varlen_forward(*inputs, *lengths, *numbers, **options)
        out, lse, _, state = results
        return out, lse, state

    def gradients(self, inputs: _Tensors, lse: Tensor, lengths: _Lengths, queries: Queries, state: _State) -> _Tensors:
        """Return dQ, dK, dV from the gradient of the output, q, k, v and the output."""
        from flash_attn import flash_attn_interface as package

        gradients = _like_inputs(inputs)
        options, numbers = _fa2_options(queries), (queries.dropout_p, queries.scale)
        options |= {"deterministic": _is_deterministic(), "rng_state": state}
        if lengths is None:
            package._flash_attn_backward(*inputs, lse, *gradients, *numbers, **options)
        else:
            package._flash_attn_varlen_backward(*inputs, lse, *gradients, *lengths, *numbers, **options)
        return gradients

    def forward(self, queries: Queries) -> Attended:
        """Attend: all at once, or row by row where documents are packed."""
        if queries.spans:
            return self._forward_packed(queries)
        out, lse, state = self.run([x.transpose(1, 2) for x in as_wide(*queries[:3])], None, queries)
        return Attended(out.transpose(1, 2)[..., : queries.values.shape[3]], lse, (state,))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        if queries.spans:
            return self._backward_packed(grad, queries, attended, add_grads)
        inputs = [x.transpose(1, 2) for x in as_wide(grad, *queries[:3], attended.out)]
        found = self.gradients(inputs, attended.lse.contiguous(), None, queries, attended.state[0])
        dq, dk, dv = (x.transpose(1, 2) for x in found)
        dim, value_dim = queries.keys.shape[3], queries.values.shape[3]
        add_grads(0, dk[..., :dim], dv[..., :value_dim])
        return dq[..., :dim]

    def _forward_packed(self, queries: Queries) -> Attended:
        q, values = queries.q, queries.values
        out, states = q.new_empty(*q.shape[:3], values.shape[3]), []
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        # one call per row: rows have different numbers of keys in reach
        for packed in _packed_rows(queries):
            inputs = [x.transpose(0, 1) for x in as_wide(*packed.inputs)]
            of_row, lse_of_row, state = self.run(inputs, packed.lengths, queries)
            out[packed.row] = of_row.transpose(0, 1)[..., : values.shape[3]]
            lse[packed.row] = lse_of_row
            states.append(state)
        return Attended(out, lse, tuple(states))

    def _backward_packed(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        dq, dim, value_dim = torch.empty_like(queries.q), queries.keys.shape[3], queries.values.shape[3]
        for packed, state in zip(_packed_rows(queries), attended.state, strict=True):
            row = packed.row
            inputs = [x.transpose(0, 1) for x in as_wide(grad[row], *packed.inputs, attended.out[row])]
            found = self.gradients(inputs, attended.lse[row].contiguous(), packed.lengths, queries, state)
            of_q, dk, dv = (x.transpose(0, 1) for x in found)
            dq[row] = of_q[..., :dim]
            add_grads(packed.first_key, dk[None, ..., :dim], dv[None, ..., :value_dim], rows=slice(row, row + 1))
        return dq


class FlashAttn3(FlashAttn):
    """Run flash-attn 3 on Hopper by the operators that torch calls, too (torch/nn/attention/_fa3.py)."""

    name = "flash_attn_3"

    def is_available(self) -> bool:
        return cuda_capability()[0] == 9 and has_flash_attn_3() and hasattr(torch.ops.flash_attn_3, "bwd")

    def refusal(self, q: Tensor, need: Need) -> str | None:
        return NO_DROPOUT if need.dropout else super().refusal(q, need)

    def run(self, inputs: _Tensors, lengths: _Lengths, queries: Queries) -> tuple[Tensor, Tensor, _State]:
        # the kernel chooses how often it divides the keys, unless equal bits are wanted
        options = {**_fa3_options(queries), **_named(lengths), "num_splits": int(_is_deterministic())}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(*inputs, **options)
        return out, lse, None

    def gradients(self, inputs: _Tensors, lse: Tensor, lengths: _Lengths, queries: Queries, state: _State) -> _Tensors:
        gradients = _like_inputs(inputs)
        options = {**_fa3_options(queries), **_named(lengths), "deterministic": _is_deterministic()}
        torch.ops.flash_attn_3.bwd(*inputs, lse, *gradients, **options)
        return gradients


class FlashAttn4(FlashAttn3):
    """Run flash-attn 4 on Hopper and Blackwell by the functions that torch calls, too (torch/nn/attention/_fa4.py)."""

    name = "flash_attn_4"

    def is_available(self) -> bool:
        return cuda_capability()[0] in (9, 10) and has_flash_attn_4()

    def run(self, inputs: _Tensors, lengths: _Lengths, queries: Queries) -> tuple[Tensor, Tensor, _State]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(*inputs, **_fa4_options(queries), **_named(lengths), return_lse=True)
        return out, lse, None

    def gradients(self, inputs: _Tensors, lse: Tensor, lengths: _Lengths, queries: Queries, state: _State) -> _Tensors:
        from flash_attn.cute.interface import _flash_attn_bwd

        grad, q, k, v, out = inputs
        options = {**_fa4_options(queries), **_named(lengths and lengths[:2])}  # without the longest
        return _flash_attn_bwd(q, k, v, out, grad, lse, **options, deterministic=_is_deterministic())[:3]


def _like_inputs(inputs: _Tensors) -> _Tensors:
    """Return where a kernel writes dQ, dK and dV: memory of its own layout, as wide as its inputs."""
    return tuple(x.new_empty(x.shape) for x in inputs[1:4])


def _window(queries: Queries, none: int | None) -> dict[str, Any]:
    """Return how many keys a query sees before itself and after, by the packages' names; `none` is no limit."""
    left, right = (none, none) if queries.window is None else (queries.window - 1, 0)
    return {"window_size_left": left, "window_size_right": right}


def _fa2_options(queries: Queries) -> dict[str, Any]:
    return {"causal": True, **_window(queries, -1), "softcap": queries.softcap or 0.0, "alibi_slopes": None}


def _fa3_options(queries: Queries) -> dict[str, Any]:
    options = {"softmax_scale": queries.scale, "is_causal": True, "softcap": queries.softcap or 0.0}
    return {**options, **_window(queries, -1)}


def _fa4_options(queries: Queries) -> dict[str, Any]:
    softcap = {} if queries.softcap is None else {"softcap": queries.softcap}
    return {"softmax_scale": queries.scale, "causal": True, **_window(queries, None), **softcap}


def _named(lengths: _Lengths) -> dict[str, Any]:
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, lengths or (), strict=False))


class _PackedRow(NamedTuple):
    """A row's documents one after another: q, k, v [H, tokens, D], and their lengths as the package takes them."""

    row: int
    first_key: int
    inputs: tuple[Tensor, Tensor, Tensor]
    lengths: _Lengths


def _packed_rows(queries: Queries) -> Iterator[_PackedRow]:
    """Yield each row. The keys of its documents in reach lie one after another, as its queries do."""
    for rows, group in itertools.groupby(queries.spans, key=lambda span: (span.rows.start, span.rows.stop)):
        spans = list(group)
        first, stop, device = spans[0].first_key, spans[-1].stop, queries.q.device
        queries_at = [*(span.start - spans[0].start for span in spans), stop - spans[0].start]
        keys_at = [*(span.first_key - first for span in spans), stop - first]
        cumulative = [
            to_device(torch.tensor(x, dtype=torch.int32, device="cpu"), device) for x in (queries_at, keys_at)
        ]
        longest = [max(b - a for a, b in itertools.pairwise(x)) for x in (queries_at, keys_at)]
        for row in range(*rows):
            inputs = queries.q[row], queries.keys[row, :, first:stop], queries.values[row, :, first:stop]
            yield _PackedRow(row, first, inputs, (cumulative[0], cumulative[1], longest[0], longest[1]))


_is_deterministic = torch.are_deterministic_algorithms_enabled
has_flash_attn = functools.cache(functools.partial(compat.has, "flash_attn"))
has_flash_attn_3 = functools.cache(functools.partial(compat.has, "flash_attn_3"))
has_flash_attn_4 = functools.cache(functools.partial(compat.has, "flash_attn_4"))
