"""Plan the schedule "search": find an order for the costs, with its plans, as a result like a named schedule's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.orders.find import FoundOrder, find_order
from terapipe_ds.planner.orders.ramps import Cut, find_order_and_slices
from terapipe_ds.planner.result import PlanResult
from terapipe_ds.planner.search.pipeline import Pipeline
from terapipe_ds.schedule import SEARCH, ScheduleError
from terapipe_ds.simulator import simulate

MOST_COMPUTATIONS = 50_000  # of a batch; above this, "auto" does not search for an order
SHARE_OF_ORDER = 0.4  # of some five seconds; "auto" spends this on an order for each layout
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
    max_live_slices: int | Sequence[int] | None = None,
    budget: float = 1.0,
) -> PlanResult:
    """Find an order for the caller's slices; `costs` as for `plan_slices`, limits as for `find_order`.

    Args:
        budget: a share of some five seconds on one core, counted in computations, so that it gives the same everywhere.

    Raises:
        PlannerError: no order that the search meets keeps the limit, or impossible counts.
    """
    plans = (plan,) * num_micro_batches if isinstance(plan, SlicePlan) else tuple(plan)
    length = max(one.sequence_length for one in plans)
    num_parts = num_stages * chunks_per_stage
    shape = length, 1, num_micro_batches, num_stages, chunks_per_stage
    pipeline = Pipeline(_once(costs, num_parts), *shape, memory, memory_limit_bytes)
    finder = OrderFinder(pipeline, max_live_slices, budget)
    return finder.result(finder.order_of(plans))


def _once(costs: Any, num_parts: int) -> tuple[Any, ...]:
    """Return one unchanged object per part: few slices occur, so that no table is worth its time."""
    parts = tuple(costs) if isinstance(costs, list | tuple) else (costs,) * num_parts
    if len(parts) != num_parts:
        raise PlannerError(f"{len(parts)} costs for {num_parts} parts: give one object, or a list with one per part")
    return parts


class OrderFinder:
    """Find orders for one pipeline; `budget` is a share of some five seconds."""

    def __init__(
        self, pipeline: Pipeline, max_live_slices: int | Sequence[int] | None = None, budget: float = 1.0
    ) -> None:
        self._pipeline, self._budget, self._parts = pipeline, budget, list(pipeline.parts)
        self._counts = pipeline.num_stages, pipeline.num_micro_batches
        self._limits: dict[str, Any] = {
            "memory": pipeline.memory,
            "memory_limit_bytes": pipeline.memory_limit_bytes,
            "max_live_slices": max_live_slices,
            "chunks_per_stage": pipeline.chunks_per_stage,
        }

    def order_of(self, plans: Sequence[SlicePlan]) -> FoundOrder:
        """Return the order for these plans. Raises PlannerError where none keeps the limit."""
        return self._found(find_order, plans, *self._counts)

    def order_and_plans(self, starts: Mapping[int, SlicePlan], cut: Cut, most_slices: int) -> FoundOrder:
        """Return an order with its plans: `starts` by their number of slices, others near them by `cut`.

        Raises:
            PlannerError: none keeps the limit.
        """

        def plan_of(count: int) -> SlicePlan:
            return starts.get(count) or cut(count)

        return self._found(find_order_and_slices, plan_of, list(starts), *self._counts, most_slices=most_slices)

    def _found(self, find: Callable[..., FoundOrder], *question: Any, **more: Any) -> FoundOrder:
        try:
            return find(self._parts, *question, budget=self._budget, **more, **self._limits)
        except ScheduleError as error:
            raise PlannerError(f"schedule = {SEARCH!r}: {error.reason}") from None

    def result(self, found: FoundOrder, lower_bound_s: float = 0.0) -> PlanResult:
        """Return the result beside unsliced sequences and equal slices, each with its own order."""
        pipeline = self._pipeline
        length, most = found.plans[0].sequence_length, max(plan.num_slices for plan in found.plans)
        whole, equal = (SlicePlan.equal(length, count, pipeline.granularity_tokens) for count in (1, most))
        unsliced_s, equal_s = self._quick_s(whole, {}), self._quick_s(equal, self._limits)
        timeline = simulate(found.schedule, found.plans, self._parts, memory=pipeline.memory)
        return PlanResult(
            plans=found.plans,
            schedule=SEARCH,
            predicted_s=found.makespan_s,
            optimal=lower_bound_s >= found.makespan_s * (1 - 1e-9) > 0,
            lower_bound_s=min(lower_bound_s, found.makespan_s),
            num_stages=pipeline.num_stages,
            num_micro_batches=pipeline.num_micro_batches,
            unsliced_s=unsliced_s,
            equal_plan=whole if math.isinf(equal_s) else equal,
            equal_s=unsliced_s if math.isinf(equal_s) else equal_s,
            bubble_fraction=timeline.bubble_fraction,
            peak_bytes=timeline.peak_bytes,
            memory_limit_bytes=pipeline.memory_limit_bytes,
            num_candidates=found.evaluations,
            chunks_per_stage=pipeline.chunks_per_stage,
            order=found.schedule,
            order_bound_s=min(found.lower_bound_s, found.makespan_s),
        )

    def _quick_s(self, plan: SlicePlan, limits: Mapping[str, Any]) -> float:
        """Return the seconds of a plan in a quickly found order; infinity where no order keeps the limit."""
        limits = {"chunks_per_stage": self._pipeline.chunks_per_stage, **limits}
        try:
            return find_order(self._parts, plan, *self._counts, evaluations=_FEW, **limits).makespan_s
        except ScheduleError:
            return math.inf
