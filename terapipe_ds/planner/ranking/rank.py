"""Compare all schedules side by side, each over the cut of the layers that it needs.

plain           K parts, one per stage        gpipe, 1f1b, terapipe, seq1f1b, zb-h1, seq1f1b-zb
loop, V         v K parts, v per stage        interleaved, seq1f1b-interleaved, seq1f1b-interleaved-zb; zbv where v is 2
bidirectional   K parts, two places for each  chimera, chimera-seq; K even
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.costs.interface import know_weights
from terapipe_ds.messages import limit_text
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.comparable import num_parts_of, ranked_schedules
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError, check_count
from terapipe_ds.planner.result import PlanResult, Ranking, Refusal
from terapipe_ds.planner.search.found_orders import SHARE_OF_ORDER, best_order, may_search
from terapipe_ds.planner.search.judge import Progress
from terapipe_ds.planner.search.pipeline import Lengths, Pipeline, cache_parts
from terapipe_ds.planner.search.problem import BUDGET, Problem
from terapipe_ds.schedule import build
from terapipe_ds.simulator.replay import Plans

SecondsOf = Callable[[int], float | None]
"""By the number of parts: seconds, None where they are not known."""

PartsOf = Callable[[int], Any]
"""By the number of parts: their costs, or their memory; None where the layers cannot be cut in so many."""

_OTHER_LAYOUTS = 0.2  # of the budget that the schedules of one layout would have on their own
_MOST_CHUNKS = 2  # unless the caller asks for more


def rank_schedules(
    costs_of: PartsOf,
    sequence_length: int,
    num_stages: int,
    num_micro_batches: int = 1,
    granularity_tokens: int = 64,
    *,
    plan: Plans | None = None,
    memory_of: PartsOf | None = None,
    memory_limit_bytes: float | None = None,
    max_slices: int | None = None,
    chunks_per_stage: int | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
    both_ways_s_of: SecondsOf | None = None,
    with_order: bool = True,
) -> Ranking:
    """Return the best plan of every schedule on `num_stages` stages, compared.

    Args:
        costs_of: a function from the number of parts to the costs, as `plan_slices` takes them.
        plan: the slices, of all micro-batches or of each; None: search the best ones.
        memory_of: memory by the number of parts.
        chunks_per_stage: compare only schedules with this number of parts per stage; None: 1 and 2.
        budget: as for `plan_slices` with "auto"; other layouts than the plain one get a fifth of it each, on top.
            Whatever it is, each of their schedules is judged with the plans chosen before.
        both_ways_s_of: the seconds that schedules whose parts have two places take on top of their makespan (`extra_s`,
            see `layers.both_ways`); None: not known.
        with_order: also compare an order searched for the costs.

    Raises:
        PlannerError: an impossible argument, or a number of chunks that no schedule can have with these layers.
    """
    # the search takes one schedule after the other, and each profits from those before
    chosen: list[Lengths] = []  # a plan that is good under one schedule is a start for the others
    results: list[PlanResult] = []
    refused: list[Refusal] = []
    for layout in _layouts(costs_of, memory_of, num_stages, chunks_per_stage):
        chunks = layout.chunks_per_stage
        if plan is not None:  # the user's slices leave nothing to search: each schedule is replayed once
            counts = num_stages, num_micro_batches, memory_limit_bytes
            ranking = _replay_each(layout, plan, *counts, with_order=with_order)
        else:
            parts = cache_parts(layout.costs, layout.num_parts, sequence_length, granularity_tokens)
            shape = sequence_length, granularity_tokens, num_micro_batches, num_stages, chunks
            pipeline = Pipeline(parts, *shape, layout.memory, memory_limit_bytes)
            problem = Problem(pipeline, max_slices, chosen=chosen, progress=progress)
            ranking = problem.best_of_each(budget if chunks == 1 else round(_OTHER_LAYOUTS * budget), with_order)
        # parts with two places cost more seconds at the end of a batch
        extra_s: float | None = 0.0
        if ranking.results and layout.num_parts < chunks * num_stages:
            extra_s = None if both_ways_s_of is None else both_ways_s_of(layout.num_parts)
        results += [dataclasses.replace(result, extra_s=extra_s) for result in ranking.results]
        refused += ranking.refused
    if plan is None:
        # schedules with the time and the memory of a searched one; a refused one is not listed as the equal of another
        equals = {"terapipe": ("gpipe",)} if num_micro_batches > 1 else {"seq1f1b": ("1f1b", "terapipe", "gpipe")}
        searched = {result.schedule for result in results} | {refusal.schedule for refusal in refused}
        both: tuple[list[Any], ...] = results, refused
        for answers in both:
            same = [(one, name) for one in answers for name in equals.get(one.schedule, ()) if name not in searched]
            answers.extend(dataclasses.replace(one, schedule=name) for one, name in same)
    return Ranking.of(results, refused)


def best_schedule(
    costs: Any,
    plan: Plans,
    num_stages: int,
    num_micro_batches: int = 1,
    *,
    memory: Any = None,
    memory_limit_bytes: float | None = None,
    chunks_per_stage: int = 1,
    placement: Mapping[tuple[int, int], int] | None = None,
    with_order: bool = True,
) -> PlanResult:
    """Return the schedule with the least predicted time for `plan` that fits; `costs` as for `plan_slices`.

    It compares all schedules that `ranked_schedules` names, and `with_order` an order searched for the costs. It tries
    no other plan, so the bound is 0. Raises MemoryLimitError where no schedule fits `memory_limit_bytes`.
    """
    num_parts = num_parts_of("auto", num_stages, chunks_per_stage, costs)
    layout = _Layout(chunks_per_stage, num_parts, costs, memory)
    counts = num_stages, num_micro_batches, memory_limit_bytes
    return _replay_each(layout, plan, *counts, placement, with_order).best


@dataclass(frozen=True)
class _Layout:
    """Hold a number of parts and a number of parts per stage that some schedule can have."""

    chunks_per_stage: int
    num_parts: int
    costs: Any
    memory: Any


def _replay_each(
    layout: _Layout,
    plan: Plans,
    num_stages: int,
    num_micro_batches: int,
    memory_limit_bytes: float | None,
    placement: Mapping[tuple[int, int], int] | None = None,
    with_order: bool = True,
) -> Ranking:
    """Replay `plan`, or one for each micro-batch, under each schedule that can be compared."""
    costs, chunks = layout.costs, layout.chunks_per_stage
    parts = costs if isinstance(costs, list | tuple) else [costs]
    # a schedule with W cannot be timed where the seconds of W are unknown
    names = ranked_schedules(num_stages, chunks, layout.num_parts, know_weights(parts), placement)
    plans = (plan,) * num_micro_batches if isinstance(plan, SlicePlan) else tuple(plan)
    num_slices, results, refused = [one.num_slices for one in plans], [], []
    for name in names:
        schedule = build(name, num_stages, num_micro_batches, num_slices, chunks_per_stage=chunks)
        result = PlanResult.of_replay(
            schedule, plans, costs, layout.memory, memory_limit_bytes, num_candidates=len(names)
        )
        # a schedule that does not fit is listed with its need
        peaks = result.peak_bytes
        if memory_limit_bytes is not None and peaks is not None and max(peaks) > memory_limit_bytes:
            refused.append(Refusal(name, chunks, _limit_error(name, plans, peaks, memory_limit_bytes)))
        else:
            results.append(result)
    # an order searched for the costs, where the search knows the placement and has time for it
    if with_order and results and may_search(num_stages, chunks, layout.num_parts, placement, num_slices):
        limits = {"memory": layout.memory, "memory_limit_bytes": memory_limit_bytes, "chunks_per_stage": chunks}
        with contextlib.suppress(PlannerError):  # the named schedules fit, but no order that it met does
            results.append(best_order(costs, plans, num_stages, num_micro_batches, budget=SHARE_OF_ORDER, **limits))
    return Ranking.of(results, refused)


def _limit_error(
    schedule: str, plans: Sequence[SlicePlan], peaks: tuple[int, ...], limit_bytes: float
) -> MemoryLimitError:
    need_bytes = max(peaks)
    stage_id = peaks.index(need_bytes)
    lists = ", ".join(str(list(plan.lengths)) for plan in dict.fromkeys(plans))
    message = (
        f"no schedule fits in {limit_text(limit_bytes)} with the slices {lists}: the least, {schedule}, needs "
        f"{limit_text(need_bytes)} on stage {stage_id}; raise the limit, give shorter slices, "
        "more stages or activation checkpointing"
    )
    return MemoryLimitError(message, need_bytes, stage_id)


def _layouts(
    costs_of: PartsOf, memory_of: PartsOf | None, num_stages: int, chunks_per_stage: int | None
) -> list[_Layout]:
    num_stages = check_count("num_stages", num_stages)
    most = _MOST_CHUNKS if chunks_per_stage is None else check_count("chunks_per_stage", chunks_per_stage)
    layouts = []
    for chunks in range(1 if chunks_per_stage is None else most, most + 1):
        # loops hold chunks x stages parts; chimera holds each of K parts twice
        for num_parts in dict.fromkeys((chunks * num_stages, num_stages)):
            # ask for costs first: with too few layers there are none, and no placement of a huge size is built
            costs = costs_of(num_parts)
            if costs is None or not ranked_schedules(num_stages, chunks, num_parts):
                continue
            memory = None if memory_of is None else memory_of(num_parts)
            if memory_of is None or memory is not None:
                parts = list(costs) if isinstance(costs, list | tuple) else [costs] * num_parts
                layouts.append(_Layout(chunks, num_parts, parts, memory))
    if not layouts:
        raise PlannerError(
            f"chunks_per_stage = {chunks_per_stage}: no schedule can have the layers so on {num_stages} stages; give "
            "fewer chunks"
        )
    return layouts
