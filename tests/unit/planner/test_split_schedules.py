"""Plans for schedules that split backwards: against brute force, and only where costs say what W takes."""

from __future__ import annotations

import itertools

import pytest
from test_search import Costs, brute_force_s, every_plan, parts_of

from terapipe_ds.planner import MemoryModel, PartMemory, PlannerError, best_schedule, plan_slices
from terapipe_ds.planner.search import search
from terapipe_ds.planner.search.cached_costs import cache_parts
from terapipe_ds.planner.search.judge import Judge
from terapipe_ds.planner.search.pipeline import Pipeline
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SPLIT_SCHEDULES, build
from terapipe_ds.simulator import Replay

ON_A_LINE = tuple(name for name in SPLIT_SCHEDULES if name not in CHUNKED_SCHEDULES)


class SplitCosts(Costs):
    """W takes a third of the tokens' share of the backward."""

    def weight_s(self, tokens: int, prefix: int) -> float:
        self.asked["weight", tokens, prefix] += 1
        return 0.3 * self.backward * self.scale * tokens


def split_parts(seed: int, num_stages: int) -> list[Costs]:
    """As `parts_of`, with W; parts that are one object stay one."""
    made: dict[int, SplitCosts] = {}
    plain = parts_of(seed, num_stages)
    for part in plain:
        if id(part) not in made:
            made[id(part)] = SplitCosts(part.seed, part.scale, 0.3 if seed % 2 else None)
    return [made[id(part)] for part in plain]


@pytest.mark.parametrize("schedule", ON_A_LINE)
@pytest.mark.parametrize(("num_stages", "num_micro_batches", "seed"), [
    (2, 1, 0), (2, 4, 1), (3, 2, 3), (3, 3, 4), (4, 1, 5), (4, 4, 7),
])  # fmt: skip
def test_against_brute_force(
    schedule: str, num_stages: int, num_micro_batches: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = split_parts(seed, num_stages)
    best_s = brute_force_s(parts, schedule, 8, num_micro_batches)
    exact = plan_slices(parts, 8, num_stages, num_micro_batches, 1, schedule)
    assert exact.optimal
    assert exact.predicted_s == pytest.approx(best_s, rel=1e-9)
    monkeypatch.setattr(search, "_ALL_PLANS", 0)
    climbed = plan_slices(split_parts(seed, num_stages), 8, num_stages, num_micro_batches, 1, schedule)
    assert best_s * (1 - 1e-9) <= climbed.predicted_s <= 1.02 * best_s
    assert 0 < climbed.lower_bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ON_A_LINE)
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_faster_than_its_bound(schedule: str, seed: int) -> None:
    parts = split_parts(seed, 3)
    for m in (1, 3):
        judge = Judge(Pipeline(cache_parts(parts, 3, 7, 1), 7, 1, m, 3), schedule)
        for plan in every_plan(7, 1):
            assert judge.bound_s(plan.lengths) <= judge.seconds(plan.lengths) * (1 + 1e-12)


def test_each_pair_is_asked_once() -> None:
    parts = split_parts(3, 3)
    plan_slices(parts, 8, 3, 3, 1, "auto")
    assert {count for part in parts for count in part.asked.values()} == {1}


def test_auto_takes_a_split_schedule_where_it_is_faster() -> None:
    parts = split_parts(3, 4)
    best = plan_slices(parts, 8, 4, 6, 1, "auto")
    each = {name: plan_slices(parts, 8, 4, 6, 1, name).predicted_s for name in ("seq1f1b", "1f1b", *ON_A_LINE)}
    assert best.schedule in ON_A_LINE
    assert best.predicted_s <= 1.001 * min(each.values())
    assert best_schedule(parts, best.plan, 4, 6).schedule in ON_A_LINE


def test_without_the_time_of_w_there_is_no_split_schedule() -> None:
    parts = parts_of(3, 4)
    with pytest.raises(PlannerError, match=r"'zb-h1' splits backwards, but the costs have no weight_s"):
        plan_slices(parts, 8, 4, 2, 1, "zb-h1")
    assert plan_slices(parts, 8, 4, 2, 1, "auto").schedule not in ON_A_LINE
    mixed = [*split_parts(4, 2)[:1], *parts_of(4, 2)[1:]]
    assert plan_slices(mixed, 8, 2, 2, 1, "auto").schedule not in ON_A_LINE
    assert best_schedule(mixed, every_plan(8, 4)[1], 2, 2).schedule not in ON_A_LINE


# -- memory --------------------------------------------------------------------------------------------------


def by_hand(schedule: str, stage_id: int, slice_bytes: int, weight_bytes: int, lengths: tuple[int, ...]) -> int:
    """The most bytes of slices: live until their B, then what W needs until W; a slice counts while it runs."""
    now = peak = 0
    for action in build(schedule, 3, 4, len(lengths)).orders[stage_id]:
        tokens, kind = lengths[action.slice_id], action.kind.value
        if kind == "F":
            now += slice_bytes * tokens
        after = now
        if kind == "B":
            after += (weight_bytes - slice_bytes) * tokens
        if kind == "W":
            after -= weight_bytes * tokens
        peak, now = max(peak, now, after), after
    assert now == 0
    return peak


@pytest.mark.parametrize(("schedule", "weight_bytes"), list(itertools.product(ON_A_LINE, (1, 5, 9))))
def test_what_waits_for_w_counts(schedule: str, weight_bytes: int) -> None:
    part = PartMemory(0, slice_bytes_per_token=5, weight_bytes_per_token=weight_bytes)
    memory = MemoryModel((part,) * 3)
    lengths = (4, 3, 1)
    plan = next(plan for plan in every_plan(8, 1) if plan.lengths == lengths)
    peaks = Replay(build(schedule, 3, 4, 3)).peak_bytes(plan, memory)
    assert peaks == tuple(by_hand(schedule, k, 5, weight_bytes, lengths) for k in range(3))


def test_memory_that_does_not_say_keeps_the_slice_until_w() -> None:
    plan = every_plan(8, 4)[1]
    silent, says = (MemoryModel((PartMemory(0, 5, weight_bytes_per_token=rate),) * 3) for rate in (None, 5))
    for schedule in ON_A_LINE:
        replay = Replay(build(schedule, 3, 4, 2))
        assert replay.peak_bytes(plan, silent) == replay.peak_bytes(plan, says)


@pytest.mark.parametrize("schedule", ON_A_LINE)
def test_few_micro_batches_stand_for_all_in_the_peak(schedule: str) -> None:
    memory = MemoryModel((PartMemory(0, 5, 1, 1, weight_bytes_per_token=7),) * 4)
    for count in (1, 2, 5):
        plan = next(plan for plan in every_plan(10, 1) if plan.num_slices == count)
        judge = Judge(Pipeline(cache_parts(split_parts(3, 4), 4, 10, 1), 10, 1, 20, 4, memory=memory), schedule)
        assert judge.peak_bytes(plan.lengths) == Replay(build(schedule, 4, 20, count)).peak_bytes(plan, memory)
