"""Plans for schedules that split backwards: against brute force, and only where costs say what W takes."""

from __future__ import annotations

import itertools

import pytest
from planner_cases import every_plan, parts_of, split_parts

from terapipe_ds.planner import MemoryModel, PartMemory, PlannerError, best_schedule, plan_slices
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SPLIT_SCHEDULES, build
from terapipe_ds.simulator import Replay

ON_A_LINE = tuple(name for name in SPLIT_SCHEDULES if name not in CHUNKED_SCHEDULES)


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
