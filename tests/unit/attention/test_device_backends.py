"""The kernels that need a device, on CPU: through stand-ins, flex_attention uncompiled, shapes on `meta`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import Tensor, forced, largest_error, random_inputs, run_plain, run_sliced
from device_ops import FlashAttnPackage, TorchOps, flash_attn_installed, flash_attn_on_cpu, flex_on_cpu
from hypothesis import given, settings
from reach_cases import Case, cases, error, run_formula, run_in_slices, small_blocks, visible
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from terapipe_ds import compat
from terapipe_ds.attention import ActiveSlice, GuardCapturedNames, backends, push_slice
from terapipe_ds.attention.backends import choose_backend, first_use, flash_attn, flex, fused
from terapipe_ds.attention.backends.base import Need, Queries
from terapipe_ds.attention.backends.first_use import CHECKED, wrong_kernel
from terapipe_ds.attention.backends.flash_attn import CudaFlash, FlashAttn, FlashAttn3, FlashAttn4
from terapipe_ds.attention.backends.fused import Cudnn
from terapipe_ds.attention.backends.reference import Reference
from terapipe_ds.runtime.verify.constant_draws import ConstantDraws

fewer = settings(max_examples=settings.default.max_examples // 4)
SLICES = [(9, 9, True), (10, 19, True), (1, 20, True)]

# -- flash-attn and flex_attention ----------------------------------------------------------------------------------


VERSIONS = pytest.mark.parametrize("version", [FlashAttn, FlashAttn3, FlashAttn4])


@VERSIONS
@pytest.mark.parametrize(("case", "calls"), [
    (Case(kv_heads=4), ["rows"] * 3), (Case(kv_heads=2), ["rows"] * 3),
    (Case((10, 10), starts=((0, 4, 12, 14), (0, 10)), window=5), ["packed"] * 4),
], ids=["all heads", "grouped", "two rows with other documents"])  # fmt: skip
def test_flash_attn_takes_one_call_per_slice(case: Case, calls: list[str], version: type[FlashAttn]) -> None:
    """And for each row where these have other documents."""
    with flash_attn_on_cpu(version) as package:
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
    assert package.calls == calls


@VERSIONS
@fewer
@given(case=cases())
def test_flash_attn_takes_every_option(version: type[FlashAttn], case: Case) -> None:
    with flash_attn_on_cpu(version) as package:
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10
    assert set(package.calls) <= {"rows", "packed"}


@VERSIONS
@pytest.mark.parametrize("starts", [None, ((0, 4, 12), (0, 10))], ids=["rows", "packed"])
def test_flash_attn_learns_of_deterministic_mode(version: type[FlashAttn], starts: Any) -> None:
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            with flash_attn_on_cpu(version) as package:
                run_in_slices(Case(starts=starts))
        finally:
            torch.use_deterministic_algorithms(False)
        assert package.deterministic == {mode}


@pytest.mark.parametrize(("capability", "found"), [((8, 0), "2"), ((9, 0), "234"), ((10, 0), "24"), ((0, 0), "")])
def test_where_versions_of_flash_attn_run(
    capability: tuple[int, int], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attn, "cuda_capability", lambda: capability)
    versions = {"2": FlashAttn, "3": FlashAttn3, "4": FlashAttn4}
    for number in versions:
        package = f"flash_attn{'' if number == '2' else f'_{number}'}"
        monkeypatch.setattr(flash_attn, f"has_{package}", functools.partial(compat.has, package))
    assert [n for n, version in versions.items() if version().is_available()] == []
    with flash_attn_installed(FlashAttnPackage()):
        assert [n for n, version in versions.items() if version().is_available()] == list(found)


@VERSIONS
@pytest.mark.parametrize("documents", [None, ((0, 4, 12), (0, 10))], ids=["rows", "packed"])
def test_flash_attn_gets_gradients_whose_features_lie_side_by_side(version: type[FlashAttn], documents: Any) -> None:
    """A convolution over tokens, behind attention, hands back gradients in which tokens do."""
    case, attend = Case(starts=documents), Case.attend

    def attend_before_it(case: Case, *inputs: Any) -> Tensor:
        out = attend(case, *inputs)
        out.register_hook(lambda grad: grad.mT.contiguous().mT)
        return out

    with pytest.MonkeyPatch.context() as patch, flash_attn_on_cpu(version):
        patch.setattr(Case, "attend", attend_before_it)
        assert error(run_in_slices(case), run_formula(case)) <= 1e-10


class _Wrong(FlashAttnPackage):
    def attend(self, *inputs: Any) -> Any:
        out, lse = super().attend(*inputs)
        return out, lse + (0.5 if self.calls[-1] == "packed" else 0.0)


@VERSIONS
def test_the_check_at_first_use_asks_for_the_need(version: type[FlashAttn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "CHECKED", ((1, 4, 2, 30, 100), (1, 4, 2, 1, 30)))
    q, every = torch.zeros(1, 4, 2, 8), Need(window=True, softcap=True, documents=True)
    with flash_attn_on_cpu(version) as package:
        for need in (Need(), Need(window=True), Need(softcap=True), Need(documents=True), every):
            package.calls.clear()
            assert wrong_kernel(version(), q, need) is None
            assert set(package.calls) == {"packed" if need.documents else "rows"}
    with flash_attn_on_cpu(version, _Wrong()):
        assert wrong_kernel(version(), q, Need(window=True)) is None
        problem = wrong_kernel(version(), q, every)
    assert problem is not None and problem.startswith("with window, softcap, documents it is")


# -- attention dropout -----------------------------------------------------------------------------------------------

WITH_DROPOUT = {
    "plain": Case(value_dim=24, kv_heads=4), "grouped": Case(value_dim=24, recompute=True),
    "window": Case(value_dim=24, window=6, recompute=True, reentrant=True),
    "sinks": Case(value_dim=20, with_sinks=True, scale=0.3),
    "documents": Case(value_dim=24, starts=((0, 4, 12), (0, 10)), window=7),
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["cuda_flash", "flash_attn", "reference"])
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_attention_dropout(name: str, kernel: str) -> None:
    """The output shows which probabilities a forward has kept; the gradients come from exactly these."""
    case = dataclasses.replace(WITH_DROPOUT[name], dropout_p=0.4)
    stand_ins: dict[str, Any] = {"cuda_flash": _on_cpu(TorchOps(), CudaFlash), "flash_attn": flash_attn_on_cpu()}
    with stand_ins.get(kernel) or small_blocks(kernel, 4):  # several tiles, each with a mask of its own
        found = run_in_slices(case)
    kept = found[0][..., : case.length] > 0
    factors = (kept.double() if kernel == "reference" else kept) / 0.6  # the stand-ins have them in fp32
    assert error(found, run_formula(case, factors)) <= 1e-10
    sees = visible(case).expand_as(kept)
    assert not (kept & ~sees).any() and 0.5 < float(kept.sum() / sees.sum()) < 0.7
    assert not torch.equal(kept[0, 0], kept[1, 1])


@pytest.mark.parametrize("need", [Need(dropout=True), Need(dropout=True, window=True)], ids=["plain", "window"])
def test_the_check_of_dropout(need: Need) -> None:
    """It leaves the user's random numbers alone, and the check of the first batch does not see it."""
    q, before = torch.zeros(1, 4, 2, 64), torch.get_rng_state()
    with _on_cpu(TorchOps(), CudaFlash), ConstantDraws() as draws:
        assert CudaFlash().refusal(q, need) is None
    assert torch.equal(torch.get_rng_state(), before) and not draws.unknown
    for variant in ("draws again", "keeps too much"):
        with _on_cpu(TorchOps(variant), CudaFlash):
            assert "dropout it is" in (CudaFlash().refusal(q, need) or "")
    with _on_cpu(TorchOps("upper left"), CudaFlash):
        assert "dropout it is" in (CudaFlash().refusal(q, need) or "")
    with flash_attn_on_cpu():
        for documents in (False, True):
            assert wrong_kernel(FlashAttn(), q, need._replace(documents=documents)) is None
    assert "cannot replay dropout" in (FlashAttn3.refusal(FlashAttn4(), q, need) or "")


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


@pytest.mark.parametrize("mode", [GuardCapturedNames, ConstantDraws, functools.partial(FlopCounterMode, display=False)])
def test_flex_is_compiled_under_the_modes_of_a_first_batch(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    flex._compiled.cache_clear()
    q, k, v = (torch.randn(1, 2, tokens, 16) for tokens in (10, 30, 30))
    queries = Queries(q, k, v, 20, 0.25, window=9)
    expected = flex.Flex().forward(queries)
    with mode():
        attended = flex.Flex().forward(queries)
    flex._compiled.cache_clear()
    assert len(graphs) == 1 and all(map(torch.equal, attended[:2], expected[:2]))
    assert largest_error(attended[:2], Reference().forward(queries)[:2]) < 1e-5


def test_flex_leaves_compiled_layers_to_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward needs a graph of its forward, and within the operator of a compiled layer torch records none."""
    monkeypatch.setattr(flex.Flex, "is_available", lambda self: True)
    chosen = list[str]()

    def choose(x: Tensor) -> Tensor:
        with FakeTensorMode():
            q = torch.empty(1, 2, 8, 64, device="cuda")
        chosen.append(choose_backend(q, Need(softcap=True)).name)
        return x.clone()

    operator = torch.library.custom_op("tests::choose", choose, mutates_args=(), schema="(Tensor x) -> Tensor")
    for call in (choose, operator, choose):
        call(torch.zeros(1))
    backends.set_backend(None)  # forget both
    assert chosen == ["flex", "reference", "flex"]


def test_a_mask_of_flex_that_was_made_in_inference_serves_training() -> None:
    flex.block_mask.cache_clear()
    with torch.inference_mode():
        mask = flex.block_mask(1, 5, 3, 2, (), torch.device("cpu"))
    of_function = [cell.cell_contents for cell in mask.mask_mod.__closure__ or ()]
    tensors = [each for each in (*vars(mask).values(), *of_function) if torch.is_tensor(each)]
    assert len(tensors) > len(of_function) == 2 and not any(each.is_inference() for each in tensors)


def test_the_mask_of_flex_is_what_the_definitions_say() -> None:
    starts, first = torch.tensor(3), torch.tensor([[0, 2, 5], [3, 3, 4]])
    sees = flex.mask_of(starts, first)
    places = torch.tensor([
        [[bool(sees(*map(torch.tensor, (row, 0, query, key)))) for key in range(6)] for query in range(3)]
        for row in range(2)
    ])  # fmt: skip
    query, key = torch.arange(3)[:, None] + 3, torch.arange(6)
    assert torch.equal(places, (key <= query) & (key >= first.unsqueeze(-1)))


# -- torch's FlashAttention: one call per slice, where the kernel is right -------------------------------------------


def _forget() -> None:
    for cached in (first_use.wrong_result, first_use.times_ms):
        cached.cache_clear()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["all heads", "grouped"])
def test_cuda_flash_takes_one_call_per_slice(heads: tuple[int, int]) -> None:
    ops, inputs = TorchOps(), random_inputs((2, *heads, 20, 8))
    with _on_cpu(ops, CudaFlash, checks=True):
        assert largest_error(run_sliced(inputs, (9, 10, 1)), run_plain(inputs)) <= 1e-12
    calls = [call for call in ops.calls if call[1] <= 20]  # the others are those of the check
    assert calls == [*SLICES, *reversed(SLICES)]
    assert len(ops.calls) == len(calls) + 2 * len(CHECKED)  # which was made once


@pytest.mark.parametrize(("variant", "said"), [
    ("upper left", "% off"), ("no groups", "Expected the heads to match"), ("backward", "10.0% off for 40 tokens"),
    ("split", "10.0% off for 40 tokens after 1000"),
    ("full", "10.0% off for 64 tokens after 300"), ("query", "10.0% off for 1 tokens after 1000"),
    ("first", "10.0% off for 300 tokens after 0"),
])  # fmt: skip
def test_a_wrong_cuda_flash_is_passed_over(variant: str, said: str) -> None:
    q = torch.zeros(1, 4, 2, 8)
    with _on_cpu(TorchOps(variant), CudaFlash, checks=True):
        assert said in (CudaFlash().refusal(q, Need()) or "")
        with pytest.raises(ValueError, match="'cuda_flash' was forced, but it"):
            run_sliced(random_inputs((2, 4, 2, 20, 8)), (9, 10, 1))


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256])
def test_the_check_takes_every_way_through_the_kernel(dim: int) -> None:
    shapes = [(torch.empty(b, h, n, dim), torch.empty(b, kv, n + p, dim)) for b, h, kv, n, p in CHECKED]
    assert {TorchOps._way(q, k) for q, k in shapes} >= {"first", "split", "full", "query"}


# -- cuDNN, and windows of FlashAttention ----------------------------------------------------------------------------


@contextmanager
def _on_cpu(ops: TorchOps, kernel: type, checks: bool = False) -> Iterator[None]:
    """Have `kernel` run on the stand-ins, forced; where it needs another kernel for one token, on plain torch."""
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused, flash_attn):
            patch.setattr(module, "_aten", ops)
            patch.setattr(module, "cuda_refusal", lambda q, need: None)
            patch.setattr(module, "cuda_capability", lambda: (9, 0))
        if not checks:  # one shape for each way, not many large ones
            patch.setattr(first_use, "CHECKED", ((1, 4, 2, 9, 0), (1, 4, 2, 5, 13)))
            patch.setattr(first_use, "_WITH_DROPOUT", (2, 4, 2, 40, 30))
        for backend in backends._BACKENDS:
            if isinstance(backend, Cudnn):
                patch.setattr(backend, "_flash", Reference())
        with forced(kernel.name):  # type: ignore[attr-defined]
            yield
    _forget()


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


def test_cudnn_leaves_shapes_after_many_others_to_another_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It builds a plan for each shape."""
    monkeypatch.setattr(fused, "_MOST_SHAPES", 2)
    kernel, ops = Cudnn(), TorchOps()
    monkeypatch.setattr(kernel, "_flash", Reference())
    monkeypatch.setattr(fused, "_aten", ops)
    caplog.set_level(logging.INFO, logger="terapipe_ds")
    for tokens, start, is_known in ((5, 0, True), (5, 3, True), (4, 3, False), (5, 3, True), (5, 4, False)):
        ops.calls.clear()
        inputs = first_use.random_queries((2, 4, 2, tokens, start), 8, torch.device("cpu"), torch.float64)
        assert first_use._error(kernel.forward, kernel.backward, *inputs) < 1e-5
        assert bool(ops.calls) is is_known
    assert caplog.text.count("cudnn has plans for 2 shapes; others take cuda_flash") == 1


def test_cudnn_computes_shapes_with_plans_where_it_may_build_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan loads kernels. The plan of a backward is another one: evaluations have none."""
    kernel, ops = Cudnn(), TorchOps()
    monkeypatch.setattr(kernel, "_flash", Reference())
    monkeypatch.setattr(fused, "_aten", ops)

    def calls(tokens: int, mode: str) -> int:
        ops.calls.clear()
        _, queries = first_use.random_queries((2, 4, 2, tokens, 3), 8, torch.device("cpu"), torch.float64)
        with push_slice(ActiveSlice(3, 3 + tokens, 20, mode=mode)):
            kernel.forward(queries)
        return len(ops.calls)

    assert calls(5, "train") == calls(6, "eval") == 2
    with first_use.plans_kept():
        assert [calls(*each) for each in ((5, "train"), (5, "recompute"), (5, "eval"), (6, "train"), (4, "train"))] == [
            2, 2, 0, 0, 0,
        ]  # fmt: skip
        assert calls(6, "eval") == 2
        with first_use._as_outside(torch.device("cpu")):  # a kernel that is checked must run
            assert calls(4, "train") == 2


@pytest.mark.parametrize("kernels", [[], ["FLASH_ATTENTION"], ["MATH"]])
def test_torch_keeps_a_kernel_where_it_may_build_no_plans(kernels: list[str]) -> None:
    """A program may admit cuDNN alone: without it torch would find no kernel at all."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *(getattr(SDPBackend, name) for name in kernels)]):
        with first_use.plans_kept():
            assert torch.backends.cuda.cudnn_sdp_enabled() is not bool(kernels)
        assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_wrong_cudnn_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with _on_cpu(TorchOps(), Cudnn):
        assert Cudnn().refusal(torch.zeros(1, 4, 2, 8), Need()) is None
    with pytest.raises(ValueError, match="'cudnn' was forced, but it is .*% off for 300 tokens after 0"):
        with _on_cpu(TorchOps(shift=1), Cudnn, checks=True):
            run_sliced(random_inputs((1, 4, 2, 20, 8)), (9, 11))


def test_the_choice_of_the_fastest_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    q, times = torch.zeros(1, 4, 2, 8), dict[str, float]()
    for name in ("has_flash_attn", "has_flash_attn_4"):  # one version alone, whether an earlier test has asked or not
        monkeypatch.setattr(flash_attn, name, lambda: False)
    with flash_attn_on_cpu(FlashAttn3), _on_cpu(TorchOps(), Cudnn):
        monkeypatch.setattr(backends, "fastest", lambda kernels, q, need: times)
        for chosen in ("cudnn", "cuda_flash", "flash_attn_3"):
            times = {name: 1.0 if name == chosen else 2.0 for name in ("flash_attn_3", "cudnn", "cuda_flash")}
            monkeypatch.setattr(backends, "_logged", set())
            backends.set_backend(None)
            with caplog.at_level(logging.INFO, logger="terapipe_ds"):
                assert choose_backend(q, Need()).name == chosen
            assert f"automatic backend {chosen} for cpu" in caplog.messages[-1]
            for other in set(times) - {chosen}:
                assert f"{other}: it takes 2.000 ms where {chosen} takes 1.000 ms" in caplog.messages[-1]
        assert choose_backend(q, Need(documents=True)).name == "flash_attn_3"  # in one call, whatever the times
        times |= {"flash_attn_3": 1.04, "cudnn": 1.0}  # nearly equal: the same choice in each run
        backends.set_backend(None)
        assert choose_backend(q, Need()).name == "flash_attn_3"
        times["cudnn"] = 0.5
        backends.set_backend(None)
        assert choose_backend(q, Need(documents=True)).name == "flash_attn_3"
        torch.use_deterministic_algorithms(True)  # times differ from run to run: the order decides
        try:
            times["cuda_flash"] = 0.1
            assert choose_backend(q, Need()).name == "flash_attn_3"
            assert "use_deterministic_algorithms is on" in (Cudnn().refusal(q, Need()) or "")
        finally:
            torch.use_deterministic_algorithms(False)


def test_kernels_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, order = [0.0], list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Kernel:
        def __init__(self, name: str, ms: float) -> None:
            self.name, self.ms = name, ms

        def forward(self, queries: Queries) -> Any:
            if self.name == "broken":
                raise AssertionError("a compiler of kernels asserts")
            order.append(self.name)

        def backward(self, *inputs: Any) -> None:
            now[0] += self.ms * (10 if len(order) <= 2 else 1)  # the first runs are slow

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(first_use, "_TIMED_TOKENS", 4)
    kernels: Any = (Kernel("a", 3.0), Kernel("b", 2.0), Kernel("broken", 0.0))
    with caplog.at_level(logging.INFO, logger="terapipe_ds"):
        times = first_use.fastest(kernels, torch.zeros(1, 32, 2, 8), Need())
    assert times == {"a": 3.0, "b": 2.0, "broken": math.inf} and order == ["a", "b"] * 9
    assert "3.000 ms by a, 2.000 ms by b, inf ms by broken" in caplog.text and "16 heads of 8" in caplog.text


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flash_attn, "_aten", Older())
            refusal = CudaFlash().refusal(torch.zeros(1, 4, 2, 8), Need(window=True))
    assert refusal is not None and "with window it raised" in refusal
