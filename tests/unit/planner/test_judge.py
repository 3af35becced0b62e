"""Scores and bounds of single plans, against replays of the whole schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import split_parts
from test_search import SCHEDULES, SPLIT

from terapipe_ds.planner.search.bounds import searches
from terapipe_ds.planner.search.judge import Judge
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
