"""The best schedule where layers stand, and what to write for a better one, on an engine made of names."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryLimitError, PartMemory, PlanResult
from terapipe_ds.planner.layers.layer import Layer
from terapipe_ds.planner.layers.measured_parts import NOT_TIMED, MeasuredParts
from terapipe_ds.planner.result import Prediction
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.groups import PipelineGroups
from terapipe_ds.runtime.planning import measure_and_share
from terapipe_ds.runtime.planning.choice import Choice
from terapipe_ds.runtime.planning.choose_plan import best_without_moving
from terapipe_ds.runtime.planning.measure_and_share import warn_of_unread
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.schedule import SEARCH, build, placement_for
from terapipe_ds.simulator import UnitCosts, simulate

LENGTH, STAGES, LAYERS = 8, 2, 8
UNEVEN = [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]  # shares of a stage's time that six layers take


class Whole:
    """Costs without W: nothing but chimera is faster than 1f1b."""

    forward_s, backward_s = UnitCosts(LENGTH).forward_s, UnitCosts(LENGTH).backward_s


def stage_on(
    schedule: str, chunks: int, slices: Any = "auto", layers: int = LAYERS, config: dict[str, Any] | None = None,
    bounds: tuple[int, ...] | None = None,
) -> StageToPlan:  # fmt: skip
    layout = Layout(STAGES, placement_for(schedule, STAGES, chunks), bounds)
    keys = {"schedule": "auto", "slices": slices, "granularity_tokens": 4, **(config or {})}
    even = [layers * part // layout.num_parts for part in range(layout.num_parts + 1)]  # as DeepSpeed's "uniform"
    engine = SimpleNamespace(module=SimpleNamespace(parts=even), micro_batches=2, num_stages=STAGES, optimizer=None)
    return StageToPlan(engine, TeraPipeConfig(enabled=True, **keys), layout, PipelineGroups((0, 1)), token_multiple=1)


def measured(num_parts: int, has_layers: bool = True, memory: PartMemory | None = None) -> MeasuredParts:
    """Layers, or parts of layers that were not timed, of which all together take what two stages take."""
    if not has_layers:
        units = [Layer(UnitCosts(LENGTH, share=STAGES / num_parts), memory=memory)] * num_parts
        return MeasuredParts(units, tuple(range(num_parts + 1)), False)
    each = LAYERS // num_parts
    one = Layer(UnitCosts(LENGTH, share=STAGES / LAYERS), 10, 10, memory=memory)
    return MeasuredParts([one] * LAYERS, tuple(range(0, LAYERS + 1, each)))


def best_of(
    stage: StageToPlan, parts: MeasuredParts, limit_bytes: float | None = None, process_bytes: int = 0
) -> tuple[PlanResult, list[str]]:
    options: Any = {"has_other_cuts": stage.layout.bounds is None, "offloads": False, "process_bytes": process_bytes}
    cuts = parts.running(stage.engine.module.parts, LENGTH, **options)
    return best_without_moving(stage, cuts, LENGTH, limit_bytes)


@pytest.mark.parametrize(("config", "names"), [({}, {"seq1f1b", "zbv"}), ({"schedule": "terapipe"}, {"terapipe"})])
def test_the_watch_dog_hears_of_a_long_search(config: dict[str, Any], names: set[str]) -> None:
    stage, searched = stage_on("seq1f1b", 1, config=config), set[str]()
    cuts = measured(2).running(stage.engine.module.parts, LENGTH, has_other_cuts=True, offloads=False, process_bytes=0)
    best_without_moving(stage, cuts, LENGTH, None, lambda name, *_: searched.add(name))
    assert names <= searched
    # the engine's planner notes each of them
    notes: list[str] = []
    with mock.patch.object(measure_and_share, "Profiles"):
        planner = measure_and_share.AutoPlanner(stage, mock.Mock(), notes.append)
    with mock.patch.object(MeasuredParts, "of_profile", return_value=measured(2)):
        planner._plan(LENGTH, mock.Mock())
    assert {f"the search for the best slices of {name}" for name in names} <= {*notes}


def test_the_bytes_of_the_process_count_under_the_limit() -> None:
    stage, parts = stage_on("seq1f1b", 1, layers=6, bounds=(0, 3, 6)), uneven(UNEVEN, [10] * 6)
    assert best_of(stage, parts, 45.0, 15)[0].peak_bytes == (45, 45)
    with pytest.raises(MemoryLimitError, match="CUDA and NCCL"):
        best_of(stage, parts, 45.0, 16)


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
        assert ('"partition": [0, 2, 4, 6, 8]' in advice) == (name == "zbv")  # chimera has two parts, as there are
        gain = float(advice.split("take ")[1].split("%")[0])
        plan = SlicePlan(result.plan.lengths)
        here = simulate(build(result.schedule, 2, 2, plan.num_slices), plan, UnitCosts(LENGTH)).makespan_s
        assert result.predicted_s == pytest.approx(here) and 1 < gain < 50


def uneven(times: list[float], memory_of: list[int] | None = None) -> MeasuredParts:
    """Layers that take these shares of the time of a stage."""
    bytes_of = memory_of or [25] * len(times)
    layers = [
        Layer(UnitCosts(LENGTH, share=share), 10, 10, memory=PartMemory(num_bytes, 0.0) if memory_of else None)
        for share, num_bytes in zip(times, bytes_of, strict=True)
    ]
    return MeasuredParts(layers, (0, len(layers) // 2, len(layers)))


@pytest.mark.parametrize("schedule", ["auto", "seq1f1b"])
def test_a_better_partition_is_recommended_with_its_gain(schedule: str) -> None:
    stage, parts = stage_on("seq1f1b", 1, layers=6, config={"schedule": schedule}), uneven(UNEVEN)
    result, lines = best_of(stage, parts)
    (advice,) = [line for line in lines if line.startswith('"partition": ')]
    assert advice.startswith('"partition": [0, 2, 6] would take') and "less time than [0, 3, 6]" in advice
    better = simulate(result.build(), result.plans, parts.cut(2, [0, 2, 6])).makespan_s
    here = simulate(result.build(), result.plans, parts.cut(2, [0, 3, 6])).makespan_s
    assert result.predicted_s == pytest.approx(here)
    assert f"{1 - better / here:.1%}" in advice and better < 0.99 * here


@pytest.mark.parametrize(("parts", "config", "limit_bytes"), [
    (uneven([1.0] * 6), {}, None),  # even already
    (uneven([1.0, 0.99, 1.0, 1.0, 0.99, 1.01]), {}, None),  # a gain that no run could show
    (uneven(UNEVEN, [10, 10, 10, 10, 10, 20]), {}, 45.0),  # 50 on the second stage
    (uneven(UNEVEN), {"recompute": (0,)}, None),  # layers cost more on the first stage
], ids=["even", "noise", "memory", "recompute"])  # fmt: skip
def test_no_partition_is_recommended_without_gain(parts: MeasuredParts, config: Any, limit_bytes: float | None) -> None:
    _, lines = best_of(stage_on("seq1f1b", 1, layers=6, config=config), parts, limit_bytes)
    assert not any("partition" in line for line in lines if "chunks_per_stage" not in line), lines


def test_a_partition_of_the_config_keeps_its_number_of_parts() -> None:
    """Schedules of four parts are not compared, and a better cut in two is named."""
    stage = stage_on("seq1f1b", 1, layers=6, bounds=(0, 3, 6))
    _, lines = best_of(stage, uneven(UNEVEN))
    assert not any(line.startswith("zbv ") for line in lines) and any("[0, 2, 6]" in line for line in lines)


@pytest.mark.parametrize(("bytes_per_s", "advised"), [(1e9, True), (100.0, False), (None, True)])
def test_a_sum_of_gradients_that_takes_too_long(bytes_per_s: float | None, advised: bool) -> None:
    """Two layers of 50 parameters, one on each stage: 100 parameters, 400 bytes, are summed on each."""
    stage = stage_on("seq1f1b", 1, slices=(8,), layers=2)
    parts = MeasuredParts([Layer(Whole(), 50, 50)] * 2, (0, 1, 2), True, bytes_per_s)
    result, lines = best_of(stage, parts)
    assert result.chunks_per_stage == 1 and result.extra_s == 0
    assert ("would take" in lines[-1]) == advised
    if advised:
        assert ("without the sum of gradients" in lines[-1]) == (bytes_per_s is None)
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
    cut = {1: "", 2: ', "partition": [0, 2, 4, 6, 8]'}
    advice = [
        f'set "schedule": "{name}", "chunks_per_stage": {each}{cut[each]}'
        for each in ((1, 2) if name == SEARCH else (chunks,))
    ]
    assert str(caught.value).endswith(tuple(advice))
    assert caught.value.need_bytes == 200 and "chimera" not in name  # both parts on each stage
    with pytest.raises(MemoryLimitError) as nothing:
        best_of(stage, parts, 50)
    assert "fits, but" not in str(nothing.value)


@pytest.mark.parametrize(("slices", "warns"), [(4, True), ("auto", False)])
@pytest.mark.parametrize(("key", "value"), [("memory_limit_gb", 1), ("profile", "profile.json")])
def test_a_key_of_the_planner_without_effect_is_a_warning(
    slices: Any, warns: bool, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"enabled": True, "slices": slices, "planner": {key: value}}
    with caplog.at_level("WARNING", logger="terapipe_ds"):
        warn_of_unread(TeraPipeConfig.from_deepspeed({"terapipe": section}))
    assert (f"planner.{key} has no effect" in caplog.text) is warns


@pytest.mark.parametrize(("length", "lengths"), [(144, (64, 64, 16)), (159, (64, 64, 31)), (120, (64, 56))])
def test_a_plan_for_about_as_many_tokens_starts_slices_where_the_planned_one_does(
    length: int, lengths: tuple[int, ...]
) -> None:
    choice = Choice((SlicePlan((64, 64, 16)),), "seq1f1b", predicted=Prediction(1.0, 2.0))
    assert choice.of_length(length).plans == (SlicePlan(lengths),)
    assert (choice.of_length(length).predicted is None) is (length != 144), "of its own tokens, or none"


def test_equal_plans_of_all_micro_batches_are_one() -> None:
    plan, other = SlicePlan((6, 2)), SlicePlan((4, 4))
    assert Choice((plan, plan), "1f1b") == Choice((plan,), "1f1b") and Choice((plan, plan), "1f1b").plans == (plan,)
    assert [Choice((plan, other), "1f1b").plan_of(m) for m in range(3)] == [plan, other, plan]
