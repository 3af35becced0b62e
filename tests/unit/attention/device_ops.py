"""Stand-ins for kernels that need a device: torch's operators, the flash-attn package, flex_attention uncompiled."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import Tensor, forced, kernel_attend, kernel_gradients
from torch.nn.attention import flex_attention as torch_flex

from terapipe_ds.attention.backends import flex
from terapipe_ds.attention.backends.flash_attn import FlashAttn
from terapipe_ds.attention.backends.flex import Flex


class TorchOps:
    """torch's operators written out, as an H100 was seen to compute them; `calls` has (queries, keys, is_causal).

    FlashAttention: masks are aligned bottom-right; with a window tensors are [B, tokens, heads, D]. cuDNN: the causal
    mask is aligned top-left and `shift` tokens off, the log-sum-exp has a fourth dimension, one query with one key is
    refused, grouped heads are taken.

    Variants of FlashAttention: "upper left" aligns the mask otherwise, "no groups" refuses grouped heads, "backward"
    gives a wrong dK of causal blocks that are not square. The others are wrong on one way through the kernel: "split"
    where it divides the keys (on 132 processors, by flash_api.cpp), "full" where it does not although there are several
    blocks of them, "query" where one query's group takes the place of queries, "first" for grouped heads of a square
    block.
    """

    def __init__(self, variant: str = "", shift: int = 0) -> None:
        self.variant, self.shift, self.calls = variant, shift, list[tuple[int, int, bool]]()

    def _hidden(self, q: Tensor, k: Tensor, is_causal: bool) -> Tensor | None:
        if self.variant == "no groups" and q.shape[1] > k.shape[1]:
            raise RuntimeError("Expected the heads to match\nand a trace")
        shift = 0 if self.variant == "upper left" else k.shape[2] - q.shape[2]
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + shift) if is_causal else None

    @staticmethod
    def _way(q: Tensor, k: Tensor) -> str:
        dim, grouped = q.shape[3], q.shape[1] > k.shape[1]
        key_blocks = -(-k.shape[2] // (256 if dim <= 64 else 128 if dim <= 128 else 64))
        query_blocks = q.shape[0] * q.shape[1] * -(-q.shape[2] // 64)
        if q.shape[2] == 1 and grouped:
            return "query"
        if q.shape[2] == k.shape[2] and grouped:
            return "first"
        if key_blocks > 1:
            return "split" if query_blocks < 0.8 * 2 * 132 else "full"
        return "one block"

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, debug: bool, *, scale: float
    ) -> tuple[Any, ...]:
        self.calls.append((q.shape[2], k.shape[2], is_causal))
        out, lse = kernel_attend(q, k, v, self._hidden(q, k, is_causal), scale)
        out = out * (1.1 if is_causal and self._way(q, k) == self.variant else 1.0)
        return out, lse, "cum_q", "cum_k", 0, 0, "seed", "offset", None

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        max_q, max_k, is_causal = q.shape[2], k.shape[2], rest[5]
        assert rest == ("cum_q", "cum_k", max_q, max_k, 0.0, is_causal, "seed", "offset")
        self.calls.append((q.shape[2], k.shape[2], is_causal))
        dq, dk, dv = kernel_gradients(grad, (q, k, v), self._hidden(q, k, is_causal), out, lse, scale)
        is_wrong = self.variant == "backward" and is_causal and max_q != max_k
        return dq, dk * (1.1 if is_wrong else 1.0), dv

    def _window(self, q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
        assert right == 0 and left >= 0
        ago = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
        return (ago < 0) | (ago > left)

    def _flash_attention_forward(
        self, *arguments: Any, scale: float, window_size_left: int, window_size_right: int
    ) -> Any:
        *inputs, cum_q, cum_k, max_q, max_k, p, is_causal, debug = arguments
        q, k, v = (x.transpose(1, 2) for x in inputs)
        assert [cum_q, cum_k, max_q, max_k, p, is_causal, debug] == [
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            True,
            False,
        ]
        self.calls.append((q.shape[2], k.shape[2], True))
        out, lse = kernel_attend(q, k, v, self._window(q, k, window_size_left, window_size_right), scale)
        return out.transpose(1, 2), lse, "rng", "unused", None

    def _flash_attention_backward(
        self, *arguments: Any, scale: float, window_size_left: int, window_size_right: int
    ) -> Any:
        grad, q, k, v, out, lse, *rest = arguments
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        assert rest == [None, None, q.shape[2], k.shape[2], 0.0, True, "rng", "unused"] and lse.is_contiguous()
        hidden = self._window(q, k, window_size_left, window_size_right)
        return tuple(x.transpose(1, 2) for x in kernel_gradients(grad, (q, k, v), hidden, out, lse, scale))

    def _top_left(self, q: Tensor, k: Tensor, is_causal: bool) -> Tensor | None:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + self.shift)
        return hidden if is_causal else None

    def _scaled_dot_product_cudnn_attention(self, *arguments: Any, scale: float) -> Any:
        q, k, v, bias, with_lse, p, is_causal, debug = arguments
        assert (bias, with_lse, p, debug) == (None, True, 0.0, False)
        if q.shape[2] == k.shape[2] == 1:
            raise RuntimeError("cuDNN Frontend error: s_q = s_kv = 1 is not supported.")
        self.calls.append((q.shape[2], k.shape[2], is_causal))
        out, lse = kernel_attend(q, k, v, self._top_left(q, k, is_causal), scale)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], "seed", "offset", None

    def _scaled_dot_product_cudnn_attention_backward(self, *arguments: Any, scale: float) -> Any:
        grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, is_causal = arguments
        assert (seed, offset, bias, cum_q, cum_k, max_q, max_k, p) == (
            "seed", "offset", None, None, None, q.shape[2], k.shape[2], 0.0,
        )  # fmt: skip
        assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        return kernel_gradients(grad, (q, k, v), self._top_left(q, k, is_causal), out, lse.squeeze(-1), scale)


class FlashAttnPackage:
    """The package's four functions as of 2.7, written out: bottom-right masks, windows, caps, packed rows.

    Tensors are [B, tokens, heads, D], or [tokens, heads, D] where they are packed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp for [heads, tokens, D]."""
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and options["causal"] and options["alibi_slopes"] is None
        left, right, softcap = (options[name] for name in ("window_size_left", "window_size_right", "softcap"))
        assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
        scores = q @ k.mT * scale
        if softcap > 0:
            scores = torch.tanh(scores / softcap) * softcap
        ago = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        hidden = (ago < 0) | (ago > left if left >= 0 else ago < 0)
        scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ v, scores.logsumexp(-1)

    def _backward_of(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, options: Any
    ) -> tuple[Tensor, ...]:
        """Return the gradients by the kernel's formula: of `out` and `lse` as they are given, not of its own."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            own_out, own_lse = self._attend(*leaves, scale, options)
        share = (own_lse - lse).exp().detach()
        delta = (grad * out).sum(-1)
        return torch.autograd.grad((own_out, own_lse), leaves, (grad * share.unsqueeze(-1), delta * (1 - share)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float, **options: Any) -> Any:
        assert dropout_p == 0 and options.pop("return_softmax") is False
        self.calls.append("rows")
        rows = [self._attend(*(x.transpose(0, 1) for x in row), scale, options) for row in zip(q, k, v, strict=True)]
        out, lse = (torch.stack(x) for x in zip(*rows, strict=True))
        return out.transpose(1, 2), lse, torch.empty(0), torch.zeros(2)

    def backward(self, *tensors_and_numbers: Any, **options: Any) -> None:
        *tensors, lse, dq, dk, dv, dropout_p, scale = tensors_and_numbers
        assert dropout_p == 0 and options.pop("deterministic") is False and options.pop("rng_state") is not None
        for row in range(lse.shape[0]):
            found = self._backward_of(*(x[row].transpose(0, 1) for x in tensors), lse[row], scale, options)
            for target, part in zip((dq, dk, dv), found, strict=True):
                target[row] = part.transpose(0, 1)

    @staticmethod
    def _documents(cumulative_q: Tensor, cumulative_k: Tensor, longest_q: int, longest_k: int) -> Iterator[Any]:
        for cumulative, longest in ((cumulative_q, longest_q), (cumulative_k, longest_k)):
            assert cumulative.dtype == torch.int32 and cumulative[0] == 0 and longest == cumulative.diff().max()
        for i in range(len(cumulative_q) - 1):
            yield slice(*cumulative_q[i : i + 2].tolist()), slice(*cumulative_k[i : i + 2].tolist())

    def packed_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        *lengths, dropout_p, scale = rest
        assert dropout_p == 0
        self.calls.append("packed")
        out, lse = torch.full_like(q, math.nan), q.new_full((q.shape[1], q.shape[0]), math.nan)
        for own, keys in self._documents(*lengths):
            parts = (q[own].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
            of_document, lse[:, own] = self._attend(*parts, scale, options)
            out[own] = of_document.transpose(0, 1)
        assert not out.isnan().any()
        return out, lse, torch.empty(0), torch.zeros(2)

    def packed_backward(self, *tensors_and_numbers: Any, **options: Any) -> None:
        grad, q, k, v, out, lse, dq, dk, dv, *lengths, dropout_p, scale = tensors_and_numbers
        assert lse.is_contiguous() and dropout_p == 0
        assert options.pop("deterministic") is False and options.pop("rng_state") is not None
        for own, keys in self._documents(*lengths):
            places = (own, own, keys, keys, own)
            parts = (x[place].transpose(0, 1) for x, place in zip((grad, q, k, v, out), places, strict=True))
            found = self._backward_of(*parts, lse[:, own], scale, options)
            for target, place, part in zip((dq, dk, dv), (own, keys, keys), found, strict=True):
                target[place] = part.transpose(0, 1)


@contextmanager
def flash_attn_on_cpu() -> Iterator[FlashAttnPackage]:
    """Have `flash_attn` run on CPU, and take every dtype and head dim."""
    package, written_out = types.ModuleType("flash_attn"), FlashAttnPackage()
    package.__path__ = []
    functions: Any = types.ModuleType("flash_attn.flash_attn_interface")
    functions._flash_attn_forward, functions._flash_attn_backward = written_out.forward, written_out.backward
    functions._flash_attn_varlen_forward = written_out.packed_forward
    functions._flash_attn_varlen_backward = written_out.packed_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", package)
        patch.setitem(sys.modules, "flash_attn.flash_attn_interface", functions)
        patch.setattr(FlashAttn, "refusal", lambda self, q, need: None)
        patch.setattr(FlashAttn, "is_available", lambda self: True)
        with forced("flash_attn"):
            yield written_out


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Have `flex` run uncompiled, and torch let it have a backward on CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
        patch.setattr(flex, "_compiled", lambda: flex.attend)
        patch.setattr(Flex, "refusal", lambda self, q, need: None)
        patch.setattr(Flex, "is_available", lambda self: True)
        with forced("flex"):
            yield
