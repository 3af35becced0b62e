"""The best schedule for a plan that is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import MemoryLimitError
from terapipe_ds.planner.ranked import num_parts_of, ranked_schedules
from terapipe_ds.planner.result import PlanResult, choose
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay


def best_schedule(
    costs: Any, plan: SlicePlan, num_stages: int, num_micro_batches: int = 1, *, memory: Any = None,
    memory_limit_bytes: float | None = None, chunks_per_stage: int = 1,
    placement: Mapping[tuple[int, int], int] | None = None,
) -> PlanResult:  # fmt: skip
    """The schedule that takes the least predicted time with ``plan`` and fits; `costs` as for `plan_slices`.

    Compared are all that have ``chunks_per_stage`` chunks and as many parts as costs, and run on ``placement`` where
    one is given (see `ranked_schedules`). Nothing
    is proven of other plans: the bound is 0.

    Raises:
        MemoryLimitError: no schedule fits ``memory_limit_bytes``.
    """
    found, refused = best_of_each(
        costs, plan, num_stages, num_micro_batches, memory=memory, memory_limit_bytes=memory_limit_bytes,
        chunks_per_stage=chunks_per_stage, placement=placement,
    )  # fmt: skip
    if not found:
        raise min(refused.values(), key=lambda error: error.need_bytes)
    return choose(found)


def best_of_each(
    costs: Any, plan: SlicePlan, num_stages: int, num_micro_batches: int = 1, *, memory: Any = None,
    memory_limit_bytes: float | None = None, chunks_per_stage: int = 1,
    placement: Mapping[tuple[int, int], int] | None = None,
) -> tuple[list[PlanResult], dict[str, MemoryLimitError]]:  # fmt: skip
    """What `best_schedule` chooses from: the result of each schedule, or why it does not fit."""
    each = costs if isinstance(costs, list | tuple) else [costs]
    knows_weights = all(callable(getattr(one, "weight_s", None)) for one in each)
    num_parts = num_parts_of("auto", num_stages, chunks_per_stage, costs)
    names = ranked_schedules(num_stages, chunks_per_stage, num_parts, knows_weights, placement)
    found: list[PlanResult] = []
    refused: dict[str, MemoryLimitError] = {}
    for name in names:
        shape = num_stages, num_micro_batches
        schedule = build(name, *shape, plan.num_slices, chunks_per_stage=chunks_per_stage)
        timeline = Replay.of(schedule).run(plan, costs, memory=memory)
        peaks = timeline.peak_bytes
        if memory_limit_bytes is not None and peaks is not None and max(peaks) > memory_limit_bytes:
            refused[name] = _limit_error(name, plan, peaks, memory_limit_bytes)
            continue
        whole = SlicePlan.equal(plan.sequence_length, 1)
        unsliced_s = Replay.of(build(name, *shape, 1, chunks_per_stage=chunks_per_stage)).makespan(whole, costs)
        result = PlanResult(
            plan, name, timeline.makespan_s, False, 0.0, num_stages, num_micro_batches, unsliced_s, plan,
            timeline.makespan_s, timeline.bubble_fraction, peaks, memory_limit_bytes, len(names),
            schedule.chunks_per_stage,
        )  # fmt: skip
        found.append(result)
    return found, refused


def _limit_error(schedule: str, plan: SlicePlan, peaks: tuple[int, ...], limit_bytes: float) -> MemoryLimitError:
    need_bytes = max(peaks)
    stage_id = peaks.index(need_bytes)
    return MemoryLimitError(
        f"no schedule fits in the memory limit of {limit_bytes:.4g} bytes with the slices {list(plan.lengths)}: the "
        f"least, {schedule}, needs {need_bytes:.4g} bytes on stage {stage_id}; raise the limit, give shorter slices, "
        "more stages or activation checkpointing",
        need_bytes,
        stage_id,
    )
