"""Plan the schedule "search": find an order for the costs, with its plans, as a result like a named schedule's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from terapipe_ds.costs.interface import costs_of_parts
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.orders.find import FoundOrder, find_order
from terapipe_ds.planner.result import PlanResult
from terapipe_ds.planner.search.pipeline import Pipeline
from terapipe_ds.schedule import SEARCH, ScheduleError, placement_for

SHARE_OF_ORDER = 0.4  # of some five seconds; "auto" spends this on an order for each layout
_MOST_COMPUTATIONS = 50_000  # of a batch; above this, "auto" does not search for an order
_FEW = 8  # evaluations of an order that only serves as a comparison


def best_order(
    costs: Any,
    plan: SlicePlan | Sequence[SlicePlan],
    num_stages: int,
    num_micro_batches: int = 1,
    *,
    memory: Any = None,
    memory_limit_bytes: float | None = None,
    chunks_per_stage: int = 1,
    budget: float = 1.0,
) -> PlanResult:
    """Find an order for the caller's slices; `costs` as for `plan_slices`, limits and `budget` as for `find_order`.

    Raises PlannerError where no order that the search meets keeps the limit, or for impossible counts.
    """
    plans = (plan,) * num_micro_batches if isinstance(plan, SlicePlan) else tuple(plan)
    length = max(one.sequence_length for one in plans)
    # few slices occur, so that no table of costs is worth its time
    parts = costs_of_parts(costs, num_stages * chunks_per_stage, PlannerError)
    shape = length, 1, num_micro_batches, num_stages, chunks_per_stage
    pipeline = Pipeline(parts, *shape, memory, memory_limit_bytes)
    return searched_result(pipeline, find_order, plans, budget=budget)


def may_search(
    num_stages: int,
    chunks_per_stage: int,
    num_parts: int,
    placement: Mapping[tuple[int, int], int] | None,
    num_slices: Iterable[int],
) -> bool:
    """Return whether "auto" searches an order: it knows the placement (None: any), and computations are few."""
    if chunks_per_stage > 2 or num_parts != chunks_per_stage * num_stages:
        return False
    where = placement_for(SEARCH, num_stages, chunks_per_stage)
    return placement in (None, where) and 3 * num_parts * sum(num_slices) <= _MOST_COMPUTATIONS


def searched_result(
    pipeline: Pipeline, find: Callable[..., FoundOrder], *question: Any, budget: float, lower_bound_s: float = 0.0
) -> PlanResult:
    """Return the order that `find` finds beside unsliced sequences and equal slices, each with its own order.

    Args:
        find: `find_order` or `find_order_and_slices`; `question` has the arguments after the costs.
        budget: a share of some five seconds.
        lower_bound_s: no order takes less, with any slices.

    Raises PlannerError where no order keeps the limit.
    """
    parts, counts = list(pipeline.parts), (pipeline.num_stages, pipeline.num_micro_batches)
    chunks = {"chunks_per_stage": pipeline.chunks_per_stage}
    limits = {"memory": pipeline.memory, "memory_limit_bytes": pipeline.memory_limit_bytes, **chunks}
    try:
        found = find(parts, *question, *counts, budget=budget, **limits)
    except ScheduleError as error:
        raise PlannerError(f"schedule = {SEARCH!r}: {error.reason}") from None

    def quick_s(plan: SlicePlan, limits: Mapping[str, Any]) -> float:
        try:
            return find_order(parts, plan, *counts, evaluations=_FEW, **limits).makespan_s
        except ScheduleError:
            return math.inf

    length, most = found.plans[0].sequence_length, max(plan.num_slices for plan in found.plans)
    whole, equal = (SlicePlan.equal(length, count, pipeline.granularity_tokens) for count in (1, most))
    # equal slices may break the limit; unsliced sequences stand for them then
    unsliced_s, equal_s = quick_s(whole, chunks), quick_s(equal, limits)
    replayed = found.schedule, found.plans, parts, pipeline.memory, pipeline.memory_limit_bytes
    return PlanResult.of_replay(
        *replayed,
        predicted_s=found.makespan_s,
        optimal=lower_bound_s >= found.makespan_s * (1 - 1e-9) > 0,
        lower_bound_s=min(lower_bound_s, found.makespan_s),
        unsliced_s=unsliced_s,
        equal_plan=whole if math.isinf(equal_s) else equal,
        equal_s=unsliced_s if math.isinf(equal_s) else equal_s,
        num_candidates=found.evaluations,
        order=found.schedule,
        order_bound_s=min(found.lower_bound_s, found.makespan_s),
    )
