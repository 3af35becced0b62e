"""Plan the slices of one schedule or of the best one; this is the planner's entry point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from terapipe_ds.messages import nearest, show_value
from terapipe_ds.planner.comparable import num_parts_of
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.planner.result import PlanResult
from terapipe_ds.planner.search.judge import Progress
from terapipe_ds.planner.search.pipeline import Pipeline, cache_parts
from terapipe_ds.planner.search.problem import BUDGET, Problem
from terapipe_ds.schedule import SCHEDULE_NAMES, SEARCH, SPLIT_SCHEDULES, ScheduleError
from terapipe_ds.schedule.generate import check_options


def plan_slices(
    costs: Any,
    sequence_length: int,
    num_stages: int,
    num_micro_batches: int = 1,
    granularity_tokens: int = 64,
    schedule: str = "terapipe",
    max_slices: int | None = None,
    memory: Any = None,
    memory_limit_bytes: float | None = None,
    *,
    progress: Progress | None = None,
    budget: int = BUDGET,
    chunks_per_stage: int = 1,
    placement: Mapping[tuple[int, int], int] | None = None,
    schedule_options: Mapping[str, object] | None = None,
    with_order: bool = True,
) -> PlanResult:
    """Return the plan with the least predicted time under `schedule` (or `"auto"`) that fits in memory.

    "search" also searches the order, and each micro-batch may then have its own plan (`result.plans`).

    Args:
        costs: `forward_s(tokens, prefix)`, `backward_s(tokens, prefix)` and, where links cost something,
            `send_s(tokens)`, and `send_gradient_s(tokens)` where messages back take another time; one object for all
            parts or a list with one per part. The search asks for each pair at most once.
        sequence_length: tokens of a sequence.
        num_stages, num_micro_batches: K and m, for one step of one pipeline.
        granularity_tokens: plans cut at multiples of it; the last slice takes the rest (see `granularity_for`).
        schedule: a name of `schedule.build`, "search" or "auto".
        max_slices: at most this number of slices; None: no limit.
        memory: a `MemoryModel`, or an object with its methods.
        chunks_per_stage: as for `schedule.build`; "auto" tries the schedules that can have it, see `ranked_schedules`.
        schedule_options: further arguments of `schedule.build`, for one schedule by its name.
        placement: the fixed places of the parts: "auto" tries the schedules that run on it.
        with_order: "auto" also compares an order searched for the costs.
        progress: called now and then with (schedule, work done, of how much).
        budget: work of the search, in replayed computations; the same budget yields the same plan everywhere.

    Raises:
        MemoryLimitError: no plan fits `memory_limit_bytes`; it names the least need and how to lower it.
        PlannerError: an impossible argument, or costs that are negative or not finite.
    """
    names = (*SCHEDULE_NAMES, SEARCH, "auto")
    if schedule not in names:
        advice = nearest(str(schedule), names) or "; give one of them"
        raise PlannerError(f"schedule = {show_value(schedule)}: the planner knows {', '.join(names)}{advice}")
    num_stages = check_count("num_stages", num_stages)
    options = schedule_options or {}
    if options and schedule == "auto":
        given = show_value(dict(options))
        raise PlannerError(f"schedule_options = {given}: they go with one schedule, not with 'auto'; leave them out")
    try:
        check_options(schedule, num_stages, options, chunks_per_stage)
    except ScheduleError as error:
        raise PlannerError(error.reason) from None
    # one cost object per part of the schedule
    num_parts = num_parts_of(schedule, num_stages, chunks_per_stage, costs)
    parts = cache_parts(costs, num_parts, sequence_length, granularity_tokens)
    shape = sequence_length, granularity_tokens, num_micro_batches, num_stages, chunks_per_stage
    pipeline = Pipeline(parts, *shape, memory, memory_limit_bytes)
    live, chunks = options.get("max_live_slices"), num_parts // num_stages
    if isinstance(live, int):  # a stage holds every slice of a micro-batch at once
        max_slices = live // chunks if max_slices is None else min(max_slices, live // chunks)
    problem = Problem(pipeline, max_slices, progress=progress, placement=placement)
    # one schedule, all of them, or a searched order
    if schedule == SEARCH:
        return problem.best_with_order(budget)
    if schedule == "auto":
        return problem.best_of_each(budget, with_order).best
    if schedule in SPLIT_SCHEDULES and not problem.knows_weights:
        raise PlannerError(
            f"schedule = {show_value(schedule)} splits backwards, but the costs have no weight_s(tokens, prefix): "
            "add it, or plan for 'seq1f1b'"
        )
    return problem.best(schedule, budget, options)


def granularity_for(granularity_tokens: int, tensor_parallel: int = 1, sequence_parallel: bool = False) -> int:
    """Return the least multiple of `granularity_tokens` that divides by the ranks of sequence parallelism."""
    granularity_tokens = check_count("granularity_tokens", granularity_tokens)
    tensor_parallel = check_count("tensor_parallel", tensor_parallel)
    return math.lcm(granularity_tokens, tensor_parallel) if sequence_parallel else granularity_tokens
