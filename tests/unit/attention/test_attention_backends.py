"""Which backend runs, what each refuses, and attention dropout."""

import logging
import math
import types
from typing import Any

import pytest
import torch
from attention_cases import forced, random_inputs, run_sliced

from terapipe_ds.attention import backends, set_backend, sliced_attention
from terapipe_ds.attention.backends import backend_name, choose_backend, first_use, flash_attn, flex, fused
from terapipe_ds.attention.backends.base import Need
from terapipe_ds.attention.backends.flash_attn import CudaFlash, FlashAttn
from terapipe_ds.attention.backends.fused import CpuFlash
from terapipe_ds.attention.backends.reference import draw_seed, dropout_factors


def test_unknown_and_unavailable_backends() -> None:
    with pytest.raises(ValueError, match="'flash'.*flash_attn, cudnn, cuda_flash, flex, cpu_flash, reference"):
        set_backend("flash")
    if not torch.cuda.is_available():
        for name in ("cuda_flash", "flash_attn", "flash_attn_3", "flash_attn_4", "flex"):
            with pytest.raises(ValueError, match=f"'{name}' cannot run on this machine; available here: cpu_flash"):
                set_backend(name)
    assert choose_backend(torch.zeros(1, 1, 4, 8), Need()).name == "cpu_flash"


@pytest.mark.parametrize(
    ("options", "reason"), [({"dropout_p": 0.1}, "it cannot replay dropout"), ({"softcap": 2.0}, "it knows no softcap")]
)
def test_what_a_forced_backend_refuses(options: dict[str, float], reason: str) -> None:
    with forced("cpu_flash"), pytest.raises(ValueError, match=f"'cpu_flash' was forced, but {reason}"):
        run_sliced(random_inputs(), (9, 11), attend=lambda q, k, v: sliced_attention(q, k, v, 0, **options))


def pass_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every kernel be right at its first use, without a call."""
    monkeypatch.setattr(first_use, "wrong_result", lambda *key: None)
    monkeypatch.setattr(backends, "_chosen", {})


@pytest.mark.parametrize("backend", [CudaFlash(), FlashAttn()])
@pytest.mark.parametrize(("device", "dtype", "dim", "dropout_p", "reason"), [
    ("cpu", torch.bfloat16, 64, 0.0, "not on cpu"), ("cuda", torch.float32, 64, 0.0, "bfloat16 and float16, not torch"),
    ("cuda", torch.bfloat16, 60, 0.0, "multiples of 8 up to 256, not"), ("cuda", torch.bfloat16, 264, 0.0, "not 264"),
    ("cuda", torch.bfloat16, 64, 0.1, None), ("cuda", torch.float16, 256, 0.0, None),
])  # fmt: skip
def test_what_the_cuda_kernels_refuse(
    backend: Any,
    device: str,
    dtype: torch.dtype,
    dim: int,
    dropout_p: float,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pass_all_checks(monkeypatch)
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
    before = torch.get_rng_state()
    seeds = [draw_seed(probs.device) for _ in range(2)]
    torch.set_rng_state(before)
    assert len(set(seeds)) == 2 and draw_seed(probs.device) == seeds[0]


# -- kernels that need a device, through stand-ins ------------------------------------------------------------------


def test_flash_attn_is_looked_for_only_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, installed, expected in (((0, 0), True, False), ((8, 0), True, True), ((9, 0), False, False)):
        for module in (fused, flash_attn):
            monkeypatch.setattr(module, "cuda_capability", lambda value=capability: value)
        monkeypatch.setattr(flash_attn, "has_flash_attn", lambda value=installed: value)
        assert FlashAttn().is_available() is expected
        assert CudaFlash().is_available() is (capability >= (8, 0))


NEEDS = {
    "plain": Need(), "window": Need(window=True), "softcap": Need(softcap=True), "documents": Need(documents=True),
    "wide values": Need(value_dim=512), "values": Need(value_dim=128), "dropout": Need(dropout=True),
    "window, dropout": Need(dropout=True, window=True),
}  # fmt: skip


def test_what_is_chosen_on_cpu() -> None:
    q = torch.zeros(1, 4, 2, 8)
    names = [choose_backend(q, need).name for need in NEEDS.values()]
    softcap_or_dropout = ("softcap", "dropout", "window, dropout")
    assert names == ["reference" if need in softcap_or_dropout else "cpu_flash" for need in NEEDS]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert backend_name(q.to(dtype)) == "cpu_flash"
    assert backend_name(q.to("meta")) == "reference"


@pytest.mark.parametrize(("dtype", "installed", "chosen"), [
    (torch.bfloat16, True, [*["flash_attn"] * 4, "flex", *["flash_attn"] * 3]),
    (torch.bfloat16, False, ["cuda_flash", "cuda_flash", "flex", "cuda_flash", "flex", *["cuda_flash"] * 3]),
    (torch.float32, True, ["reference", *["flex"] * 5, "reference", "reference"]),
    (torch.float64, True, ["reference"] * 8),
])  # fmt: skip
def test_what_is_chosen_on_a_device(
    dtype: torch.dtype, installed: bool, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fused, flash_attn, flex):
        monkeypatch.setattr(module, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attn, "has_flash_attn", lambda: installed)
    monkeypatch.setattr(fused.Cudnn, "is_available", lambda self: False)
    pass_all_checks(monkeypatch)
    monkeypatch.setattr(backends, "fastest", lambda kernels, q, need: {"flash_attn": 1.0, "cuda_flash": 2.0})
    q: Any = types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 4, 2, 192))
    names = [choose_backend(q, need).name for need in NEEDS.values()]
    assert names == chosen
