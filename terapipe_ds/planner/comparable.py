"""List the schedules that can be compared with one another: they run the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.schedule import SCHEDULE_NAMES, SPLIT_SCHEDULES, ScheduleError, count_parts, placement_for


def ranked_schedules(
    num_stages: int,
    chunks_per_stage: int,
    num_parts: int,
    knows_weights: bool = True,
    placement: Mapping[tuple[int, int], int] | None = None,
) -> tuple[str, ...]:
    """Return the schedules that "auto" compares: all with this number of chunks per stage and of parts.

    `dapple` is left out (its default is `1f1b`). Schedules that split backwards need `knows_weights`. With a
    `placement` only the schedules that run on it are left: layers do not move while a model trains.
    """
    ranked = []
    for name in SCHEDULE_NAMES:
        is_repeated = name == "dapple" or (chunks_per_stage == 1 and "interleaved" in name)  # 1f1b, seq1f1b
        if is_repeated or (name in SPLIT_SCHEDULES and not knows_weights):
            continue
        # a schedule that these stages cannot have is no candidate
        try:
            if count_parts(name, num_stages, chunks_per_stage) != num_parts:
                continue
            own = placement_for(name, num_stages, chunks_per_stage)
        except ScheduleError:
            continue
        if len(own) == chunks_per_stage * num_stages and placement in (None, own):
            ranked.append(name)
    return tuple(ranked)


def num_parts_of(schedule: str, num_stages: int, chunks_per_stage: int, costs: Any) -> int:
    """Return the number of parts that `costs` must have: the schedule's, or for "auto" the length of a `costs` list.

    Raises PlannerError where no schedule, or not this one, takes that number of chunks per stage.
    """
    chunks = check_count("chunks_per_stage", chunks_per_stage)
    if schedule != "auto":
        try:
            return count_parts(schedule, num_stages, chunks)
        except ScheduleError as error:
            raise PlannerError(error.reason) from None
    num_parts = len(costs) if isinstance(costs, list | tuple) and chunks > 1 else num_stages * chunks
    if not ranked_schedules(num_stages, chunks, num_parts):
        raise PlannerError(
            f"{num_parts} costs: on {num_stages} stages no schedule has {chunks} chunks per stage and so many parts; "
            f"give {num_stages * chunks}, one per part, or one object for all"
        )
    return num_parts
