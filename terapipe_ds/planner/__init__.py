"""Plan the cuts of a sequence: the slice program, memory and the search over schedules."""

from __future__ import annotations

from terapipe_ds.planner.comparable import num_parts_of as num_parts_of
from terapipe_ds.planner.comparable import ranked_schedules as ranked_schedules
from terapipe_ds.planner.errors import MemoryLimitError as MemoryLimitError
from terapipe_ds.planner.errors import PlannerError as PlannerError
from terapipe_ds.planner.memory import MemoryModel as MemoryModel
from terapipe_ds.planner.memory import PartMemory as PartMemory
from terapipe_ds.planner.ranking.rank import best_schedule as best_schedule
from terapipe_ds.planner.ranking.rank import rank_schedules as rank_schedules
from terapipe_ds.planner.ranking.report import describe as describe
from terapipe_ds.planner.ranking.report import describe_ranking as describe_ranking
from terapipe_ds.planner.result import PlanResult as PlanResult
from terapipe_ds.planner.result import Ranking as Ranking
from terapipe_ds.planner.result import Refusal as Refusal
from terapipe_ds.planner.result import choose as choose
from terapipe_ds.planner.search.found_orders import best_order as best_order
from terapipe_ds.planner.search.search import granularity_for as granularity_for
from terapipe_ds.planner.search.search import plan_slices as plan_slices
