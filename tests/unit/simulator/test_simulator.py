import functools
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import MEMORY, Case, Table, cases, scanned_bytes, starts_and_ends

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.schedule import ScheduleError, build
from terapipe_ds.simulator import Replay, ScheduleShape, SimulationError, UnitCosts, replay_few, simulate
from terapipe_ds.timeline import COMPUTE_KINDS, Timeline
from tests.costs import CostsOf, constant
from tests.unit.schedule.schedule_cases import by_hand, zero_bubble


def run(case: Case, **more: Any) -> Timeline:
    return simulate(case.schedule, case.plans, case.costs, overlap=case.overlap, **more)


def times_of(timeline: Timeline, stage_id: int) -> dict[str, tuple[float, float]]:
    return {e.action: (e.start_s, e.end_s) for e in timeline.events if e.stage_id == stage_id}


# --- against formulas

slice_times = st.lists(st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)), min_size=1, max_size=8)


@given(st.integers(1, 9), st.integers(1, 5), slice_times)
def test_fill_and_drain(num_stages: int, m: int, seconds: list[tuple[float, float]]) -> None:
    """Li et al., arXiv 2102.07988, equation 5, with its forward and its backward part."""
    plan = SlicePlan((1,) * len(seconds))
    costs = SimpleNamespace(forward_s=lambda _, i: seconds[i][0], backward_s=lambda _, i: seconds[i][1])
    forward, backward = zip(*seconds, strict=True)
    expected = m * (sum(forward) + sum(backward)) + (num_stages - 1) * (max(forward) + max(backward))
    schedule = build("terapipe", num_stages, m, len(seconds))
    timeline = simulate(schedule, plan, costs)
    assert timeline.makespan_s == pytest.approx(expected, rel=1e-12)
    assert Replay(schedule).makespan(plan, costs) == timeline.makespan_s


# --- by hand


def test_two_stages_by_hand() -> None:
    """F takes 2 and 1, B 3 and 2 (slices 0 and 1), a message 1."""
    costs = SimpleNamespace(
        forward_s=lambda tokens, prefix: 1.0 if prefix else 2.0,
        backward_s=lambda tokens, prefix: 2.0 if prefix else 3.0,
        send_s=lambda tokens: 1.0,
    )
    schedule, plan = build("terapipe", 2, 1, 2), SlicePlan((4, 4))
    timeline = simulate(schedule, plan, costs)
    first = "F0.0 0 2, SA0.0>1 2 3, F0.1 2 3, SA0.1>1 3 4, B0.1 9 11, B0.0 12 15"
    last = "F0.0 3 5, F0.1 5 6, B0.1 6 8, SG0.1>0 8 9, B0.0 8 11, SG0.0>0 11 12"
    for stage_id, text in enumerate((first, last)):
        rows = (row.split() for row in text.split(", "))
        assert times_of(timeline, stage_id) == {name: (float(start), float(end)) for name, start, end in rows}
    assert (timeline.makespan_s, timeline.bubbles()) == (15, pytest.approx((7 / 15, 7 / 15)))
    path = [f"{step.event.stage_id} {step.event.action} {step.waited_for}" for step in timeline.critical_path or ()]
    assert path[:4] == ["0 F0.0 start", "0 SA0.0>1 dependency", "1 F0.0 link", "1 F0.1 stage"]
    assert path[4:] == ["1 B0.1 stage", "1 B0.0 stage", "1 SG0.0>0 dependency", "0 B0.0 link"]
    assert timeline.live_slices() == (((2, 1), (3, 2), (11, 1), (15, 0)), ((5, 1), (6, 2), (8, 1), (11, 0)))


def test_chunks_of_the_same_two_stages_have_links_of_their_own() -> None:
    orders = [[f"F{m}.0c{chunk}" for chunk in range(2) for m in range(3)]] * 2
    placement = {(stage, chunk): 2 * chunk + stage for stage in range(2) for chunk in range(2)}
    schedule = by_hand(orders, placement, forward_only=True)
    first = times_of(simulate(schedule, SlicePlan((1,)), constant(1.0, 0.0, send=3.0)), 0)
    assert [first[f"SA{m}.0>1"] for m in range(3)] == [(1, 4), (4, 7), (7, 10)]
    assert first["SA0.0c1>1"] == (9, 12), "F0.0 of part 1 ends at 5, its message at 8, F0.0 of part 2 at 9"


# --- against the second computation


@given(cases())
def test_every_time_is_the_longest_path_to_it(case: Case) -> None:
    timeline = run(case)
    expected = starts_and_ends(case)
    found = {}
    for event in timeline.events:
        name = event.action
        if event.kind in ("SA", "SG"):
            name = f"send of {'F' if event.kind == 'SA' else 'B'}{name[2:].partition('>')[0]}"
        found[event.stage_id, name] = event.start_s, event.end_s
    assert found.keys() == expected.keys()
    for key, span in found.items():
        assert span == pytest.approx(expected[key], rel=1e-12)
    assert len(found) == len(timeline.events)
    assert Timeline.from_json(timeline.to_json()) == timeline
    if case.overlap:
        assert Replay(case.schedule).makespan(case.plans, fresh(case)) == timeline.makespan_s


def fresh(case: Case) -> list[Table]:
    made: dict[int, Table] = {}
    return [made.setdefault(id(cost), Table(cost.seed, cost.sends)) for cost in case.costs]


@given(cases())
def test_the_critical_path_has_no_gap_and_lasts_the_makespan(case: Case) -> None:
    timeline = run(case)
    path = timeline.critical_path
    assert path is not None
    assert (path[0].waited_for, path[0].event.start_s, path[-1].event.end_s) == ("start", 0.0, timeline.makespan_s)
    assert sum(step.event.end_s - step.event.start_s for step in path) == pytest.approx(timeline.makespan_s, rel=1e-12)
    for before, step in pairwise(path):
        assert before.event.end_s == step.event.start_s
        same_stage = before.event.stage_id == step.event.stage_id
        same_unit = before.event.micro_batch_id, before.event.slice_id
        if step.waited_for == "stage":
            assert same_stage and step.event.kind in COMPUTE_KINDS
        elif step.waited_for == "dependency":
            assert same_unit == (step.event.micro_batch_id, step.event.slice_id)
            assert before.event.kind in COMPUTE_KINDS
        else:
            assert (step.waited_for, before.event.kind in ("SA", "SG")) == ("link", True)


@given(cases())
def test_live_slices_are_those_of_the_schedule(case: Case) -> None:
    timeline = run(case)
    assert timeline.peak_live_slices == case.schedule.peak_live_slices()
    assert tuple(max(count for _, count in steps) for steps in timeline.live_slices()) == timeline.peak_live_slices
    assert timeline.peak_bytes is None and timeline.bytes_over_time is None


@settings(max_examples=settings.default.max_examples // 20)  # each compares many moments with all events
@given(cases())
def test_bytes_are_those_of_a_scan(case: Case) -> None:
    timeline = run(case, memory=MEMORY)
    assert timeline.bytes_over_time is not None
    for stage_id, steps in enumerate(timeline.bytes_over_time):
        mine = [e for e in timeline.events if e.stage_id == stage_id and e.kind in COMPUTE_KINDS]
        times = [(e.start_s, e.end_s) for e in mine]
        moments = sorted({0.0, *(t for span in times for t in span)})
        moments += [(a + b) / 2 for a, b in pairwise(moments)]
        for moment in moments[:: 1 + len(moments) ** 2 // 10_000]:  # a scan takes time by the square of a long order
            now = [number for time_s, number in steps if time_s <= moment][-1]
            assert now == scanned_bytes(case, stage_id, moment, times)
        assert timeline.peak_bytes is not None
        assert timeline.peak_bytes[stage_id] == max(number for _, number in steps)
        assert steps[-1][1] == scanned_bytes(case, stage_id, math.inf, times), "at the end only what stays"
    assert Replay(case.schedule).peak_bytes(case.plans, MEMORY) == timeline.peak_bytes


# --- how costs are asked


def test_scalar_costs_get_python_ints_once_each() -> None:
    costs = Table(1)
    plans = [SlicePlan((2, 3)), SlicePlan((2, 3)), SlicePlan((3, 2))]
    simulate(build("seq1f1b", 3, 3, 2), plans, costs)
    of_slices = [(kind, *pair) for kind in "fb" for pair in ((2, 0), (3, 2), (3, 0), (2, 3))]
    assert sorted(costs.asked) == sorted([*of_slices, ("s", 2), ("s", 3)])


def test_vectorized_costs_give_the_same() -> None:
    asked = []

    def forward_s(tokens: Any, prefix: Any) -> Any:
        asked.append(tokens)
        return 1.0 + 0.1 * tokens + 0.01 * prefix

    methods = {"forward_s": forward_s, "backward_s": lambda t, p: 2.0 + 0.2 * t * p, "send_s": lambda t: 0.125}
    plan, schedule = SlicePlan((5, 3, 2, 2)), build("seq1f1b", 3, 2, 4)
    arrays, scalar = (simulate(schedule, plan, SimpleNamespace(vectorized=v, **methods)) for v in (True, False))
    assert arrays == scalar
    assert len(asked) == 1 + 4, "once with arrays, then once per pair"
    wrong = SimpleNamespace(vectorized=True, forward_s=lambda t, p: np.ones(3), backward_s=lambda t, p: t)
    with pytest.raises(SimulationError, match=r"shape \(3,\) for 4 pairs"):
        simulate(schedule, plan, wrong)


def test_only_what_is_needed_is_asked() -> None:
    assert simulate(build("terapipe", 1, 2, 3), SlicePlan((5, 2, 1)), UnitCosts(8)).makespan_s == 6.0
    forward = SimpleNamespace(forward_s=lambda tokens, prefix: 1.0, send_s=lambda tokens: pytest.fail("no link"))
    assert simulate(build("gpipe", 1, 2, 1, forward_only=True), SlicePlan((4,)), forward).makespan_s == 2.0


# --- what is refused


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, None, "1", 10**400, 1j])
@pytest.mark.parametrize("method", ["forward_s", "backward_s", "send_s"])
def test_impossible_times_are_named(method: str, value: Any) -> None:
    good, bad = constant(1.0, 1.0), constant(1.0, 1.0)
    del bad.send_gradient_s  # else that of activations is not asked
    setattr(bad, method, lambda tokens, *prefix: value if tokens == 3 else 1.0)
    with pytest.raises(SimulationError, match=rf"part 1, {method}\(tokens=3.*\) = .*: times are finite seconds"):
        simulate(build("seq1f1b", 2, 1, 2), SlicePlan((5, 3)), [good, bad])


PLAN, COSTS = SlicePlan((4, 4)), UnitCosts(8)


@pytest.mark.parametrize(("plan", "costs", "reason"), [
    (
        SlicePlan((4,)),
        COSTS,
        r"micro-batch 0 has 1 slices \(4,\), the schedule 2: build the schedule with num_slices=1",
    ),
    ([PLAN], COSTS, "1 plans for 2 micro-batches: give one plan for all"),
    ([PLAN, SlicePlan((4, 2, 2))], COSTS, "micro-batch 1 has 3 slices"),
    ([PLAN, (4, 4)], COSTS, r"micro-batch 1 is \(4, 4\): give a SlicePlan"),
    (PLAN, [COSTS], "1 costs for 2 parts: give one object for all parts"),
    (PLAN, (COSTS,) * 3, "3 costs for 2 parts"),
    (PLAN, object(), r"the costs of part 0 \(object\) have no forward_s"),
    (PLAN, SimpleNamespace(forward_s=lambda t, p: 1.0), "part 0 .* have no backward_s"),
])  # fmt: skip
def test_plans_and_costs_that_do_not_fit(plan: Any, costs: Any, reason: str) -> None:
    with pytest.raises(SimulationError, match=reason):
        simulate(build("gpipe", 2, 2, 2), plan, costs)


def test_w_needs_its_costs() -> None:
    schedule = zero_bubble()
    plan = SlicePlan((1,) * schedule.num_slices[0])
    with pytest.raises(SimulationError, match=r"the schedule has W but the costs of part 0 have no weight_s"):
        simulate(schedule, plan, constant(1.0, 2.0))
    with pytest.raises(SimulationError, match=r"weight_s of 1 tokens after 0 is 0.5 s above its backward_s"):
        simulate(schedule, plan, CostsOf(lambda *_: 1.0, lambda *_: 2.0, weight_s=lambda *_: 2.5))


@pytest.mark.parametrize("cells", [
    ["F0.0", "F0.1", "B0.1"], ["F0.0", "F0.0", "B0.0"], ["B0.0", "F0.0"], ["F0.1", "F0.0", "B0.1", "B0.0"],
])  # fmt: skip
def test_a_schedule_that_cannot_run_is_refused_as_by_validate(cells: list[str]) -> None:
    schedule = by_hand([cells])
    with pytest.raises(ScheduleError):
        simulate(schedule, SlicePlan((1,) * schedule.num_slices[0]), UnitCosts(2))


# -- few micro-batches tell what many take and hold ------------------------------------------------------------


PLAIN = ("1f1b", "seq1f1b", "gpipe", "terapipe", "zb-h1", "seq1f1b-zb", "dapple")
CHUNKED = ("interleaved", "seq1f1b-interleaved", "zbv")


@functools.lru_cache(maxsize=64)
def replay_of(shape: ScheduleShape, count: int) -> Replay:
    chunks = {"chunks_per_stage": shape.chunks_per_stage} if shape.chunks_per_stage > 1 else {}
    return Replay(build(shape.schedule, shape.num_stages, count, shape.num_slices, **chunks))


def outcome_of(shape: ScheduleShape, count: int, plan: SlicePlan, **more: Any) -> Any:
    return replay_few(shape, count, functools.partial(replay_of, shape), plan, **more)


@given(
    st.sampled_from(PLAIN), st.integers(1, 6), st.integers(1, 20), st.lists(st.integers(1, 4), min_size=1, max_size=7)
)
def test_proven_peaks_are_those_of_the_whole_batch(name: str, stages: int, count: int, lengths: list[int]) -> None:
    shape, plan = ScheduleShape(name, stages, len(lengths)), SlicePlan(lengths)
    outcome = outcome_of(shape, count, plan, memory=MEMORY, most=0)
    assert outcome.is_proven and outcome.ends_s == ()
    assert outcome.peak_bytes == replay_of(shape, count).peak_bytes(plan, MEMORY)


@pytest.mark.parametrize("name", [*PLAIN, *CHUNKED])
def test_long_batches_are_told_by_shorter_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of equal work, a slow link, 100 micro-batches; orders of `zbv` are not quite periodic."""
    chunks = 2 if name in CHUNKED else 1
    slices = 1 if name in ("1f1b", "gpipe", "zb-h1", "interleaved", "dapple") else 4
    shape, plan = ScheduleShape(name, 4, slices, chunks), SlicePlan.equal(64, slices)
    monkeypatch.setattr("terapipe_ds.simulator.few.FEW", 30 * shape.num_computations)
    monkeypatch.setattr("terapipe_ds.simulator.few._FILLED", 30 * shape.num_computations)
    costs = UnitCosts(64, send_share=0.3, share=1 / chunks)
    whole = outcome_of(shape, 100, plan, costs=costs, memory=MEMORY, most=float("inf"))
    told = outcome_of(shape, 100, plan, costs=costs, memory=MEMORY)
    assert whole.is_proven and not told.is_proven
    assert whole.makespan_s == replay_of(shape, 100).makespan(plan, costs)
    assert told.ends_s == pytest.approx(whole.ends_s, rel=0.05 if name == "zbv" else 5e-3)
    assert told.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.1 if name in CHUNKED else 0)


@pytest.mark.parametrize("lengths", [(8,), (4, 3, 1)])
@pytest.mark.parametrize("step_bytes", [2_000, 200_000])
def test_a_step_above_a_few_micro_batches_hides_no_others(lengths: tuple[int, ...], step_bytes: int) -> None:
    """The larger one is above all 60 micro-batches, too."""
    shape, plan = ScheduleShape("gpipe", 3, len(lengths)), SlicePlan(lengths)
    memory = MemoryModel((PartMemory(10, 50, 20, 40, gradient_bytes=5, step_bytes=step_bytes),) * 3)
    outcome = outcome_of(shape, 60, plan, memory=memory, most=0)
    assert outcome.peak_bytes == replay_of(shape, 60).peak_bytes(plan, memory)
    assert max(replay_of(shape, 3).peak_bytes(plan, memory)) <= max(outcome.peak_bytes)


@pytest.mark.parametrize("lengths", [(8,), (4, 3, 1)])
def test_long_batches_with_offloaded_slices_hold_more_with_each_micro_batch(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terapipe_ds.simulator.few._FILLED", 1)
    shape, plan = ScheduleShape("terapipe", 3, len(lengths)), SlicePlan(lengths)
    memory = MemoryModel((PartMemory(10, 50, 20, 40, whole_bytes_per_token=30, staying_bytes_per_token=7),) * 3, True)
    told = outcome_of(shape, 60, plan, memory=memory, most=0)
    assert told.peak_bytes == replay_of(shape, 60).peak_bytes(plan, memory) and not told.is_proven
