from __future__ import annotations

import pytest
from hypothesis import given, settings
from schedule_cases import ragged_shapes

from terapipe_ds.schedule import (
    CHUNKED_SCHEDULES,
    SCHEDULE_NAMES,
    Schedule,
    ScheduleError,
    build,
    placement_for,
    validate,
)
from terapipe_ds.schedule.placement import bidirectional, loop, v_shape
from terapipe_ds.schedule.show import count_slots


def columns(placement: dict[tuple[int, int], int]) -> list[list[int]]:
    """Per chunk, the parts of stage 0, 1, ..."""
    stages, chunks = (1 + max(ids) for ids in zip(*placement, strict=True))
    return [[placement[stage, chunk] for stage in range(stages)] for chunk in range(chunks)]


def test_the_placements_by_hand() -> None:
    assert columns(loop(3, 2)) == [[0, 1, 2], [3, 4, 5]]
    assert columns(loop(2, 3)) == [[0, 1], [2, 3], [4, 5]]
    assert columns(v_shape(3)) == [[0, 1, 2], [5, 4, 3]]
    assert columns(bidirectional(4)) == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_which_schedule_stands_how() -> None:
    assert placement_for("1f1b", 3) == loop(3, 1)
    assert placement_for("interleaved", 3) == loop(3, 1)
    assert placement_for("seq1f1b-interleaved", 3, 4) == loop(3, 4)
    for given_chunks in (1, 2):
        assert placement_for("zbv", 3, given_chunks) == v_shape(3)
        assert placement_for("chimera", 4, given_chunks) == bidirectional(4)
        assert placement_for("chimera-seq", 4, given_chunks) == bidirectional(4)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_schedule_stands_as_its_placement_says(name: str) -> None:
    for chunks in (1, 2) if name in CHUNKED_SCHEDULES else (1,):
        for forward_only in (False, True):
            schedule = build(name, 4, 3, 2, chunks_per_stage=chunks, forward_only=forward_only)
            assert schedule.placement == placement_for(name, 4, chunks)
            assert schedule.chunks_per_stage == len(schedule.placement) // 4


@pytest.mark.parametrize(
    ("name", "chunks", "advice"),
    [("gpipe", 2, "one part per stage, leave it at 1"), ("zbv", 3, "give 2"), ("chimera", 4, "give 2")],
)
def test_chunks_that_a_schedule_cannot_take(name: str, chunks: int, advice: str) -> None:
    with pytest.raises(ScheduleError, match=f"chunks_per_stage is {chunks}: .*{advice}"):
        placement_for(name, 4, chunks)


@pytest.mark.parametrize("name", ["chimera", "chimera-seq"])
def test_an_odd_number_of_stages_has_no_two_directions(name: str) -> None:
    with pytest.raises(ScheduleError, match="num_stages is 3: .* even number"):
        placement_for(name, 3)


def forwards_of(name: str, num_stages: int, num_slices: list[int], chunks: int) -> Schedule:
    return build(name, num_stages, len(num_slices), num_slices, forward_only=True, chunks_per_stage=chunks)


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(ragged_shapes)
def test_an_evaluation_runs_on_every_placement(shape: tuple[int, list[int]]) -> None:
    """No stage ever waits for long: all forwards take what a pipeline needs to fill, and a little more at the end."""
    num_stages, num_slices = shape
    units = sum(num_slices)
    for name in CHUNKED_SCHEDULES:
        if name not in SCHEDULE_NAMES or (num_stages % 2 and name.startswith("chimera")):
            continue
        for chunks in (1, 2, 3) if "interleaved" in name else (2,):
            schedule = forwards_of(name, num_stages, num_slices, chunks)
            validate(schedule)
            assert sum(map(len, schedule.orders)) == schedule.num_parts * units
            slots = count_slots(schedule).num_slots
            if name.startswith("chimera"):
                assert slots <= 2 * max(num_slices) * (len(num_slices) // 2 + 1) + num_stages
            elif name == "zbv":
                assert slots == 2 * units + 2 * num_stages - 2
            else:
                assert slots == chunks * max(units, num_stages if chunks > 1 else 0) + num_stages - 1 - max(
                    num_stages - units, 0
                ) * (chunks > 1)
