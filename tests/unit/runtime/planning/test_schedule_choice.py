"""The best schedule where layers stand, and what to write for a better one, on an engine made of names."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryLimitError, PartMemory, PlanResult
from terapipe_ds.planner.ranking.measured_parts import NOT_TIMED, MeasuredParts, Unit
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import can_have, problem_of_copies
from terapipe_ds.runtime.links.groups import PipelineGroups
from terapipe_ds.runtime.planning.schedule_choice import Cuts, best_without_moving, first_layout, micro_batches_of
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.schedule import SEARCH, build, placement_for
from terapipe_ds.simulator import UnitCosts, simulate

LENGTH, STAGES, LAYERS = 8, 2, 8


class _Module:
    """Cuts its layers evenly, as DeepSpeed's "uniform"; bounds have a dry run on a real one in test_planning."""

    def __init__(self, num_parts: int, layers: int) -> None:
        self._layer_specs = [None] * layers
        self.num_stages, self._local_start, self._local_stop = num_parts, 0, layers // num_parts
        self._partition_layers("uniform")
        self.num_stages = STAGES

    def _partition_layers(self, method: str) -> None:
        layers = len(self._layer_specs)
        self.parts = [layers * part // self.num_stages for part in range(self.num_stages + 1)]


class Whole:
    """Costs without W: nothing but chimera is faster than 1f1b."""

    forward_s, backward_s = UnitCosts(LENGTH).forward_s, UnitCosts(LENGTH).backward_s


def stage_on(
    schedule: str, chunks: int, slices: Any = "auto", layers: int = LAYERS, optimizer: Any = None
) -> StageToPlan:
    layout = Layout(STAGES, placement_for(schedule, STAGES, chunks))
    config = TeraPipeConfig(enabled=True, schedule="auto", slices=slices, granularity_tokens=4)
    module = _Module(layout.num_parts, layers)
    engine = SimpleNamespace(module=module, micro_batches=2, optimizer=optimizer)
    return StageToPlan(engine, config, layout, PipelineGroups((0, 1)), token_multiple=1)


def measured(num_parts: int, has_layers: bool = True, memory: PartMemory | None = None) -> MeasuredParts:
    """Layers, or parts of layers that were not timed, of which all together take what two stages take."""
    if not has_layers:
        units = [Unit(UnitCosts(LENGTH, share=STAGES / num_parts), memory=memory)] * num_parts
        return MeasuredParts(units, tuple(range(num_parts + 1)), False)
    each = LAYERS // num_parts
    one = Unit(UnitCosts(LENGTH, share=STAGES / LAYERS), 10, 10, memory=memory)
    return MeasuredParts([one] * LAYERS, tuple(range(0, LAYERS + 1, each)))


def halves(costs: Any, bytes_per_s: float | None) -> MeasuredParts:
    """Two layers of 50 parameters, one on each stage."""
    return MeasuredParts([Unit(costs, 50, 50)] * 2, (0, 1, 2), True, bytes_per_s)


def best_of(stage: StageToPlan, parts: MeasuredParts, limit_bytes: float | None = None) -> tuple[PlanResult, list[str]]:
    cuts = Cuts(stage.engine.module, stage.layout, parts)
    return best_without_moving(stage, cuts, LENGTH, limit_bytes)


@pytest.mark.parametrize("slices", ["auto", (4, 4)])
def test_another_layout_is_recommended(slices: Any) -> None:
    for has_layers in (True, False):
        stage = stage_on("seq1f1b", 1, slices=slices)
        result, lines = best_of(stage, measured(2, has_layers))
        assert result.chunks_per_stage == 1
        assert any(line.startswith("zbv ") for line in lines) == has_layers  # it has four parts
        assert (NOT_TIMED in lines) == (not has_layers)
        advice = lines[-1]
        name = advice.split("'")[1]
        assert f'set "schedule": "{name}", "chunks_per_stage": 2' in advice
        assert name in ("zbv", "chimera-seq", "chimera")
        gain = float(advice.split("take ")[1].split("%")[0])
        plan = SlicePlan(result.plan.lengths)
        here = simulate(build(result.schedule, 2, 2, plan.num_slices), plan, UnitCosts(LENGTH)).makespan_s
        assert result.predicted_s == pytest.approx(here) and 1 < gain < 50


@pytest.mark.parametrize("fails", [True, False])
def test_a_cut_that_a_program_cannot_make_is_left_out(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("terapipe_ds"), "propagate", True)
    stage = stage_on("seq1f1b", 1)
    before = list(stage.engine.module.parts)

    def cut(method: str) -> None:
        """The program knows two stages and no more: it fails, or cuts in two whatever it is asked for."""
        if fails and stage.engine.module.num_stages != STAGES:
            raise KeyError(stage.engine.module.num_stages)
        stage.engine.module.parts = before

    stage.engine.module._partition_layers = cut
    with caplog.at_level(logging.INFO, "terapipe_ds"):
        result, lines = best_of(stage, measured(2))
    assert result.chunks_per_stage == 1 and not any(line.startswith("zbv ") for line in lines)
    said = "the layers cannot be cut in 4 parts (KeyError: 4); schedules that want so many are left out"
    assert caplog.messages == [said] * fails
    assert stage.engine.module.parts == before and stage.engine.module.num_stages == STAGES


@pytest.mark.parametrize(("bytes_per_s", "advised"), [(1e9, True), (100.0, False), (None, True)])
def test_a_sum_of_gradients_that_takes_too_long(bytes_per_s: float | None, advised: bool) -> None:
    """Two layers of 50 parameters, one on each stage: 100 parameters, 400 bytes, are summed on each."""
    stage = stage_on("seq1f1b", 1, slices=(8,), layers=2)
    parts = halves(Whole(), bytes_per_s)
    result, lines = best_of(stage, parts)
    assert result.chunks_per_stage == 1 and result.extra_s == 0
    assert ("would take" in lines[-1]) == advised
    if advised:
        assert ("the sum of gradients not counted" in lines[-1]) == (bytes_per_s is None)
    row = next(line for line in lines if line.startswith("chimera "))
    assert {1e9: "+0.00 ms", 100.0: "+4.000 s", None: "unknown"}[bytes_per_s] in row
    standing, _ = best_of(stage_on("chimera", 2, slices=(8,), layers=2), parts)
    assert standing.extra_s == (None if bytes_per_s is None else 400 / bytes_per_s)


def test_a_limit_that_only_another_layout_meets() -> None:
    stage = stage_on("chimera", 2)
    parts = measured(2, memory=PartMemory(25, 0.0))  # four layers on each
    with pytest.raises(MemoryLimitError, match="stage") as caught:
        best_of(stage, parts, 150)
    name = str(caught.value).split("Schedule '")[1].split("'")[0]
    chunks = 2 if name == "zbv" or "interleaved" in name else 1
    advice = [
        f'set "schedule": "{name}", "chunks_per_stage": {each}' for each in ((1, 2) if name == SEARCH else (chunks,))
    ]
    assert str(caught.value).endswith(tuple(advice))
    assert caught.value.need_bytes == 200 and "chimera" not in name  # both parts on each stage
    with pytest.raises(MemoryLimitError) as nothing:
        best_of(stage, parts, 50)
    assert "fits, but" not in str(nothing.value)


@pytest.mark.parametrize("keeps_apart", [False, True])
def test_nothing_is_recommended_that_the_engine_refuses(keeps_apart: bool) -> None:
    """Without W, and with as many layers as stages, chimera alone is faster than what stands."""
    optimizer = SimpleNamespace(use_grad_accum_attribute=keeps_apart)
    stage = stage_on("seq1f1b", 1, slices=(8,), layers=2, optimizer=optimizer)
    parts = halves(Whole(), 1e9)
    _, lines = best_of(stage, parts)
    assert any("would take" in line for line in lines) == (not keeps_apart)
    chimera = Layout(STAGES, placement_for("chimera", STAGES, 2))
    assert (problem_of_copies(chimera, optimizer) is not None) == keeps_apart
    assert can_have("chimera", raw={"data_types": {"grad_accum_dtype": "fp32"}}) is False and can_have("zbv")


# -- before the layers move; the rest has real ranks in tests/distributed/test_first_layout.py -------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"gradient_accumulation_steps": 6}, 6),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}, 8),  # over three replicas
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, 8),
        ({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}, 1),
        ({"train_batch_size": 48}, 1),
        ({"gradient_accumulation_steps": True}, 1),
        ({}, 1),
    ],
)
def test_micro_batches(raw: dict[str, Any], expected: int) -> None:
    assert micro_batches_of(raw, SimpleNamespace(_grid=SimpleNamespace(data_parallel_size=3))) == expected


@pytest.mark.parametrize(
    ("section", "schedule", "chunks"),
    [
        ({"schedule": "zbv"}, "zbv", 2),
        ({"schedule": "auto"}, "1f1b", 1),
        ({"schedule": "auto", "chunks_per_stage": 3}, "interleaved", 3),
        ({"schedule": "auto", "chunks_per_stage": 2, "planner": {"profile": "none.json"}}, "interleaved", 2),
        ({"schedule": "seq1f1b", "planner": {"profile": "none.json"}}, "seq1f1b", 1),
    ],
)
def test_no_profile_is_read_where_it_decides_nothing(section: dict[str, Any], schedule: str, chunks: int) -> None:
    config = TeraPipeConfig.from_deepspeed({"terapipe": {"enabled": True, **section}})
    given = iter([1])
    layout, parameters = first_layout(config, {}, SimpleNamespace(num_stages=4), given)
    assert layout.placement == placement_for(schedule, 4, chunks) and parameters is given
