"""Zero bubble on a V: chunk 0 of stage k is part k, chunk 1 is part 2K - 1 - k."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import by_hand, ragged_shapes

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Kind, Schedule, ScheduleError, build, validate
from terapipe_ds.schedule.list_schedule import list_schedule
from terapipe_ds.schedule.placement import v_shape
from terapipe_ds.schedule.show import count_slots
from terapipe_ds.simulator import UnitCosts, simulate


def torch_schedule(num_stages: int, num_micro_batches: int) -> Schedule:
    """torch's ScheduleZBVZeroBubble, the order of the authors of ZB-V."""
    from torch.distributed.pipelining import schedules

    me: Any = types.SimpleNamespace(
        pp_group_size=num_stages, num_stages=2 * num_stages, _n_microbatches=num_micro_batches
    )
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    rows = []
    for rank in range(num_stages):
        actions = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(me, rank)
        rows.append(
            [
                f"{letters[a.computation_type.name]}{a.microbatch_index}.0c{int(a.stage_index >= num_stages)}"
                for a in actions
                if a is not None
            ]
        )
    return by_hand(rows, v_shape(num_stages))


@pytest.mark.parametrize(("num_stages", "m"), [(1, 3), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (8, 24)])
def test_next_to_the_authors_order(num_stages: int, m: int) -> None:
    """At F = B = W: no longer than theirs while the pipeline fills and drains (m = K), within 5 % where they have no
    bubble but the fill, and with the same memory."""
    ours, theirs = build("zbv", num_stages, m, 1), torch_schedule(num_stages, m)
    assert max(ours.peak_live_slices()) == max(theirs.peak_live_slices()) == 2 * num_stages
    slots, their_slots = count_slots(ours).num_slots, count_slots(theirs).num_slots
    assert 6 * m + num_stages - 1 <= slots
    assert slots <= (their_slots if m <= num_stages else 1.06 * their_slots)
    if m == num_stages:
        assert slots == 6 * m + num_stages - 1, "nothing idles but the fill"


@given(ragged_shapes)
def test_every_shape_is_valid(shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    schedule = build("zbv", num_stages, len(num_slices), num_slices)
    validate(schedule)
    assert sum(map(len, schedule.orders)) == 3 * 2 * num_stages * sum(num_slices)
    s = max(num_slices)
    for stage_id, (order, peak) in enumerate(zip(schedule.orders, schedule.peak_live_slices(), strict=True)):
        live, peaks = [0, 0], [0, 0]
        for action in order:
            live[action.chunk_id] += {Kind.FORWARD: 1, Kind.BACKWARD: 0, Kind.WEIGHT: -1}[action.kind]
            peaks[action.chunk_id] = max(peaks[action.chunk_id], live[action.chunk_id])
        assert peaks[0] <= 2 * num_stages - stage_id + s - 2
        assert peaks[1] <= stage_id + s
        assert peak <= 2 * (num_stages + s - 1)


@given(st.integers(2, 6), st.integers(1, 8), st.integers(1, 6))
def test_a_shorter_bubble_than_on_a_line(num_stages: int, m: int, s: int) -> None:
    """At F = B = W than 1F1B by slices always; no longer than its zero-bubble form (which at K + 1 and
    K + 2 whole micro-batches is a slot ahead)."""
    plan = SlicePlan.equal(60, s)
    seconds = simulate(build("zbv", num_stages, m, s), plan, UnitCosts(60, share=0.5)).makespan_s
    assert seconds < simulate(build("seq1f1b", num_stages, m, s), plan, UnitCosts(60)).makespan_s - 1e-9
    if s > 1 or not num_stages < m < num_stages + 3:
        assert seconds <= simulate(build("seq1f1b-zb", num_stages, m, s), plan, UnitCosts(60)).makespan_s + 1e-9


def test_a_limit_that_nothing_fits_under_says_so() -> None:
    with pytest.raises(ScheduleError, match="no stage can go on: a limit is below the slices"):
        list_schedule(v_shape(1), [2], {(0, 0): 1, (0, 1): 2})


def test_list_scheduling_by_hand() -> None:
    """One stage, two parts, room for one unit each: the second forward waits for the first one's W."""
    order = list_schedule(v_shape(1), [1, 1], {(0, 0): 1, (0, 1): 1}, splits_backward=True)
    text = [f"{kind.value}{m}c{chunk}" for kind, m, _, chunk in order[0]]
    assert text == ["F0c0", "F0c1", "B0c1", "B0c0", "W0c0", "F1c0", "W0c1", "F1c1", "B1c1", "B1c0", "W1c0", "W1c1"]
