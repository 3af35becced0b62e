"""In what order? Schedules as plain values: built, lowered, validated, shown, and then run as they are."""

from __future__ import annotations

from .action import Action as Action
from .action import Kind as Kind
from .action import ScheduleError as ScheduleError
from .csv_form import fits as fits
from .csv_form import from_csv as from_csv
from .csv_form import load as load
from .csv_form import to_csv as to_csv
from .generate import SCHEDULE_NAMES as SCHEDULE_NAMES
from .generate import SPLIT_SCHEDULES as SPLIT_SCHEDULES
from .generate import build as build
from .generate import build_forwards as build_forwards
from .lower import StageSchedule as StageSchedule
from .placement import CHUNKED_SCHEDULES as CHUNKED_SCHEDULES
from .placement import SEARCH as SEARCH
from .placement import placement_for as placement_for
from .schedule import Schedule as Schedule
from .show import render as render
from .validate import validate as validate
