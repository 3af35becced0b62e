"""Call kernels of FlashAttention on CUDA: torch's own, and the installed ones of flash-attn 2, 3 and 4.

Their masks are aligned bottom-right and they know grouped heads: one call does a slice. So they can replay attention
dropout, whose random numbers a kernel draws anew in each call. With documents the packages take one call per row, for
packed queries and keys.
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
from terapipe_ds.attention.backends.first_use import widest_head, wrong_kernel
from terapipe_ds.attention.document_edges import to_device

_aten = torch.ops.aten
_Lengths = tuple[Any, ...] | None
"""Of packed documents: cumulative lengths of queries and of keys, and the longest of each."""
_State = Any
_Tensors = Sequence[Tensor]
NO_DROPOUT = "it cannot replay dropout"
NO_SOFTCAP = "it knows no softcap"


@functools.cache
def cuda_capability() -> tuple[int, int]:
    """Return the compute capability of the current NVIDIA device, (0, 0) without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability()


def cuda_refusal(q: Tensor, need: Need) -> str | None:
    """Return why no kernel of FlashAttention or cuDNN takes such queries, whatever else the call needs."""
    if q.device.type != "cuda":
        return f"it runs on cuda, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    dim = widest_head(q, need)
    if dim % 8 or dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {dim}"
    return None


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
        value_dim, results = queries.values.shape[3], []
        for part in _parts(queries):
            out, lse, state = self.run(_heads_last(part.inputs), part.lengths, queries)
            results.append((_heads_first(out)[..., :value_dim], lse.view(-1, *lse.shape[-2:]), state))
        outs, lses, states = zip(*results, strict=True)
        out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, lses))
        return Attended(out, lse, states)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        dim, value_dim, of_queries = queries.keys.shape[3], queries.values.shape[3], []
        for part, state in zip(_parts(queries), attended.state, strict=True):
            d_out, out, lse = (x[part.row] for x in (grad, attended.out, attended.lse))
            inputs = _heads_last((d_out, *part.inputs, out))
            gradients = self.gradients(inputs, lse.contiguous(), part.lengths, queries, state)
            dq, dk, dv = map(_heads_first, gradients)
            of_queries.append(dq[..., :dim])
            of_row = {} if part.lengths is None else {"rows": slice(part.row, part.row + 1)}
            add_grads(part.first_key, dk[..., :dim], dv[..., :value_dim], **of_row)
        return of_queries[0] if len(of_queries) == 1 else torch.cat(of_queries)


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


class CudaFlash(FlashAttn):
    """Run torch's own FlashAttention kernel: no softcap, and a call for each document.

    torch/nn/attention/bias.py relies on the alignment of its mask; mha_fwd and mha_bwd of its flash_api.cpp only check
    that key heads divide query heads.
    """

    name = "cuda_flash"
    takes_documents = False

    def is_available(self) -> bool:
        return cuda_capability() >= (8, 0)

    def refusal(self, q: Tensor, need: Need) -> str | None:
        return NO_SOFTCAP if need.softcap else super().refusal(q, need)

    def run(self, inputs: _Tensors, lengths: _Lengths, queries: Queries) -> tuple[Tensor, Tensor, _State]:
        out, lse, *state, _ = _aten._flash_attention_forward(
            *inputs, *self._sizes(inputs), queries.dropout_p, True, False, **self._options(queries)
        )
        return out, lse, state

    def gradients(self, inputs: _Tensors, lse: Tensor, lengths: _Lengths, queries: Queries, state: _State) -> _Tensors:
        gradients: _Tensors = _aten._flash_attention_backward(
            *inputs, lse, *self._sizes(inputs[1:]), queries.dropout_p, True, *state, **self._options(queries)
        )
        return gradients

    @staticmethod
    def _sizes(inputs: _Tensors) -> tuple[Any, ...]:
        """Return no lengths of packed rows, and the tokens of queries and of keys."""
        return None, None, inputs[0].shape[1], inputs[1].shape[1]

    @staticmethod
    def _options(queries: Queries) -> dict[str, Any]:
        return {"scale": queries.scale, **_window(queries, None)}


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


class _Part(NamedTuple):
    """Describe one call: all rows, or the documents of one row side by side.

    Then q, k, v are [H, tokens, D] and have lengths, as the packages take them.
    """

    row: Any
    first_key: int
    inputs: tuple[Tensor, Tensor, Tensor]
    lengths: _Lengths


def _parts(queries: Queries) -> Iterator[_Part]:
    """Yield the calls. The keys of a row's documents in reach lie one after another, as its queries do."""
    if not queries.spans:
        yield _Part(slice(None), 0, queries[:3], None)
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
            yield _Part(row, first, inputs, (cumulative[0], cumulative[1], longest[0], longest[1]))


def _heads_last(tensors: _Tensors) -> _Tensors:
    """Return tensors [.., H, tokens, D] as the kernels take them, [.., tokens, H, D] with one D."""
    return [x.transpose(-3, -2) for x in as_wide(*tensors)]


def _heads_first(x: Tensor) -> Tensor:
    """Return what a kernel gave as [B, H, tokens, D]: a row of packed documents is a batch of one."""
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


_is_deterministic = torch.are_deterministic_algorithms_enabled
has_flash_attn = functools.cache(functools.partial(compat.has, "flash_attn"))
has_flash_attn_3 = functools.cache(functools.partial(compat.has, "flash_attn_3"))
has_flash_attn_4 = functools.cache(functools.partial(compat.has, "flash_attn_4"))
