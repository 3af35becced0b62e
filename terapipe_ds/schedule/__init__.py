"""Order computations by schedules, plain values that are built, lowered, validated, shown, and then run unchanged."""

from __future__ import annotations

from terapipe_ds.schedule.action import Action as Action
from terapipe_ds.schedule.action import Kind as Kind
from terapipe_ds.schedule.action import ScheduleError as ScheduleError
from terapipe_ds.schedule.csv_form import fits as fits
from terapipe_ds.schedule.csv_form import from_csv as from_csv
from terapipe_ds.schedule.csv_form import load as load
from terapipe_ds.schedule.csv_form import to_csv as to_csv
from terapipe_ds.schedule.generate import SCHEDULE_NAMES as SCHEDULE_NAMES
from terapipe_ds.schedule.generate import SPLIT_SCHEDULES as SPLIT_SCHEDULES
from terapipe_ds.schedule.generate import build as build
from terapipe_ds.schedule.generate import build_forwards as build_forwards
from terapipe_ds.schedule.placement import CHUNKED_SCHEDULES as CHUNKED_SCHEDULES
from terapipe_ds.schedule.placement import SEARCH as SEARCH
from terapipe_ds.schedule.placement import count_parts as count_parts
from terapipe_ds.schedule.placement import placement_for as placement_for
from terapipe_ds.schedule.schedule import Schedule as Schedule
from terapipe_ds.schedule.schedule import StageSchedule as StageSchedule
from terapipe_ds.schedule.show import render as render
from terapipe_ds.schedule.validate import validate as validate
