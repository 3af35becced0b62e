"""The backends that need a device, on CPU: flash-attn through a stand-in, flex_attention uncompiled."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import forced
from hypothesis import given, settings
from reach_cases import Case, cases, error, run_formula, run_in_slices
from torch.nn.attention import flex_attention as torch_flex

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, sliced_attention
from terapipe_ds.attention.backends import backend_name, choose_backend, flash_attn, flex, fused
from terapipe_ds.attention.backends.base import Need
from terapipe_ds.attention.backends.flash_attn import FlashAttn
from terapipe_ds.attention.backends.flex import Flex

Tensor = torch.Tensor
fewer = settings(max_examples=settings.default.max_examples // 4)


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


@fewer
@given(case=cases())
def test_flash_attn_takes_every_option(case: Case) -> None:
    with flash_attn_on_cpu() as package:
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
    assert set(package.calls) <= {"rows", "packed"}


def test_flash_attn_takes_the_documents_of_a_row_in_one_call() -> None:
    case = Case((10, 10), starts=((0, 4, 12, 14), (0, 10)), window=5)
    with flash_attn_on_cpu() as package:
        run_in_slices(case)
    assert package.calls == ["packed", "packed", "packed", "packed"]  # two rows with other documents, two slices


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [
    Case((5, 6, 1), window=3), Case((5, 6, 1), softcap=0.7, with_sinks=True, scale=0.3),
    Case((5, 7), starts=((0, 3, 9), (0, 6)), value_dim=4, kv_heads=4),
    Case((5, 4, 3), starts=((0, 3, 9), (0,)), window=4, softcap=2.0, with_sinks=True, recompute=True, value_dim=12),
], ids=["window", "cap and sinks", "documents", "all"])  # fmt: skip
def test_flex_takes_every_option(case: Case) -> None:
    with flex_on_cpu():
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10


def test_the_mask_of_flex_is_what_the_definitions_say() -> None:
    starts, first = torch.tensor(3), torch.tensor([[0, 2, 5], [3, 3, 4]])
    sees = flex.mask_of(starts, first)
    places = torch.tensor([
        [[bool(sees(*map(torch.tensor, (row, 0, query, key)))) for key in range(6)] for query in range(3)]
        for row in range(2)
    ])  # fmt: skip
    query, key = torch.arange(3)[:, None] + 3, torch.arange(6)
    assert torch.equal(places, (key <= query) & (key >= first.unsqueeze(-1)))


NEEDS = {
    "plain": Need(), "window": Need(window=True), "softcap": Need(softcap=True), "documents": Need(documents=True),
    "wide values": Need(value_dim=512), "values": Need(value_dim=128), "dropout": Need(dropout=True),
    "window, dropout": Need(dropout=True, window=True),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "installed", "chosen"), [
    (torch.bfloat16, True, ["flash_attn"] * 4 + ["flex", "flash_attn"]),
    (torch.bfloat16, False, ["cuda_flash", "flex", "flex", "cuda_flash", "flex", "cuda_flash"]),
    (torch.float32, True, ["reference", *["flex"] * 5]), (torch.float64, True, ["reference"] * 6),
])  # fmt: skip
def test_what_is_chosen_on_a_device(
    dtype: torch.dtype, installed: bool, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fused, flash_attn, flex):
        monkeypatch.setattr(module, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attn, "has_flash_attn", lambda: installed)
    q: Any = types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 4, 2, 192))
    names = [choose_backend(q, need).name for need in NEEDS.values()]
    assert names == [*chosen, "reference", "reference"]


def test_what_is_chosen_on_cpu(caplog: pytest.LogCaptureFixture) -> None:
    names = [choose_backend(torch.zeros(1, 4, 2, 8), need).name for need in NEEDS.values()]
    softcap_or_dropout = ("softcap", "dropout", "window, dropout")
    assert names == ["reference" if need in softcap_or_dropout else "cpu_flash" for need in NEEDS]
    assert backend_name(torch.zeros(1, 4, 2, 8)) == "cpu_flash"


def test_a_forced_backend_refuses_a_softcap() -> None:
    x = torch.zeros(1, 1, 5, 8)
    with forced("cpu_flash"), push_slice(ActiveSlice(0, 5, 10, store=SliceStore())):
        with pytest.raises(ValueError, match="'cpu_flash' was forced, but it knows no softcap"):
            sliced_attention(x, x, x, 0, softcap=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "flex"])
@pytest.mark.parametrize("options", [
    {"window": 100}, {"window": 100, "softcap": 5.0, "with_sinks": True}, {"value_dim": 32},
    {"starts": ((0, 120, 500), (0, 340))}, {"starts": ((0, 120, 500), (0, 340)), "window": 90, "with_sinks": True},
])  # fmt: skip
def test_options_on_a_gpu(options: dict[str, Any], backend: str | None) -> None:
    case = Case((300, 250, 99, 1), dim=64, **{"value_dim": 64, **options}, dtype=torch.bfloat16)
    inputs: Callable[[], list[Tensor]] = case.inputs
    with pytest.MonkeyPatch.context() as patch, forced(backend):
        patch.setattr(Case, "inputs", lambda self: [x.cuda() for x in inputs()])
        found = [x.cpu() for x in run_in_slices(case)]
    assert error(found, run_formula(case)) <= 2e-2
