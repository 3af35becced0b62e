"""Whether a schedule can run, and when its computations would."""

from __future__ import annotations

from .action import ScheduleError
from .diagnose import diagnose
from .schedule import Schedule


def validate(schedule: Schedule) -> None:
    """Raise `ScheduleError`, with the grid and the offending cell marked, unless the schedule can run.

    Every F and B exactly once per (part, micro-batch, slice), at one place; F before its B before its W; F in
    slice order, B in reverse slice order; each send has its receive, in the same order per link; no deadlock.
    """
    from .proofs import can_run  # numpy: commands that only name schedules do without

    if can_run(schedule):
        return
    diagnose(schedule)
    raise ScheduleError(f"schedule {schedule.name!r} cannot be proven to run, and no rule that it breaks is found")


def replay(schedule: Schedule) -> list[list[int]]:
    """Return the slot in which each entry of each order starts, where each takes one; ScheduleError on a deadlock."""
    starts = schedule.nodes.slots()
    if sum(map(len, starts)) < schedule.nodes.num_nodes:
        diagnose(schedule)
    return starts
