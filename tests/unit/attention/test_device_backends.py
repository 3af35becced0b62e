"""The kernels that need a device, on CPU: through stand-ins, flex_attention uncompiled, shapes on `meta`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import Tensor, forced, largest_error, random_inputs, run_plain, run_sliced
from device_ops import TorchOps, flash_attn_on_cpu, flex_on_cpu
from hypothesis import given, settings
from reach_cases import Case, cases, error, run_formula, run_in_slices

from terapipe_ds.attention import backends
from terapipe_ds.attention.backends import choose_backend, cudnn, flex, fused
from terapipe_ds.attention.backends.base import Need, Queries
from terapipe_ds.attention.backends.cudnn import Cudnn
from terapipe_ds.attention.backends.fused import CudaFlash
from terapipe_ds.attention.backends.reference import Reference

fewer = settings(max_examples=settings.default.max_examples // 4)
SLICES = [(9, 9, True), (10, 19, True), (1, 20, True)]

# -- flash-attn and flex_attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["all heads", "grouped"])
def test_flash_attn_takes_one_call_per_slice(kv_heads: int) -> None:
    case = Case(kv_heads=kv_heads)
    with flash_attn_on_cpu() as package:
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
    assert package.calls == ["rows"] * len(case.lengths)


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


# -- torch's FlashAttention: one call per slice where the kernel is right --------------------------------------------


def _forget() -> None:
    for cached in (fused._takes_slices, fused.wrong_result):
        cached.cache_clear()


def _run_on_flash_ops(ops: TorchOps, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> float:
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
    ops = TorchOps()
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
    ops = TorchOps(variant)
    with caplog.at_level(logging.WARNING, logger="terapipe_ds"):
        error = _run_on_flash_ops(ops, (4, 2), monkeypatch)
    (record,) = caplog.records
    assert said in record.getMessage() and "two calls per slice" in record.getMessage()
    assert error <= 1e-12
    assert (10, 19, True) not in ops.calls and (2 * 10, 9, False) in ops.calls


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256])
def test_the_check_takes_every_way_through_the_kernel(dim: int) -> None:
    shapes = [(torch.empty(b, h, n, dim), torch.empty(b, kv, n + p, dim)) for b, h, kv, n, p in fused._CHECKED]
    assert {TorchOps._way(q, k) for q, k in shapes} >= {"first", "split", "full", "query"}


# -- cuDNN, and windows of FlashAttention ----------------------------------------------------------------------------


@contextmanager
def _on_cpu(ops: TorchOps, kernel: type, **replaced: Callable[..., Any]) -> Iterator[None]:
    """Have `kernel` run on the stand-ins, forced; where it needs another kernel for one token, on plain torch."""
    for cached in (cudnn._times_ms, fused.wrong_result):
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused, cudnn):
            patch.setattr(module, "_aten", ops)
            patch.setattr(module, "cuda_refusal", lambda q, need: None)
            patch.setattr(module, "cuda_capability", lambda: (9, 0))
        for backend in backends._BACKENDS:
            if isinstance(backend, Cudnn):
                patch.setattr(backend, "_of_one_token", Reference())
        for name, stand_in in replaced.items():
            patch.setattr(cudnn, name, stand_in)
        with forced(kernel.name):  # type: ignore[attr-defined]
            yield
    for cached in (cudnn._times_ms, fused.wrong_result):
        cached.cache_clear()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["all heads", "grouped", "one key head"])
@pytest.mark.parametrize("lengths", [(9, 10, 1), (20,), (1, 19), (2, 18)])
def test_cudnn_takes_a_dense_call_and_a_causal_one(heads: tuple[int, int], lengths: tuple[int, ...]) -> None:
    inputs, ops = random_inputs((2, *heads, 20, 8)), TorchOps()
    with _on_cpu(ops, Cudnn):
        run_sliced(inputs, lengths)  # with the comparison on first use
        ops.calls.clear()
        assert largest_error(run_sliced(inputs, lengths), run_plain(inputs)) <= 1e-12
    starts = [0, *itertools.accumulate(lengths)][:-1]
    several = [(n, p) for n, p in zip(lengths, starts, strict=True) if n > 1 and len(lengths) > 1]
    expected = [call for n, p in several for call in ([(n, n, True), (n, p, False)] if p else [(n, n, True)])]
    assert ops.calls == expected


def test_a_wrong_cudnn_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with _on_cpu(TorchOps(), Cudnn):
        assert Cudnn().refusal(torch.zeros(1, 4, 2, 8), Need()) is None
    with pytest.raises(ValueError, match="'cudnn' was forced, but it is .*% off for 300 tokens after 0"):
        with _on_cpu(TorchOps(shift=1), Cudnn):
            run_sliced(random_inputs((1, 4, 2, 20, 8)), (9, 11))


def test_the_faster_kernel_is_chosen_and_determinism_rules_cudnn_out() -> None:
    q = torch.zeros(1, 4, 2, 8)
    for own_ms, chosen in ((1.0, "cudnn"), (3.0, "cuda_flash")):
        with _on_cpu(TorchOps(), Cudnn, _times_ms=lambda *key, own_ms=own_ms: (own_ms, 2.0)):
            backends.set_backend(None)
            assert choose_backend(q, Need()).name == chosen
            if chosen == "cuda_flash":
                assert backends.passed_over(q)["cudnn"] == "it takes 3.000 ms where cuda_flash takes 2.000 ms"
    with _on_cpu(TorchOps(), Cudnn):
        torch.use_deterministic_algorithms(True)
        try:
            assert "use_deterministic_algorithms is on" in (Cudnn().refusal(q, Need()) or "")
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [
    Case((5, 6, 1), window=3), Case((5, 6, 1), window=1), Case((5, 6, 1), window=4, with_sinks=True, scale=0.3),
    Case((5, 7), starts=((0, 3, 9), (0, 6)), window=4, kv_heads=4), Case((5, 7), window=5, value_dim=4),
    Case((5, 4, 3), window=6, recompute=True, value_dim=12),
], ids=["window", "own token", "sinks", "documents", "narrow values", "wide values"])  # fmt: skip
def test_windows_of_torchs_flash_attention(case: Case) -> None:
    ops = TorchOps()
    with _on_cpu(ops, CudaFlash):
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
    assert ops.calls


def test_a_window_that_the_operator_lacks_is_refused() -> None:
    class Older:
        """A torch without the operator's windows."""

    with _on_cpu(TorchOps(), CudaFlash):
        fused.wrong_result.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "_aten", Older())
            refusal = CudaFlash().refusal(torch.zeros(1, 4, 2, 8), Need(window=True))
    assert refusal is not None and "with a window it raised" in refusal


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["cudnn", "window"])
def test_shapes_on_meta(kernel: str, dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    """The real operators of this torch: arguments, shapes and dtypes of first, later and two-token slices."""
    backend = Cudnn() if kernel == "cudnn" else CudaFlash()
    for start, tokens in ((0, 300), (300, 500), (998, 2)):
        q, grad = (torch.empty(2, heads[0], tokens, dim, dtype=dtype, device="meta") for _ in range(2))
        keys, values = (torch.empty(2, heads[1], 1000, dim, dtype=dtype, device="meta") for _ in range(2))
        seen = (x[:, :, : start + tokens] for x in (keys, values))
        queries = Queries(q, *seen, start, dim**-0.5, window=None if kernel == "cudnn" else 100)
        attended, pieces = backend.forward(queries), list[tuple[int, int]]()

        def add(offset: int, dk: Tensor, dv: Tensor, again: bool = False, pieces: Any = pieces) -> None:
            assert dk.shape == dv.shape == (2, heads[1], dk.shape[2], dim) and dk.dtype == dtype
            pieces.append((offset, offset + dk.shape[2]))

        dq = backend.backward(grad, queries, attended, add)
        assert attended.out.shape == q.shape == dq.shape and attended.lse.shape == q.shape[:3]
        assert attended.lse.dtype == torch.float32 and dq.dtype == dtype
        covered = [(0, start), (start, start + tokens)] if kernel == "cudnn" and start else [(0, start + tokens)]
        assert pieces == covered
