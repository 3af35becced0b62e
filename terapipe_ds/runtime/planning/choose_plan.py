"""Choose the plan and the schedule that run on the layout of the config, and name other layouts that would be faster.

Layers stay where the config puts them. `"schedule": "auto"` ranks all schedules and runs the best one on this layout.
The log names the config keys for a faster schedule on another layout, or for a faster partition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from terapipe_ds.planner import (
    MemoryLimitError,
    PlanResult,
    Ranking,
    best_schedule,
    choose,
    describe_ranking,
    plan_slices,
    rank_schedules,
)
from terapipe_ds.planner.layers.measured_parts import NOT_TIMED, MeasuredParts
from terapipe_ds.planner.recompute import costs_of, plan_with_recompute, recomputable_parts
from terapipe_ds.planner.search.judge import Progress
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.schedule import placement_for
from terapipe_ds.simulator import simulate

WORTH_CHANGING = 0.01  # of the time; a smaller difference cannot be measured


def best_without_moving(
    stage: StageToPlan, cuts: MeasuredParts, length: int, limit_bytes: float | None, progress: Progress | None = None
) -> tuple[PlanResult, list[str]]:
    """Return the plan and schedule to run, with `cuts` of the stage's module, and lines for the log.

    These lines name a partition that would be faster by 1 %. With "auto" they also have the ranking, and name a
    schedule on another layout that would be faster by as much.

    Raises:
        MemoryLimitError: no schedule that leaves the layers in place fits; the error names one that fits elsewhere.
    """
    layout = stage.layout
    if stage.config.schedule != "auto":
        result = _on_layout(stage, cuts, length, limit_bytes, progress)
        return result, _better_partition(stage, cuts, result, limit_bytes)
    # rank every schedule, each on the layout that it needs
    ranking = _ranking(stage, cuts, length, limit_bytes, progress)
    # run the best schedule that leaves the layers where they are
    try:
        result = _plain(ranking) if layout.is_plain else _on_layout(stage, cuts, length, limit_bytes, progress)
    except MemoryLimitError as error:
        raise _with_other_layout(error, ranking.results, layout, cuts) from None
    if layout.has_copies:
        result = dataclasses.replace(result, extra_s=cuts.both_ways_s(layout.num_parts))
    # recommend other settings for the config
    notes = [NOT_TIMED] if not cuts.has_layers else []
    advice = [*_better_partition(stage, cuts, result, limit_bytes), *_advice(ranking.results, result, layout, cuts)]
    return result, ["", *describe_ranking(ranking), *notes, *advice]


def best_with_recompute(
    stage: StageToPlan, cuts: MeasuredParts, length: int, limit_bytes: float | None, progress: Progress | None = None
) -> tuple[PlanResult, list[Any]]:
    """Return the plan, the schedule and the recomputing layers, and the costs of the parts with these.

    Raises:
        MemoryLimitError: nothing fits, even if everything is recomputed.
        PlannerError: layers or their memory could not be measured.
    """
    config, bounds = stage.config, stage.layout.bounds or stage.engine.module.parts
    assert limit_bytes is not None, "refused by the config"
    parts = recomputable_parts(cuts, [int(bound) for bound in bounds])
    result = plan_with_recompute(
        parts,
        length,
        stage.engine.micro_batches,
        config.searched_granularity(length),
        config.schedule,
        limit_bytes,
        plan=None if config.slices == "auto" else config.plan_for(length, strict=False),
        schedule_options=config.schedule_options,
        progress=progress,
    )
    return result, costs_of(parts, result.recompute or ())


def _with_other_layout(
    error: MemoryLimitError, possible: Sequence[PlanResult], layout: Layout, cuts: MeasuredParts
) -> MemoryLimitError:
    elsewhere = [one for one in possible if not _leaves(one, layout)]
    if not elsewhere:
        return error
    best = choose(elsewhere)
    keys = _to_write(best, layout, cuts)
    text = f"{error}. Schedule {best.schedule!r} fits, but needs another layout of the layers: {keys}"
    return MemoryLimitError(text, error.need_bytes, error.stage_id)


def _leaves(result: PlanResult, layout: Layout) -> bool:
    """Return whether the layers may stay where they are."""
    return placement_for(result.schedule, layout.num_stages, result.chunks_per_stage) == layout.placement


def _to_write(result: PlanResult, layout: Layout, cuts: MeasuredParts) -> str:
    """Return the keys of the config that make `result` run, with a partition if it has another number of parts."""
    text = f'set "schedule": "{result.schedule}", "chunks_per_stage": {result.chunks_per_stage}'
    num_parts = len(set(placement_for(result.schedule, result.num_stages, result.chunks_per_stage).values()))
    return text if num_parts == layout.num_parts else f'{text}, "partition": {cuts.bounds(num_parts)}'


def _plain(ranking: Ranking) -> PlanResult:
    results = (result for result in ranking.results if result.chunks_per_stage == 1)
    return Ranking.of(results, (refusal for refusal in ranking.refused if refusal.chunks_per_stage == 1)).best


def _on_layout(
    stage: StageToPlan, cuts: MeasuredParts, length: int, limit_bytes: float | None, progress: Progress | None
) -> PlanResult:
    """Return the best plan of the config's schedule, or of all that run on the layout, with the whole budget."""
    layout, config = stage.layout, stage.config
    limits: dict[str, Any] = {"memory": cuts.memory(layout.num_parts), "memory_limit_bytes": limit_bytes}
    options: dict[str, Any] = {"chunks_per_stage": layout.chunks_per_stage, "placement": layout.placement, **limits}
    options["with_order"] = False  # `terapipe plan --order` finds one: it is run from its file
    costs, shape = cuts.cut(layout.num_parts), (layout.num_stages, stage.engine.micro_batches)
    if config.slices != "auto":
        return best_schedule(costs, config.plans_for(length, shape[1], strict=False), *shape, **options)
    shape_and_name = *shape, config.searched_granularity(length), config.schedule
    options |= {"schedule_options": config.schedule_options, "progress": progress}
    return plan_slices(costs, length, *shape_and_name, **options)


def _advice(possible: Sequence[PlanResult], result: PlanResult, layout: Layout, cuts: MeasuredParts) -> list[str]:
    """Return advice on config keys that train faster than `result`, if the gain is worth it."""
    best = choose(possible) if possible else result
    gain = 1 - best.total_s / result.total_s if result.total_s > 0 else 0.0
    if _leaves(best, layout) or gain <= WORTH_CHANGING:
        return []
    besides = "" if best.extra_s is not None else ", without the sum of gradients"
    return [
        f"schedule {best.schedule!r} would take {gain:.1%} less time than {result.schedule!r}{besides}, but needs "
        f"another layout of the layers: {_to_write(best, layout, cuts)} to try it"
    ]


def _better_partition(
    stage: StageToPlan, cuts: MeasuredParts, result: PlanResult, limit_bytes: float | None
) -> list[str]:
    """Return the `partition` to write in the config to run the same batch faster, if the gain is worth it.

    It balances the times of the parts. Stages that recompute, or a strategy, would have to change with it.
    """
    config, layout = stage.config, stage.layout
    if not cuts.has_layers or config.planned is not None or isinstance(config.recompute, tuple):
        return []
    bounds, now = cuts.balanced(layout.num_parts), cuts.bounds(layout.num_parts)
    if bounds is None or bounds == now or result.total_s <= 0:
        return []
    # replay the present schedule, with this cut of the layers
    schedule, costs = result.build(**config.options_of(result.schedule)), cuts.cut(layout.num_parts, bounds)
    timeline = simulate(schedule, result.plans, costs, memory=cuts.memory(layout.num_parts, bounds))
    gain = (result.predicted_s - timeline.makespan_s) / result.total_s
    has_room = limit_bytes is None or max(timeline.peak_bytes or (0,)) <= limit_bytes
    if gain <= WORTH_CHANGING or not has_room:
        return []
    return [f'"partition": {bounds} would take {gain:.1%} less time than {now}: set it to try it']


def _ranking(
    stage: StageToPlan, cuts: MeasuredParts, length: int, limit_bytes: float | None, progress: Progress | None
) -> Ranking:
    """Return all schedules for sequences of `length` tokens, with the slices of the config, or the planner's.

    Raises:
        TeraPipeConfigError: the slices of the config do not fit `length` tokens.
    """
    config, num_micro_batches = stage.config, stage.engine.micro_batches
    options: dict[str, Any] = {
        "both_ways_s_of": cuts.both_ways_s,
        "memory_of": cuts.memory if cuts.has_memory else None,
        "memory_limit_bytes": limit_bytes,
        "with_order": False,
        "progress": progress,
    }
    shape = stage.layout.num_stages, num_micro_batches
    if config.slices == "auto":
        return rank_schedules(cuts.cut, length, *shape, config.searched_granularity(length), **options)
    plans = config.plans_for(length, num_micro_batches, strict=False)
    return rank_schedules(cuts.cut, length, *shape, plan=plans, **options)
