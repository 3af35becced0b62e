"""Which schedules can be compared with one another: those that run the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.tabulate import check_count
from terapipe_ds.schedule import SCHEDULE_NAMES, SPLIT_SCHEDULES, ScheduleError, build, placement_for


def ranked_schedules(
    num_stages: int, chunks_per_stage: int, num_parts: int, knows_weights: bool = True,
    placement: Mapping[tuple[int, int], int] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """The schedules that "auto" compares: those whose stages hold ``chunks_per_stage`` chunks of ``num_parts`` parts.

    With one chunk all of one part per stage; with v chunks of v K parts the looped ones and, for 2, ``zbv``; with two
    chunks of K parts, each of which stands at two places, ``chimera`` and ``chimera-seq``. Without ``dapple``, which is
    another name of ``1f1b``, and, unless costs say what W takes, without those that split backwards. With a
    ``placement`` (see ``Schedule.placement``) those alone that run on it: layers do not move while a model trains.
    """
    found = []
    for name in SCHEDULE_NAMES:
        if name == "dapple" or (name in SPLIT_SCHEDULES and not knows_weights):
            continue
        shape = _shape(name, num_stages, chunks_per_stage)
        one_of_many = chunks_per_stage == 1 and "interleaved" in name  # 1f1b and seq1f1b once more
        if shape != (chunks_per_stage, num_parts) or one_of_many:
            continue
        if placement is None or placement_for(name, num_stages, chunks_per_stage) == placement:
            found.append(name)
    return tuple(found)


def num_parts_of(schedule: str, num_stages: int, chunks_per_stage: int, costs: Any) -> int:
    """How many parts ``costs`` must have: those of the schedule; for "auto" those of a list, which must be K, where
    each part has two places, or v K.

    Raises:
        PlannerError: no schedule, or not this one, takes so many chunks per stage.
    """
    chunks = check_count("chunks_per_stage", chunks_per_stage)
    if schedule != "auto":
        try:
            return build(schedule, num_stages, 1, 1, chunks_per_stage=chunks).num_parts
        except ScheduleError as error:
            raise PlannerError(error.reason) from None
    num_parts = len(costs) if isinstance(costs, list | tuple) else num_stages * chunks
    if chunks > 1 and not ranked_schedules(num_stages, chunks, num_parts):
        raise PlannerError(
            f"{num_parts} costs: on {num_stages} stages no schedule has {chunks} chunks per stage and so many parts; "
            f"give {num_stages * chunks}, one per part, or one object for all"
        )
    return num_parts if chunks > 1 else num_stages


def _shape(name: str, num_stages: int, chunks_per_stage: int) -> tuple[int, int] | None:
    """(chunks per stage, parts) of a schedule; None where it cannot have these stages or chunks."""
    try:
        schedule = build(name, num_stages, 1, 1, chunks_per_stage=chunks_per_stage)
    except ScheduleError:
        return None
    return schedule.chunks_per_stage, schedule.num_parts
