"""Which backend runs, what each refuses, and the ones that need a device through stand-ins."""

from __future__ import annotations

import logging
import math
import sys
import types
from typing import Any

import pytest
import torch
from attention_cases import (
    Tensor,
    forced,
    kernel_attend,
    kernel_gradients,
    largest_error,
    random_inputs,
    run_plain,
    run_sliced,
)

from terapipe_ds.attention import SliceStore, available_backends, backends, set_backend, sliced_attention
from terapipe_ds.attention.backends import choose_backend, flash_attn, fused
from terapipe_ds.attention.backends.base import Need
from terapipe_ds.attention.backends.flash_attn import FlashAttn
from terapipe_ds.attention.backends.fused import CpuFlash, CudaFlash
from terapipe_ds.attention.backends.reference import dropout_factors


def test_the_automatic_choice() -> None:
    q = torch.zeros(1, 1, 4, 8)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert choose_backend(q.to(dtype), Need()).name == "cpu_flash"
    assert choose_backend(q, Need(dropout=True)).name == "reference"
    assert choose_backend(q.to("meta"), Need()).name == "reference"


def test_unknown_and_unavailable_backends() -> None:
    with pytest.raises(ValueError, match="'flash'.*flash_attn, cudnn, cuda_flash, flex, cpu_flash, reference"):
        set_backend("flash")
    if not torch.cuda.is_available():
        for name in ("cuda_flash", "flash_attn", "flex"):
            with pytest.raises(ValueError, match=f"'{name}' cannot run on this machine; available here: cpu_flash"):
                set_backend(name)
    assert choose_backend(torch.zeros(1, 1, 4, 8), Need()).name == "cpu_flash"


def test_a_forced_backend_refuses_dropout() -> None:
    inputs = random_inputs()
    with forced("cpu_flash"), pytest.raises(ValueError, match="'cpu_flash' was forced, but it cannot replay dropout"):
        run_sliced(inputs, (9, 11), attend=lambda q, k, v: sliced_attention(q, k, v, 0, dropout_p=0.1))


@pytest.mark.parametrize("backend", [CudaFlash(), FlashAttn()])
@pytest.mark.parametrize(("device", "dtype", "dim", "dropout_p", "reason"), [
    ("cpu", torch.bfloat16, 64, 0.0, "not on cpu"), ("cuda", torch.float32, 64, 0.0, "bfloat16 and float16, not torch"),
    ("cuda", torch.bfloat16, 60, 0.0, "multiples of 8 up to 256, not"), ("cuda", torch.bfloat16, 264, 0.0, "not 264"),
    ("cuda", torch.bfloat16, 64, 0.1, "cannot replay dropout"), ("cuda", torch.float16, 256, 0.0, None),
])  # fmt: skip
def test_what_the_cuda_kernels_refuse(
    backend: Any, device: str, dtype: torch.dtype, dim: int, dropout_p: float, reason: str | None
) -> None:
    q = types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 2, dim))
    refusal = backend.refusal(q, Need(dropout=dropout_p > 0))
    assert refusal is None if reason is None else reason in refusal


def test_what_the_cpu_kernel_refuses() -> None:
    q = torch.empty(1, 1, 2, 8)
    assert "not on meta" in CpuFlash().refusal(q.to("meta"), Need()) and "int32" in CpuFlash().refusal(q.int(), Need())


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_logged", set())
    inputs = random_inputs()
    with caplog.at_level(logging.INFO, logger="terapipe_ds"):
        run_sliced(inputs, (5, 5, 10))
        run_sliced(inputs, (5, 5, 10))
        run_sliced([x.float() for x in inputs], (5, 15))
        with forced("reference"):
            run_sliced(inputs, (5, 15))
    assert [record.getMessage() for record in caplog.records if record.name == "terapipe_ds"] == [
        "sliced attention: automatic backend cpu_flash for cpu, torch.float64",
        "sliced attention: automatic backend cpu_flash for cpu, torch.float32",
        "sliced attention: forced backend reference for cpu, torch.float64",
    ]


# -- dropout ------------------------------------------------------------------------------------------------------


def test_dropout_masks_are_replayed_drawn_anew_and_of_the_right_mean() -> None:
    probs = torch.ones(64, 1000, dtype=torch.float64)
    first, again, other = (dropout_factors(probs, seed, 0.3) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((first == 0).double().mean()) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / first.numel())


def test_gradients_under_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through the same masks; every slice has a mask of its own."""
    masks: list[Tensor] = []
    original = dropout_factors

    def recording(probs: Tensor, seed: int, dropout_p: float) -> Tensor:
        masks.append(original(probs, seed, dropout_p))
        return masks[-1]

    monkeypatch.setattr("terapipe_ds.attention.backends.reference.dropout_factors", recording)
    inputs = random_inputs((2, 2, 2, 20, 8))
    result = run_sliced(inputs, (9, 11), attend=lambda q, k, v: sliced_attention(q, k, v, 0, dropout_p=0.4))
    assert torch.equal(masks[0], masks[3]) and torch.equal(masks[1], masks[2])  # forwards 0, 1, backwards 1, 0
    mask = torch.zeros(2, 2, 20, 20, dtype=torch.float64)
    mask[:, :, :9, :9], mask[:, :, 9:, :] = masks[0], masks[1]

    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    probs = torch.softmax((q @ k.mT / math.sqrt(8)).masked_fill(hidden, -math.inf), -1)
    out = (probs * mask) @ v
    expected = type(result)(out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3]))
    assert largest_error(result, expected) <= 1e-12


# -- kernels that need a device, through stand-ins ------------------------------------------------------------------


def test_flash_attn_is_looked_for_only_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, installed, expected in (((0, 0), True, False), ((8, 0), True, True), ((9, 0), False, False)):
        for module in (fused, flash_attn):
            monkeypatch.setattr(module, "cuda_capability", lambda value=capability: value)
        monkeypatch.setattr(flash_attn, "has_flash_attn", lambda value=installed: value)
        assert FlashAttn().is_available() is expected
        assert CudaFlash().is_available() is (capability >= (8, 0))


SLICES = [(9, 9, True), (10, 19, True), (1, 20, True)]


class FlashOps:
    """torch's two operators written out; `calls` joins (queries, keys, is_causal) of each call.

    Variants: "upper left" aligns the mask otherwise, "no groups" refuses grouped heads, "backward" gives a wrong dK of
    causal blocks that are not square. The others are wrong on one way through the kernel: "split" where it divides the
    keys (on 132 processors, by flash_api.cpp), "full" where it does not although there are several blocks of them,
    "query" where one query's group takes the place of queries, "first" for grouped heads of a square block.
    """

    def __init__(self, variant: str = "") -> None:
        self.variant, self.calls = variant, list[tuple[int, int, bool]]()

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


def _fake_flash_attn(ops: FlashOps) -> types.ModuleType:
    """Stand in for the two functions of the package as of 2.7. Tensors are [B, tokens, heads, D]."""
    module: Any = types.ModuleType("flash_attn.flash_attn_interface")
    given = {"causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float, **options: Any) -> tuple[Tensor, ...]:
        assert options == {**given, "return_softmax": False} and dropout_p == 0.0
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = ops._scaled_dot_product_flash_attention(*inputs, dropout_p, True, False, scale=scale)
        return out.transpose(1, 2), lse, torch.empty(0), torch.zeros(2)

    def backward(*arguments: Any, rng_state: Tensor, **options: Any) -> None:
        assert options == {**given, "deterministic": False} and rng_state is not None
        lse, *targets, dropout_p, scale = arguments[5:]
        inputs = [x.transpose(1, 2) for x in arguments[:5]]
        rest = ("cum_q", "cum_k", inputs[1].shape[2], inputs[2].shape[2], dropout_p, True, "seed", "offset")
        gradients = ops._scaled_dot_product_flash_attention_backward(*inputs, lse, *rest, scale=scale)
        for target, gradient in zip(targets, gradients, strict=True):
            target.copy_(gradient.transpose(1, 2))

    module._flash_attn_forward, module._flash_attn_backward = forward, backward
    return module


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["all heads", "grouped"])
def test_flash_attn_takes_one_call_per_slice(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ops, package = FlashOps(), types.ModuleType("flash_attn")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", _fake_flash_attn(ops))
    monkeypatch.setattr(FlashAttn, "refusal", lambda self, q, need: None)
    monkeypatch.setattr(FlashAttn, "is_available", lambda self: True)
    inputs = random_inputs((2, *heads, 20, 8))
    with forced("flash_attn"):
        assert largest_error(run_sliced(inputs, (9, 10, 1)), run_plain(inputs)) <= 1e-12
    assert ops.calls == [*SLICES, *reversed(SLICES)]


def _forget() -> None:
    for cached in (fused._takes_slices, fused.wrong_result):
        cached.cache_clear()


def _run_on_flash_ops(ops: FlashOps, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> float:
    _forget()
    monkeypatch.setattr(fused, "_aten", ops)
    monkeypatch.setattr(CudaFlash, "refusal", lambda self, q, need: None)
    monkeypatch.setattr(CudaFlash, "is_available", lambda self: True)
    inputs = random_inputs((2, *heads, 20, 8))
    try:
        with forced("cuda_flash"):
            return largest_error(run_sliced(inputs, (9, 10, 1)), run_plain(inputs))
    finally:
        _forget()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["all heads", "grouped"])
def test_cuda_flash_takes_one_call_per_slice(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops = FlashOps()
    with caplog.at_level(logging.WARNING, logger="terapipe_ds"):
        assert _run_on_flash_ops(ops, heads, monkeypatch) <= 1e-12
    calls = [call for call in ops.calls if call[1] <= 20]  # the others are those of the check
    assert calls == [*SLICES, *reversed(SLICES)]
    assert len(ops.calls) == len(calls) + 2 * len(fused._CHECKED)  # which was made once
    assert not caplog.records


@pytest.mark.parametrize(("variant", "said"), [
    ("upper left", "% off"), ("no groups", "Expected the heads to match"), ("backward", "10.0% off for 40 tokens"),
    ("split", "10.0% off for 40 tokens after 1000"),
    ("full", "10.0% off for 64 tokens after 300"), ("query", "10.0% off for 1 tokens after 1000"),
    ("first", "10.0% off for 300 tokens after 0"),
])  # fmt: skip
def test_cuda_flash_falls_back_to_two_calls(
    variant: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops = FlashOps(variant)
    with caplog.at_level(logging.WARNING, logger="terapipe_ds"):
        error = _run_on_flash_ops(ops, (4, 2), monkeypatch)
    (record,) = caplog.records
    assert said in record.getMessage() and "two calls per slice" in record.getMessage()
    assert error <= 1e-12
    assert (10, 19, True) not in ops.calls and (2 * 10, 9, False) in ops.calls


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256])
def test_the_check_takes_every_way_through_the_kernel(dim: int) -> None:
    shapes = [(torch.empty(b, h, n, dim), torch.empty(b, kv, n + p, dim)) for b, h, kv, n, p in fused._CHECKED]
    assert {FlashOps._way(q, k) for q, k in shapes} >= {"first", "split", "full", "query"}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, *(n for n in ("flash_attn", "cuda_flash") if n in available_backends())])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["all heads", "grouped"])
def test_on_a_gpu(heads: tuple[int, int], dtype: torch.dtype, backend: str | None) -> None:
    inputs = random_inputs((2, *heads, 1000, 64), dtype)
    expected = run_plain(inputs)
    on_device = [x.cuda() for x in inputs]
    unsliced = _on_cpu(run_sliced(on_device, (1000,)))
    with forced(backend):
        store = SliceStore()
        error = largest_error(_on_cpu(run_sliced(on_device, (300, 500, 199, 1), store)), expected)
    assert error <= 2 * largest_error(unsliced, expected)
    assert store.peak_bytes() == 2 * 2 * 1000 * heads[1] * 64 * (2 + 4)


def _on_cpu(result: Any) -> Any:
    return type(result)(*(x.cpu() for x in result))
