"""Stand-ins for kernels that need a device: torch's operators, flash-attn 2, 3 and 4, flex_attention uncompiled."""

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

    FlashAttention: masks are aligned bottom-right, tensors are [B, tokens, heads, D]. cuDNN: the causal
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

    def _hidden(self, q: Tensor, k: Tensor) -> Tensor:
        if self.variant == "no groups" and q.shape[1] > k.shape[1]:
            raise RuntimeError("Expected the heads to match\nand a trace")
        shift = 0 if self.variant == "upper left" else k.shape[2] - q.shape[2]
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + shift)

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

    def _drawn(self, q: Tensor, k: Tensor, p: float, seed: Any = None) -> tuple[Any, Tensor | None]:
        """Draw a seed as the kernel does, if dropout needs one, and return the factors of the probabilities."""
        if p == 0:
            return "seed", None
        if seed is None or self.variant == "draws again":
            seed = torch.randint(2**62, ())
        keep = torch.rand(*q.shape[:3], k.shape[2], generator=torch.Generator().manual_seed(int(seed))) >= p
        return seed, keep / ((1 - p) * (1.1 if self.variant == "keeps too much" else 1.0))

    def _window(self, q: Tensor, k: Tensor, left: int | None, right: int | None) -> Tensor:
        if left is None:
            assert right is None
            return self._hidden(q, k)
        assert right == 0 and left >= 0
        ago = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
        return (ago < 0) | (ago > left)

    def _flash_attention_forward(
        self, *arguments: Any, scale: float, window_size_left: int | None, window_size_right: int | None
    ) -> Any:
        *inputs, cum_q, cum_k, max_q, max_k, p, is_causal, debug = arguments
        q, k, v = (x.transpose(1, 2) for x in inputs)
        assert [cum_q, cum_k, max_q, max_k, is_causal, debug] == [None, None, q.shape[2], k.shape[2], True, False]
        self.calls.append((q.shape[2], k.shape[2], True))
        seed, keep = self._drawn(q, k, p)
        out, lse = kernel_attend(q, k, v, self._window(q, k, window_size_left, window_size_right), scale, keep)
        out = out * (1.1 if self._way(q, k) == self.variant else 1.0)
        return out.transpose(1, 2), lse, seed, "unused", None

    def _flash_attention_backward(
        self, *arguments: Any, scale: float, window_size_left: int | None, window_size_right: int | None
    ) -> Any:
        grad, q, k, v, out, lse, *rest = arguments
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        p, _, seed, _ = rest[4:]
        assert rest == [None, None, q.shape[2], k.shape[2], p, True, seed, "unused"] and lse.is_contiguous()
        self.calls.append((q.shape[2], k.shape[2], True))
        hidden, keep = self._window(q, k, window_size_left, window_size_right), self._drawn(q, k, p, seed)[1]
        dq, dk, dv = kernel_gradients(grad, (q, k, v), hidden, out, lse, scale, keep)
        is_wrong = self.variant == "backward" and q.shape[2] != k.shape[2]
        return tuple(x.transpose(1, 2) for x in (dq, dk * (1.1 if is_wrong else 1.0), dv))

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
    """flash-attn 2.7, 3 or 4 written out: bottom-right masks, windows, caps, packed rows; 2.7 has dropout.

    Tensors are [B, tokens, heads, D], or [tokens, heads, D] where they are packed. `calls` says which.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.deterministic: set[bool] = set()

    # -- the formulas

    @staticmethod
    def _attend(
        q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, left: int, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp for [heads, tokens, D]."""
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
        scores = q @ k.mT * scale
        if softcap > 0:
            scores = torch.tanh(scores / softcap) * softcap
        ago = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        scores = scores.masked_fill((ago < 0) | (ago > left if left >= 0 else ago < 0), -math.inf)
        return (torch.softmax(scores, -1) * (1 if keep is None else keep)) @ v, scores.logsumexp(-1)

    @staticmethod
    def _documents(q: Tensor, k: Tensor, lengths: Any) -> Iterator[Any]:
        """Yield the place of each sequence, among queries and among keys: a row, or a document of packed ones."""
        if lengths is None:
            yield from ((i, i) for i in range(q.shape[0]))
            return
        cumulative_q, cumulative_k, *longest = lengths
        for cumulative, most in zip(lengths[:2], longest or [None, None], strict=True):
            assert cumulative.dtype == torch.int32 and cumulative[0] == 0 and most in (None, cumulative.diff().max())
        assert cumulative_q[-1] == q.shape[0] and cumulative_k[-1] == k.shape[0]
        for i in range(len(cumulative_q) - 1):
            yield slice(*cumulative_q[i : i + 2].tolist()), slice(*cumulative_k[i : i + 2].tolist())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any, p: float, seed: int, *options: Any) -> Any:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        self.calls.append("rows" if lengths is None else "packed")
        out = torch.full_like(q, math.nan)
        lse = q.new_full(out.transpose(-2, -3).shape[:-1], math.nan)
        of_document = lse if lengths is None else lse.mT  # [B, heads, tokens], or [tokens, heads]
        for own, keys in self._documents(q, k, lengths):
            parts = (q[own].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
            result, sums = self._attend(*parts, *options, _keep(parts, p, seed))
            out[own], of_document[own] = result.transpose(0, 1), sums if lengths is None else sums.mT
        assert not out.isnan().any()
        return out, lse

    def gradients(self, *inputs: Any) -> Any:
        """Return the gradients by the kernel's formula, from the `out` and `lse` of the call, not from its own."""
        grad, q, k, v, out, lse, lengths, p, seed, deterministic, *options = inputs
        self.deterministic.add(deterministic)
        assert lse.is_contiguous()
        # version 3 raises otherwise ("must have contiguous last dimension"); torch's own call of it copies
        assert all(x.stride(-1) == 1 for x in (grad, q, k, v, out))
        found = [torch.full_like(x, math.nan) for x in (q, k, v)]
        for own, keys in self._documents(q, k, lengths):
            parts = [x[place].transpose(0, 1) for x, place in ((q, own), (k, keys), (v, keys))]
            d_out, result = (x[own].transpose(0, 1) for x in (grad, out))
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in parts]
                own_out, own_lse = self._attend(*leaves, *options, _keep(parts, p, seed))
            share = (own_lse - (lse[own] if lengths is None else lse[:, own])).exp().detach()
            delta = (d_out * result).sum(-1)
            pieces = torch.autograd.grad((own_out, own_lse), leaves, (d_out * share[..., None], delta * (1 - share)))
            for target, place, piece in zip(found, (own, keys, keys), pieces, strict=True):
                target[place] = piece.transpose(0, 1)
        return found

    # -- version 2.7

    def fa2_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: None, return_softmax: bool = False,
    ) -> Any:  # fmt: skip
        *lengths, p, scale = rest
        assert causal and not return_softmax and (window_size_left < 0) == (window_size_right < 0)
        state = torch.zeros(2, dtype=torch.int64) if p == 0 else torch.randint(2**62, (2,))
        options = self._seed(state), scale, softcap, window_size_left
        return *self.attend(q, k, v, lengths or None, p, *options), torch.empty(0), state

    def fa2_backward(
        self, *rest: Any, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        alibi_slopes: None, deterministic: bool, rng_state: Tensor,
    ) -> None:  # fmt: skip
        *inputs, dq, dk, dv = rest[:9]
        *lengths, p, scale = rest[9:]
        options = self._seed(rng_state), deterministic, scale, softcap, window_size_left
        self._write((dq, dk, dv), self.gradients(*inputs, lengths or None, p, *options))

    @staticmethod
    def _write(targets: Any, parts: Any) -> None:
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    @staticmethod
    def _seed(state: Tensor) -> int:
        return int(state[0])

    # -- version 3: operators; version 4

    def fa3_forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        nothing = q.new_empty(0)
        self.deterministic.add(options["num_splits"] == 1)  # keys that are divided are added up in any order
        return *self.attend(q, k, v, _lengths(options), 0.0, 0, *_numbers(options)), nothing, nothing

    def fa3_backward(self, *rest: Any, **options: Any) -> Any:
        *inputs, dq, dk, dv = rest
        gradients = self.gradients(*inputs, _lengths(options), 0.0, 0, options["deterministic"], *_numbers(options))
        self._write((dq, dk, dv), gradients)
        return [dq.new_empty(0)] * 5

    def fa4_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, softmax_scale: Any = None, causal: bool = False,
        softcap: Any = None, window_size_left: Any = None, window_size_right: Any = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert causal and return_lse and (window_size_left is None) == (window_size_right is None)
        lengths = None if cu_seqlens_q is None else [cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k]
        left = -1 if window_size_left is None else window_size_left
        return self.attend(q, k, v, lengths, 0.0, 0, softmax_scale, softcap or 0.0, left)

    def fa4_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: Any = None,
        causal: bool = False, softcap: float = 0.0, window_size_left: Any = None, window_size_right: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, deterministic: bool = False,
    ) -> Any:  # fmt: skip
        lengths = None if cu_seqlens_q is None else [cu_seqlens_q, cu_seqlens_k]
        left = -1 if window_size_left is None else window_size_left
        return self.gradients(
            dout, q, k, v, out, lse, lengths, 0.0, 0, deterministic, softmax_scale, softcap, left
        )  # fmt: skip


def _keep(parts: Any, p: float, seed: int) -> Tensor | None:
    """Return the factors of dropped and kept probabilities, equal for the same seed."""
    shape = (parts[0].shape[0], parts[0].shape[1], parts[1].shape[1])
    return None if p == 0 else (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)


def _lengths(options: dict[str, Any]) -> list[Any] | None:
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return None if options.get("cu_seqlens_q") is None else [options[name] for name in names]


def _numbers(options: dict[str, Any]) -> tuple[float, float, int]:
    assert options["is_causal"] and (options["window_size_left"] < 0) == (options["window_size_right"] < 0)
    return options["softmax_scale"], options["softcap"], options["window_size_left"]


def fa3_schemas() -> tuple[str, str]:
    """Return the schemas of flash-attn 3's operators, as torch's own use of them asks (torch/nn/attention/_fa3.py)."""
    lengths = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    used = "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    numbers = "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    qkv, new = "Tensor q, Tensor k, Tensor v, ", "Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
    others = "page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale"
    optional = "".join(f"Tensor? {name}=None, " for name in others.split())
    end = "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, "
    forward = f"{qkv}{new}Tensor? out=None, {lengths}Tensor? cu_seqlens_k_new=None, {used}{optional}{numbers}"
    written = "".join(f"Tensor({x}!)? d{x}=None, " for x in "qkv")
    backward = f"Tensor dout, {qkv}Tensor out, Tensor softmax_lse, {written}{lengths}{used}{numbers}float softcap=0., "
    return (
        f"fwd({forward}int attention_chunk=0, float softcap=0., {end}int sm_margin=0) -> ({', '.join(['Tensor'] * 4)})",
        f"bwd({backward}bool deterministic=False, int sm_margin=0) -> ({', '.join(['Tensor'] * 5)})",
    )


def _by_name(schema: str, function: Any) -> Any:
    """Return `function` as torch calls operators, with the first ones of all arguments, the others being defaults."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    tensors = [x.name for x in arguments if not x.has_default_value() or x.name in ("dq", "dk", "dv")]

    def call(*positional: Any, **named: Any) -> Any:
        defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}
        options = {**defaults, **dict(zip((x.name for x in arguments), positional, strict=False)), **named}
        return function(*[options.pop(name) for name in tensors], **options)

    return call


@contextmanager
def flash_attn_installed(written_out: FlashAttnPackage) -> Iterator[None]:
    """Have all versions of flash-attn in the place of whatever is installed."""
    modules = {name: types.ModuleType(name) for name in (
        "flash_attn", "flash_attn.cute", "flash_attn.flash_attn_interface", "flash_attn.cute.interface",
        "flash_attn_interface",
    )}  # fmt: skip
    two: Any = modules["flash_attn.flash_attn_interface"]
    two._flash_attn_forward = two._flash_attn_varlen_forward = written_out.fa2_forward
    two._flash_attn_backward = two._flash_attn_varlen_backward = written_out.fa2_backward
    four: Any = modules["flash_attn.cute.interface"]
    four._flash_attn_fwd, four._flash_attn_bwd = written_out.fa4_forward, written_out.fa4_backward
    modules["flash_attn"].flash_attn_interface = two  # type: ignore[attr-defined]
    modules["flash_attn_interface"].flash_attn_func = None  # type: ignore[attr-defined]
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    forward, backward = fa3_schemas()
    for schema, function in ((forward, written_out.fa3_forward), (backward, written_out.fa3_backward)):
        name, call = schema.partition("(")[0], _by_name(schema, function)
        library.define(schema)
        library.impl(name, call, "CPU")
        torch.library.register_fake(f"flash_attn_3::{name}", call, lib=library)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            yield
    finally:
        library._destroy()


@contextmanager
def flash_attn_on_cpu(
    kind: type[FlashAttn] = FlashAttn, package: FlashAttnPackage | None = None
) -> Iterator[FlashAttnPackage]:
    """Have a version of flash-attn run on CPU, and take every dtype and head dim."""
    written_out = package or FlashAttnPackage()
    with flash_attn_installed(written_out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "refusal", lambda self, q, need: None)
        patch.setattr(kind, "is_available", lambda self: True)
        with forced(kind.name):
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
