"""Call the flash-attn package, where it is installed: windows, caps, and documents of a row in one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from terapipe_ds import compat
from terapipe_ds.attention.backends.base import AddGrads, Attended, Need, Queries, Tensor
from terapipe_ds.attention.backends.blocks import as_wide
from terapipe_ds.attention.backends.fused import cuda_capability, cuda_refusal


class FlashAttn:
    """Run the flash-attn package (2.7 or newer of version 2), which is looked up at run time.

    Its masks are aligned bottom-right and it knows grouped heads: one call does a slice. With documents it takes one
    call per row, for packed queries and keys. If values and keys differ in head dim, zeros pad the smaller ones.
    The backend refuses dropout: a recomputed forward would have to restore the state of its random numbers.
    """

    name = "flash_attn"
    takes_documents = True

    def is_available(self) -> bool:
        return cuda_capability() >= (8, 0) and has_flash_attn()

    def refusal(self, q: Tensor, need: Need) -> str | None:
        return cuda_refusal(q, need)

    def forward(self, queries: Queries) -> Attended:
        """Attend. The package takes [B, tokens, heads, D], and [tokens, heads, D] where documents are packed."""
        if queries.spans:
            return self._forward_packed(queries)
        from flash_attn.flash_attn_interface import _flash_attn_forward

        q, k, v = (x.transpose(1, 2) for x in as_wide(*queries[:3]))
        out, lse, _, rng_state = _flash_attn_forward(
            q, k, v, 0.0, queries.scale, causal=True, **_options(queries), return_softmax=False
        )
        return Attended(out.transpose(1, 2)[..., : queries.values.shape[3]], lse, (rng_state,))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        if queries.spans:
            return self._backward_packed(grad, queries, attended, add_grads)
        from flash_attn.flash_attn_interface import _flash_attn_backward

        # the kernel writes into gradients of its own layout, as wide as its inputs
        inputs = [x.transpose(1, 2) for x in as_wide(grad, *queries[:3], attended.out)]
        dq, dk, dv = gradients = tuple(x.new_empty(x.shape) for x in inputs[1:4])
        options = {"causal": True, **_options(queries), "deterministic": False, "rng_state": attended.state[0]}
        _flash_attn_backward(*inputs, attended.lse, *gradients, 0.0, queries.scale, **options)
        dim, value_dim = queries.keys.shape[3], queries.values.shape[3]
        add_grads(0, dk.transpose(1, 2)[..., :dim], dv.transpose(1, 2)[..., :value_dim])
        return dq.transpose(1, 2)[..., :dim]

    def _forward_packed(self, queries: Queries) -> Attended:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        q, values = queries.q, queries.values
        out, states = q.new_empty(*q.shape[:3], values.shape[3]), []
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        # one call per row: rows have different numbers of keys in reach
        for packed in _packed_rows(queries):
            q_row, k_row, v_row = (x.transpose(0, 1) for x in as_wide(*packed.inputs))
            of_row, lse_of_row, _, rng_state = _flash_attn_varlen_forward(
                q_row, k_row, v_row, *packed.lengths, 0.0, queries.scale, causal=True, **_options(queries)
            )
            out[packed.row] = of_row.transpose(0, 1)[..., : values.shape[3]]
            lse[packed.row] = lse_of_row
            states.append(rng_state)
        return Attended(out, lse, tuple(states))

    def _backward_packed(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dim, value_dim = torch.empty_like(queries.q), queries.keys.shape[3], queries.values.shape[3]
        for packed, rng_state in zip(_packed_rows(queries), attended.state, strict=True):
            row = packed.row
            tensors = as_wide(grad[row], *packed.inputs, attended.out[row])
            inputs = [x.transpose(0, 1) for x in tensors]
            of_q, dk, dv = gradients = tuple(x.new_empty(x.shape) for x in inputs[1:4])
            options = {"causal": True, **_options(queries), "deterministic": False, "rng_state": rng_state}
            lse = attended.lse[row].contiguous()
            _flash_attn_varlen_backward(*inputs, lse, *gradients, *packed.lengths, 0.0, queries.scale, **options)
            dq[row] = of_q.transpose(0, 1)[..., :dim]
            dk, dv = dk.transpose(0, 1)[None, ..., :dim], dv.transpose(0, 1)[None, ..., :value_dim]
            add_grads(packed.first_key, dk, dv, rows=slice(row, row + 1))
        return dq


class _PackedRow(NamedTuple):
    """A row's documents one after another: q, k, v [H, tokens, D], and their lengths as the package takes them."""

    row: int
    first_key: int
    inputs: tuple[Tensor, Tensor, Tensor]
    lengths: tuple[Tensor, Tensor, int, int]  # cumulative of queries and of keys, the longest of each


def _packed_rows(queries: Queries) -> Iterator[_PackedRow]:
    """Yield each row. The keys of its documents in reach lie one after another, as its queries do."""
    for rows, group in itertools.groupby(queries.spans, key=lambda span: (span.rows.start, span.rows.stop)):
        spans = list(group)
        first, stop, device = spans[0].first_key, spans[-1].stop, queries.q.device
        queries_at = [*(span.start - spans[0].start for span in spans), stop - spans[0].start]
        keys_at = [*(span.first_key - first for span in spans), stop - first]
        cumulative = [torch.tensor(x, dtype=torch.int32).to(device, non_blocking=True) for x in (queries_at, keys_at)]
        longest = [max(b - a for a, b in itertools.pairwise(x)) for x in (queries_at, keys_at)]
        for row in range(*rows):
            inputs = queries.q[row], queries.keys[row, :, first:stop], queries.values[row, :, first:stop]
            yield _PackedRow(row, first, inputs, (cumulative[0], cumulative[1], longest[0], longest[1]))


def _options(queries: Queries) -> dict[str, float | int | None]:
    left = -1 if queries.window is None else queries.window - 1
    softcap = queries.softcap or 0.0
    window = {"window_size_left": left, "window_size_right": min(left, 0)}
    return {**window, "softcap": softcap, "alibi_slopes": None}


has_flash_attn = functools.cache(compat.has_flash_attn)
