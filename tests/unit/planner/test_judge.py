"""Scores and bounds of single plans, against replays of the whole schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import LinkCosts, split_parts
from test_search import SCHEDULES, SPLIT

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryModel, PartMemory
from terapipe_ds.planner.search.bounds import searches
from terapipe_ds.planner.search.judge import Judge, memory_limit_error
from terapipe_ds.planner.search.pipeline import Pipeline, cache_parts
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay

NAMES = st.sampled_from([*SCHEDULES, *SPLIT])
LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=7)


@given(NAMES, st.integers(0, 99), st.integers(1, 5), st.integers(1, 5), LENGTHS)
def test_seconds_and_bounds(schedule: str, seed: int, stages: int, micro_batches: int, lengths: list[int]) -> None:
    """A plan's seconds are those of the replay, and neither its own bound nor that of all plans is above them."""
    parts = cache_parts(split_parts(seed, stages), stages, sum(lengths), 1)
    judge = Judge(Pipeline(parts, sum(lengths), 1, micro_batches, stages), schedule)
    plan = judge.pipeline.plan(tuple(lengths))
    seconds = Replay(build(schedule, stages, micro_batches, len(lengths))).makespan(plan, split_parts(seed, stages))
    assert judge.seconds(tuple(lengths)) == pytest.approx(seconds, rel=1e-9)
    assert judge.bound_s(tuple(lengths)) <= seconds * (1 + 1e-9)
    if schedule in SCHEDULES:  # that of all plans holds where backwards are whole
        assert searches(judge.pipeline.parts, micro_batches, None)[1] <= seconds * (1 + 1e-9)
    assert plan.lengths == tuple(lengths)


def test_a_bound_counts_messages_back_by_their_own_time() -> None:
    """Those onwards are slow and overlap with work of later stages; those back take no time."""
    costs = LinkCosts(lambda tokens, _: 1.0 * tokens, lambda tokens, _: 2.0 * tokens)
    costs.send, costs.back = lambda tokens: 9.0 * tokens, lambda _: 0.0
    judge = Judge(Pipeline(cache_parts(costs, 3, 8, 1), 8, 1, 2, 3), "seq1f1b")
    seconds = Replay(build("seq1f1b", 3, 2, 2)).makespan(SlicePlan((4, 4)), costs)
    assert judge.seconds((4, 4)) == pytest.approx(seconds) and judge.bound_s((4, 4)) <= seconds * (1 + 1e-9)


@given(NAMES, st.integers(2, 4), st.integers(1, 4), st.lists(LENGTHS, min_size=2, max_size=5), st.data())
def test_plans_within_memory(
    schedule: str, stages: int, micro_batches: int, plans: list[list[int]], data: st.DataObject
) -> None:
    """A plan fits if all stages do, whichever plans and stages were too large before; the error has the least need."""
    shares = st.builds(PartMemory, st.integers(1, 60), st.integers(0, 20))
    memory = MemoryModel(tuple(data.draw(st.lists(shares, min_size=stages, max_size=stages))))
    tokens = max(map(sum, plans))
    tried = [(*lengths[:-1], lengths[-1] + tokens - sum(lengths)) for lengths in plans]
    replays = {len(lengths): Replay(build(schedule, stages, micro_batches, len(lengths))) for lengths in tried}
    needs = {lengths: replays[len(lengths)].peak_bytes(SlicePlan(lengths), memory) for lengths in tried}
    limit = data.draw(st.integers(1, max(map(max, needs.values()))))
    parts = cache_parts(split_parts(0, stages), stages, tokens, 1)
    pipeline = Pipeline(parts, tokens, 1, micro_batches, stages, memory=memory, memory_limit_bytes=limit)
    judge = Judge(pipeline, schedule)
    for lengths in tried:
        assert judge.fits(lengths) == (max(needs[lengths]) <= limit)
    error = memory_limit_error(judge, tried)
    assert error.need_bytes == min(map(max, needs.values()))
    assert error.stage_id in {need.index(max(need)) for need in needs.values() if max(need) == error.need_bytes}


def limited(micro_batches: int) -> Judge:
    """Return a judge of four stages: more than 7 tokens of live slices fit on none."""
    parts, memory = cache_parts(split_parts(0, 4), 4, 12, 1), MemoryModel((PartMemory(1, 10),) * 4)
    return Judge(Pipeline(parts, 12, 1, micro_batches, 4, memory=memory, memory_limit_bytes=80), "seq1f1b")


def test_a_plan_that_does_not_fit_costs_the_walk_over_one_stage() -> None:
    judge, lengths = limited(8), (1,) * 12
    assert not judge.fits((12,))
    judge.needs_at_least(lengths)  # builds the schedule
    judge._least_needs.clear()
    spent = judge.spent
    judge.needs_at_least(lengths)
    of_one = judge.spent - spent
    judge.peak_bytes(lengths)
    assert 0 < of_one < (judge.spent - spent - of_one) / 2


def test_the_least_need_is_not_that_of_the_plan_with_the_least_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, peaks = limited(1), {(12,): (90, 300), (6, 6): (100, 100), (4, 8): (95, 110), (3, 9): (120, 130)}
    monkeypatch.setattr(judge, "needs_at_least", lambda lengths: peaks[lengths][0])
    monkeypatch.setattr(judge, "peak_bytes", lambda lengths: peaks[lengths])
    assert memory_limit_error(judge, peaks).need_bytes == 100
