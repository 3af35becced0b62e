"""Few micro-batches tell what many take and hold, exactly where `Outcome` says that it is proven."""

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_cases import MEMORY

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay, ScheduleShape, UnitCosts, replay_few

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
    costs = UnitCosts(64, send_share=0.3, share=1 / chunks)
    whole = outcome_of(shape, 100, plan, costs=costs, memory=MEMORY, most=float("inf"))
    told = outcome_of(shape, 100, plan, costs=costs, memory=MEMORY)
    assert whole.is_proven and not told.is_proven
    assert whole.makespan_s == replay_of(shape, 100).makespan(plan, costs)
    assert told.ends_s == pytest.approx(whole.ends_s, rel=0.05 if name == "zbv" else 5e-3)
    assert told.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.1 if name in CHUNKED else 0)
