"""Sliced attention by fused kernels and by plain torch; see `backends` for what a backend is."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
AddGrads = Callable[..., None]  # SliceEntry.add_grads: takes pieces of dK, dV
State = tuple[Any, ...]  # what a backward needs to replay random numbers; no tensor that requires gradients

_aten = torch.ops.aten


class Backend(Protocol):
    """One way to compute sliced attention."""

    name: str

    def is_available(self) -> bool:
        """Whether this machine can run it."""

    def refusal(self, q: Tensor, k: Tensor, dropout_p: float) -> str | None:
        """Why it does not take these tensors (None: it does), as the end of a sentence."""

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        """Output [B, H, T, D], log-sum-exp [B, H, T], state."""

    def backward(
        self, grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor,
        start: int, scale: float, dropout_p: float, state: State, add_grads: AddGrads,
    ) -> Tensor:  # fmt: skip
        """Gradients of the queries; those of all keys and values [0, start + T) go to `add_grads` in pieces."""


def fold_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B, H_kv, G * T, D]: the G query heads that share a key head become more queries of that head."""
    batch, heads, tokens, dim = x.shape
    if heads == num_kv_heads:
        return x
    return x.reshape(batch, num_kv_heads, heads // num_kv_heads * tokens, dim)


def unfold_groups(x: Tensor, num_heads: int, tokens: int) -> Tensor:
    """The inverse of `fold_groups`, for [B, H_kv, G * T, D] as well as for [B, H_kv, G * T] (the log-sum-exp)."""
    if x.shape[1] == num_heads:
        return x
    return x.unflatten(2, (num_heads // x.shape[1], tokens)).flatten(1, 2)


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, H_kv, T, D] -> [B, H, T, D], each key head repeated for its group."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def sum_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of `expand_heads`: the sum over each group."""
    return x if x.shape[1] == num_kv_heads else x.unflatten(1, (num_kv_heads, -1)).sum(2)


class _Blocks:
    """A fused kernel without bottom-right alignment: blocks without a mask, and plainly causal ones on the diagonal.

    Two partial results are merged by their log-sum-exp. With P = exp(S - lse) and delta = rowsum(dO * O) of the merged
    result, the kernel's own backward gives each block its exact share (the algebra of FlashAttention, Dao et al. 2022,
    Appendix B: blocks of keys enter a row's softmax only through lse and delta).
    """

    causal_tokens: int | None = None  # the largest causal block; None: the whole diagonal of a slice at once
    prefix_bytes: int | None = None  # of dK of the prefix at a time in backward; None: the whole prefix at once

    def _run(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, State]:
        raise NotImplementedError

    def _run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        is_causal: bool, scale: float, state: State,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        raise NotImplementedError

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        batch, heads, tokens, dim = q.shape
        out = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
        lse = q.new_empty(batch, tokens, heads, dtype=_lse_dtype(q)).transpose(1, 2)
        state: State = ()
        for begin, end in _cut(0, tokens, self.causal_tokens):
            own, before = slice(start + begin, start + end), slice(0, start + begin)
            part = q[:, :, begin:end]
            diagonal = self._run(
                part, expand_heads(keys[:, :, own], heads), expand_heads(values[:, :, own], heads), True, scale
            )
            state = diagonal[2]
            target = out[:, :, begin:end], lse[:, :, begin:end]
            if start + begin == 0:
                target[0].copy_(diagonal[0])
                target[1].copy_(diagonal[1])
                continue
            dense = self._run(fold_groups(part, keys.shape[1]), keys[:, :, before], values[:, :, before], False, scale)
            merge(diagonal[:2], (unfold_groups(x, heads, end - begin) for x in dense[:2]), target)
        return out, lse, state

    def backward(
        self, grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor,
        start: int, scale: float, dropout_p: float, state: State, add_grads: AddGrads,
    ) -> Tensor:  # fmt: skip
        call = _BlockBackward(self, (grad, q, out), lse, keys, values, start, scale, state, add_grads)
        for begin, end in _cut(0, start, self._prefix_tokens(keys)):
            call.dense(0, q.shape[2], begin, end)
        call.diagonal(0, q.shape[2])
        return call.dq

    def _prefix_tokens(self, keys: Tensor) -> int | None:
        if self.prefix_bytes is None:
            return None
        per_token = keys.shape[0] * keys.shape[1] * keys.shape[3] * keys.element_size()
        return max(1, self.prefix_bytes // per_token // 512) * 512


class _BlockBackward:
    """The backward of one slice, block by block. Rows are counted from the slice's start, columns from the sequence's."""

    def __init__(
        self, kernel: _Blocks, rows: tuple[Tensor, Tensor, Tensor], lse: Tensor, keys: Tensor, values: Tensor,
        start: int, scale: float, state: State, add_grads: AddGrads,
    ) -> None:  # fmt: skip
        self.kernel, self.rows, self.lse, self.keys, self.values = kernel, rows, lse, keys, values
        self.start, self.scale, self.state, self.add_grads = start, scale, state, add_grads
        batch, heads, tokens, dim = rows[1].shape
        self.dq = rows[1].new_zeros(batch, tokens, heads, dim).transpose(1, 2)

    def dense(self, row: int, row_stop: int, column: int, column_stop: int, again: bool = False) -> None:
        """A block in which every query sees every key; the groups of query heads are folded into the rows."""
        kv_heads, columns = self.keys.shape[1], slice(column, column_stop)
        grad, q, out = (fold_groups(x[:, :, row:row_stop], kv_heads) for x in self.rows)
        lse = self.lse[:, :, row:row_stop].reshape(q.shape[:3])
        dq, dk, dv = self.kernel._run_backward(
            grad, q, self.keys[:, :, columns], self.values[:, :, columns], out, lse, False, self.scale, self.state
        )
        self.dq[:, :, row:row_stop].add_(unfold_groups(dq, self.dq.shape[1], row_stop - row))
        self.add_grads(column, dk, dv, again)

    def diagonal(self, row: int, row_stop: int) -> None:
        """The causal block of rows and the same columns; halved, with a dense block below, while it is too large."""
        largest, tokens = self.kernel.causal_tokens, row_stop - row
        if largest is not None and tokens > largest:
            middle = row + -(-tokens // (2 * largest)) * largest
            self.diagonal(row, middle)
            self.diagonal(middle, row_stop)
            self.dense(middle, row_stop, self.start + row, self.start + middle, again=True)
            return
        heads, kv_heads = self.dq.shape[1], self.keys.shape[1]
        columns = slice(self.start + row, self.start + row_stop)
        own = (expand_heads(x[:, :, columns], heads) for x in (self.keys, self.values))
        grad, q, out = (x[:, :, row:row_stop] for x in self.rows)
        lse = self.lse[:, :, row:row_stop]
        dq, dk, dv = self.kernel._run_backward(grad, q, *own, out, lse, True, self.scale, self.state)
        self.dq[:, :, row:row_stop].add_(dq)
        self.add_grads(self.start + row, sum_groups(dk, kv_heads), sum_groups(dv, kv_heads))


def _cut(start: int, stop: int, length: int | None) -> Iterator[tuple[int, int]]:
    """[start, stop) in pieces of at most `length`."""
    step = length or max(stop - start, 1)
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def merge(diagonal: Iterable[Tensor], dense: Iterable[Tensor], target: tuple[Tensor, Tensor]) -> None:
    """Write to `target` (output, log-sum-exp) the attention over two blocks of keys from the attention over each.

    The weight of the dense block is exp(dense_lse) / (exp(dense_lse) + exp(lse)) = sigmoid(dense_lse - lse).
    """
    (out, lse), (dense_out, dense_lse) = diagonal, dense
    weight = torch.sigmoid(dense_lse - lse).unsqueeze(-1)
    torch.logaddexp(lse, dense_lse, out=target[1])
    if out.dtype == weight.dtype:
        torch.lerp(out, dense_out, weight, out=target[0])
    else:
        target[0].copy_(torch.lerp(out.to(weight.dtype), dense_out.to(weight.dtype), weight))


class CpuFlash(_Blocks):
    """torch's fused CPU kernel: fp64, fp32, bf16, fp16; any head dim; no dropout."""

    name = "cpu_flash"
    # The kernel computes 512 keys at a time and masks afterwards, so that a causal block of up to 512 tokens costs as much
    # as a full one: smaller ones with a dense block beside them save a quarter of the diagonal.
    causal_tokens = 256
    # Gradients of a block are fresh memory. Blocks of a few MiB come from the heap again and again, still warm; those of a
    # long prefix would be mapped and zeroed page by page on every call.
    prefix_bytes = 2 * 2**20

    def is_available(self) -> bool:
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu")

    def refusal(self, q: Tensor, k: Tensor, dropout_p: float) -> str | None:
        if q.device.type != "cpu":
            return f"it runs on cpu, not on {q.device.type}"
        if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it does not take {q.dtype}"
        return "it cannot replay dropout" if dropout_p > 0 else None

    def _run(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, State]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse, ()

    def _run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        is_causal: bool, scale: float, state: State,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
        return dq, dk, dv


class CudaFlash(_Blocks):
    """torch's own FlashAttention kernel on CUDA: bf16 and fp16, head dims that are multiples of 8 up to 256."""

    name = "cuda_flash"

    def is_available(self) -> bool:
        return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 8

    def refusal(self, q: Tensor, k: Tensor, dropout_p: float) -> str | None:
        return _cuda_refusal(q, dropout_p)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, State]:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return out, lse, (cum_q, cum_k, max_q, max_k, seed, offset)

    def _run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        is_causal: bool, scale: float, state: State,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cum_q, cum_k, max_q, max_k, seed, offset = state
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset, scale=scale
        )
        return dq, dk, dv


def _cuda_refusal(q: Tensor, dropout_p: float) -> str | None:
    if q.device.type != "cuda":
        return f"it runs on cuda, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {q.shape[-1]}"
    return "it cannot replay dropout" if dropout_p > 0 else None


class FlashAttn:
    """The flash-attn package, found at run time: one call, its causal mask is aligned bottom-right (since 2.1)."""

    name = "flash_attn"

    def is_available(self) -> bool:
        if not torch.cuda.is_available():
            return False
        return importlib.util.find_spec("flash_attn") is not None

    def refusal(self, q: Tensor, k: Tensor, dropout_p: float) -> str | None:
        return _cuda_refusal(q, dropout_p)

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        # The package takes [B, tokens, heads, D].
        out, lse, _, rng = _flash_attn_forward(
            *(x.transpose(1, 2) for x in (q, keys, values)), 0.0, scale, causal=True,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out.transpose(1, 2), lse, (rng,)

    def backward(
        self, grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor,
        start: int, scale: float, dropout_p: float, state: State, add_grads: AddGrads,
    ) -> Tensor:  # fmt: skip
        from flash_attn.flash_attn_interface import _flash_attn_backward

        inputs = [x.transpose(1, 2) for x in (grad, q, keys, values, out)]
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[1:4])
        _flash_attn_backward(
            *(x if x.stride(-1) == 1 else x.contiguous() for x in inputs), lse, dq, dk, dv, 0.0, scale, causal=True,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
            rng_state=state[0],
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        add_grads(0, dk, dv)
        return dq


class Reference:
    """Plain torch on one block of scores [T, start + T]: any device, dtype and head dim, and dropout.

    The dropout mask is drawn from a generator of its own whose seed comes from torch's generator of the device: a
    recomputed forward, which finds that generator restored, draws the same seed and the same mask. Half precision is
    computed in fp32.
    """

    name = "reference"

    def is_available(self) -> bool:
        return True

    def refusal(self, q: Tensor, k: Tensor, dropout_p: float) -> str | None:
        return None

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        heads, tokens, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
        folded, wide_keys, wide_values = (_widen(x) for x in (fold_groups(q, kv_heads), keys, values))
        scores = self._scores(folded, wide_keys, tokens, start, scale)
        lse = scores.logsumexp(-1)
        probs = scores.sub_(lse.unsqueeze(-1)).exp_()
        seed = int(torch.randint(2**63 - 1, (), device=q.device)) if dropout_p > 0 else 0
        if dropout_p > 0:
            probs.mul_(self._dropout(probs, seed, dropout_p))
        out = (probs @ wide_values).to(q.dtype)
        return unfold_groups(out, heads, tokens), unfold_groups(lse, heads, tokens), (seed,)

    def backward(
        self, grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor,
        start: int, scale: float, dropout_p: float, state: State, add_grads: AddGrads,
    ) -> Tensor:  # fmt: skip
        heads, tokens, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
        d_out, folded, out = (_widen(fold_groups(x, kv_heads)) for x in (grad, q, out))
        wide_keys, wide_values = _widen(keys), _widen(values)
        scores = self._scores(folded, wide_keys, tokens, start, scale)
        probs = scores.sub_(lse.reshape(folded.shape[:3]).unsqueeze(-1)).exp_()
        d_probs = d_out @ wide_values.mT
        kept = probs
        if dropout_p > 0:
            mask = self._dropout(probs, state[0], dropout_p)
            kept = probs * mask
            d_probs.mul_(mask)
        dv = kept.mT @ d_out
        d_scores = d_probs.sub_((d_out * out).sum(-1, keepdim=True)).mul_(probs).mul_(scale)
        dq = unfold_groups((d_scores @ wide_keys).to(q.dtype), heads, tokens)
        dk, dv = (d_scores.mT @ folded).to(keys.dtype), dv.to(keys.dtype)
        add_grads(0, dk, dv)
        return dq

    @staticmethod
    def _scores(folded: Tensor, keys: Tensor, tokens: int, start: int, scale: float) -> Tensor:
        """[B, H_kv, G * T, start + T], -inf where a key is later than the query. Only the diagonal block has such."""
        scores = (folded @ keys.mT).mul_(scale)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu_(1)
        scores.unflatten(2, (-1, tokens))[..., start:].masked_fill_(later, -math.inf)
        return scores

    @staticmethod
    def _dropout(probs: Tensor, seed: int, dropout_p: float) -> Tensor:
        """Factors 0 and 1 / (1 - p) of the shape of `probs`, the same for the same seed."""
        generator = torch.Generator(device=probs.device).manual_seed(seed)
        kept = torch.rand(probs.shape, generator=generator, device=probs.device) >= dropout_p
        return kept.to(probs.dtype).mul_(1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0)


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
