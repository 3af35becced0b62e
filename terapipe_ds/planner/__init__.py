"""Where to cut a sequence: the slice program, memory and the search over schedules."""

from __future__ import annotations

from .errors import MemoryLimitError, PlannerError
from .given import best_schedule
from .memory import MemoryModel, PartMemory
from .rank_all import Ranking, Refusal, rank_given, rank_schedules
from .result import PlanResult, choose
from .search import granularity_for, plan_slices
from .slice_dp import SliceSolution, solve

__all__ = [
    "MemoryLimitError",
    "MemoryModel",
    "PartMemory",
    "PlanResult",
    "PlannerError",
    "Ranking",
    "Refusal",
    "SliceSolution",
    "best_schedule",
    "choose",
    "granularity_for",
    "plan_slices",
    "rank_given",
    "rank_schedules",
    "solve",
]
