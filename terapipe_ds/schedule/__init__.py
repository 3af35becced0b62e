"""In what order? Schedules as plain values: built, lowered, validated, shown, and then run as they are."""

from __future__ import annotations

from .action import Action, Kind, ScheduleError
from .csv_form import fits, from_csv, load, to_csv
from .generate import SCHEDULE_NAMES, SPLIT_SCHEDULES, build, build_forwards
from .lower import StageSchedule
from .placement import CHUNKED_SCHEDULES, placement_for
from .schedule import Schedule
from .show import render
from .validate import validate

__all__ = [
    "CHUNKED_SCHEDULES",
    "SCHEDULE_NAMES",
    "SPLIT_SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "ScheduleError",
    "StageSchedule",
    "build",
    "build_forwards",
    "fits",
    "from_csv",
    "load",
    "placement_for",
    "render",
    "to_csv",
    "validate",
]
