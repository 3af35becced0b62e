"""Plan the cuts of a sequence: the slice program, memory and the search over schedules."""

from __future__ import annotations

from .comparable import num_parts_of, ranked_schedules
from .errors import MemoryLimitError, PlannerError
from .memory import MemoryModel, PartMemory
from .ranking.rank import best_schedule, rank_schedules
from .ranking.report import describe, describe_ranking
from .result import PlanResult, Ranking, Refusal, choose
from .search.found_orders import best_order
from .search.search import granularity_for, plan_slices

__all__ = [
    "MemoryLimitError",
    "MemoryModel",
    "PartMemory",
    "PlanResult",
    "PlannerError",
    "Ranking",
    "Refusal",
    "best_order",
    "best_schedule",
    "choose",
    "describe",
    "describe_ranking",
    "granularity_for",
    "num_parts_of",
    "plan_slices",
    "rank_schedules",
    "ranked_schedules",
]
