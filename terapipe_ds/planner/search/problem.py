"""Search the best plan: candidates, judged by a replay of the very schedule that will run them.

For `terapipe` on equal stages the slice program itself (`slice_program`) is the search. For every other schedule, and
for unequal stages, the search starts from equal slices, slices of equal time and plans of the slice program. It climbs
from the best of them by moving granules, merging and splitting. Where there are few plans, it judges all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from terapipe_ds.costs.interface import know_weights
from terapipe_ds.plan import SlicePlan, split_evenly
from terapipe_ds.planner.comparable import ranked_schedules
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError, check_count
from terapipe_ds.planner.orders.ramps import find_order_and_slices
from terapipe_ds.planner.result import PlanResult, Ranking, Refusal
from terapipe_ds.planner.search import candidates
from terapipe_ds.planner.search.bounds import MANY_GRANULES, MAX_WORK, least_works_s, searches
from terapipe_ds.planner.search.found_orders import SHARE_OF_ORDER, may_search, searched_result
from terapipe_ds.planner.search.judge import Judge, Progress, memory_limit_error, most_work_s
from terapipe_ds.planner.search.pipeline import Lengths, Pipeline
from terapipe_ds.planner.slice_program.branch_and_bound import Objective, Search, search_plans
from terapipe_ds.planner.slice_program.cost_table import CostTable, equal_time
from terapipe_ds.schedule import SEARCH, placement_for

# The schedules that "auto" tries, with shares of the budget; `gpipe` takes the time and the memory of `terapipe`.
_AUTO = {"terapipe": 0.2, "seq1f1b": 0.5, "1f1b": 0.3}
_AUTO_OF_ONE = {"seq1f1b": 1.0}  # with one micro-batch all schedules are the same
_AUTO_SPLIT = {"seq1f1b-zb": 0.5, "zb-h1": 0.2}  # on top, where costs have `weight_s`
# Where stages hold several chunks, "auto" tries these instead, if they can have that number of chunks and parts.
_AUTO_CHUNKED = {
    **{"seq1f1b-interleaved-zb": 0.6, "seq1f1b-interleaved": 0.6, "interleaved": 0.4},
    **{"zbv": 0.6, "chimera-seq": 0.6, "chimera": 0.4},
}

_PLANS_OF_ORDERS = 3  # of the named schedules; the search for an order starts from them
BUDGET = 10_000_000  # computations replayed; some 3 s on one core, more for very long sequences
_ALL_PLANS = 4096  # up to this number, if the budget allows, all plans are judged
_EQUAL_TIMES = 32  # slices; a program for slices of equal time takes one step per slice
_PROGRAM_PLANS = 32  # of each search
_FILL_DRAIN_BUDGET = 1_000_000  # on top, once for all schedules, where stages differ
_ROUNDING = 1e-9  # relative: prediction and bound are summed in different orders


class _BestLengths(NamedTuple):
    """Hold a plan's slice lengths, with its proven bound."""

    lengths: Lengths
    lower_bound_s: float  # no plan takes less
    optimal: bool  # no plan takes less than this one


class Problem:
    """Share the slice program's plans, the bounds and the starts among the schedules over one cut of the layers.

    Args:
        placement: the places of the parts, if these are fixed already.
        chosen: plans that other schedules chose, over any cut; this problem adds its own. If it has some, they suffice
            as starts.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        max_slices: int | None = None,
        *,
        placement: Mapping[tuple[int, int], int] | None = None,
        chosen: list[Lengths] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.pipeline, self.placement, self.progress = pipeline, placement, progress
        self.knows_weights = know_weights(pipeline.parts)
        self.num_granules = pipeline.num_granules
        most = self.num_granules if max_slices is None else check_count("max_slices", max_slices)
        self.max_slices = min(most, self.num_granules)
        self.chosen: list[Lengths] = [] if chosen is None else chosen
        self.has_starts = bool(chosen)

    def best_of_each(self, budget: int, with_order: bool = True) -> Ranking:
        """Return, for each schedule that "auto" tries, the best plan, or why none fits; then a searched order."""
        ranking = self._best_of_names(budget)
        shape = self.pipeline.num_stages, self.pipeline.chunks_per_stage, len(self.pipeline.parts), self.placement
        if not (with_order and ranking.results and may_search(*shape, ranking.best.num_slices)):
            return ranking
        try:
            found = self._with_order(ranking.results, SHARE_OF_ORDER * min(1.0, budget / BUDGET))
        except PlannerError:  # the named schedules fit, but no order that it met does
            return ranking
        return Ranking.of((*ranking.results, found), ranking.refused)

    def best_with_order(self, budget: int) -> PlanResult:
        """Search the best order with its plans, starting from the plans of the named schedules.

        Under a limit of bytes the answer is a named schedule if the search meets no order that is as fast. If no named
        schedule fits, an order may.
        """
        where = placement_for(SEARCH, self.pipeline.num_stages, self.pipeline.chunks_per_stage)
        self.placement = where if self.placement is None else self.placement
        ranking, found = self._best_of_names(budget), None
        try:
            found = self._with_order(ranking.results, min(1.0, budget / BUDGET))
        except PlannerError:
            if not (ranking.refused or ranking.results):  # without the seconds of W there may be no named schedule
                raise
        if found and (self.pipeline.memory_limit_bytes is None or not ranking.results):
            return found
        named = ranking.best
        if found and found.predicted_s <= named.predicted_s:
            return found
        bound_s = min(self._work_bound_s, named.predicted_s)
        return dataclasses.replace(
            named,
            schedule=SEARCH,
            order=dataclasses.replace(named.build(), name=SEARCH),
            lower_bound_s=bound_s,
            order_bound_s=bound_s,
            optimal=named.predicted_s <= bound_s,
        )

    @functools.cached_property
    def _work_bound_s(self) -> float:
        """Return the least work of the busiest stage: no order takes less, with any slices."""
        pipeline = self.pipeline
        works_s = least_works_s(pipeline.parts, pipeline.num_micro_batches, self.max_slices)
        placement = placement_for(SEARCH, pipeline.num_stages, pipeline.chunks_per_stage)
        return most_work_s(works_s, placement, pipeline.num_stages)

    def _with_order(self, named: Sequence[PlanResult], share: float) -> PlanResult:
        pipeline = self.pipeline
        good = sorted(named, key=lambda result: result.predicted_s)[:_PLANS_OF_ORDERS]
        starts = {plan.num_slices: plan for result in reversed(good) for plan in result.plans[:1]}
        if not starts:  # no named schedule has these parts without W
            starts = {count: self._cut(count) for count in candidates.slice_counts(min(4, self.max_slices))}

        def cut(count: int) -> SlicePlan:
            return starts.get(count) or self._cut(count)

        find = functools.partial(find_order_and_slices, most_slices=self.max_slices)
        return searched_result(
            pipeline, find, cut, list(reversed(starts)), budget=share, lower_bound_s=self._work_bound_s
        )

    def _cut(self, count: int) -> SlicePlan:
        """Return a plan with `count` slices: of equal time where the program for it is short, else of equal length."""
        few = self.num_granules <= MANY_GRANULES and count <= _EQUAL_TIMES
        lengths = equal_time(self.slowest, count) if few else split_evenly(self.num_granules, count)
        return self.pipeline.plan(lengths)

    def _best_of_names(self, budget: int) -> Ranking:
        chunks, results, refused = self.pipeline.chunks_per_stage, [], []
        for name, share in self._shares().items():
            try:
                results.append(self.best(name, round(share * budget)))
            except MemoryLimitError as error:
                refused.append(Refusal(name, chunks, error))
        return Ranking.of(results, refused)

    def _shares(self) -> dict[str, float]:
        """Return the schedules that "auto" tries, with shares of the budget."""
        pipeline = self.pipeline
        if pipeline.chunks_per_stage == 1:
            shares = _AUTO if pipeline.num_micro_batches > 1 else _AUTO_OF_ONE
            return shares | _AUTO_SPLIT if self.knows_weights else shares
        shape = pipeline.num_stages, pipeline.chunks_per_stage, len(pipeline.parts)
        return {name: _AUTO_CHUNKED[name] for name in ranked_schedules(*shape, self.knows_weights, self.placement)}

    def best(self, schedule: str, budget: int, options: Mapping[str, object] = MappingProxyType({})) -> PlanResult:
        judge = Judge(self.pipeline, schedule, budget=budget, progress=self.progress, schedule_options=options)
        answer = self._proven_by_program(judge) or self._best_of_all(judge) or self._climbed(judge)
        self.chosen.append(answer.lengths)
        return self._result(judge, answer)

    # --- three ways to a plan, tried in order

    def _proven_by_program(self, judge: Judge) -> _BestLengths | None:
        """Return the slice program's plan, where its formula holds for the schedule and the plan fits in memory."""
        if not (judge.is_flow_shop and self._has_equal_stages):
            return None
        program, lengths = self.program, self.program.best.lengths
        if (not program.optimal and self._can_judge_all(judge)) or not judge.fits(lengths):
            return None
        # links slower than the computation before them are not in the program's formula
        proven = program.optimal and judge.seconds(lengths) <= program.lower_bound_s * (1 + _ROUNDING)
        if not proven and self.num_granules <= MANY_GRANULES:
            return None
        return _BestLengths(lengths, program.lower_bound_s, proven)

    def _best_of_all(self, judge: Judge) -> _BestLengths | None:
        """Return the best of all plans, where there are few."""
        if not self._can_judge_all(judge):
            return None
        plans = list(candidates.compositions(self.num_granules, self.max_slices))
        best = judge.fastest(plans, judge.seconds)
        if best is None:
            raise memory_limit_error(judge, plans)
        return _BestLengths(best, judge.seconds(best), True)

    def _climbed(self, judge: Judge) -> _BestLengths:
        """Return the best plan that a climb from good ones reaches, with a bound for the schedule."""
        if judge.has_chunks or judge.splits_backward:
            works_s = least_works_s(self.pipeline.parts, self.pipeline.num_micro_batches, self.max_slices)
            by_stage = most_work_s(works_s, judge.placement, self.pipeline.num_stages)
            bound_s = by_stage if judge.has_chunks else max(works_s)
        else:
            fits_program = judge.is_flow_shop and self._has_equal_stages
            bound_s = max(self.searched[1], self.program.lower_bound_s if fits_program else 0.0)
        return _BestLengths(candidates.climb(judge, self.sure_starts(), self.more_starts()), bound_s, False)

    def _can_judge_all(self, judge: Judge) -> bool:
        if self.num_granules > _ALL_PLANS.bit_length():
            return False
        counts = [math.comb(self.num_granules - 1, count - 1) for count in range(1, self.max_slices + 1)]
        return sum(counts) <= _ALL_PLANS and judge.cost_of(dict(enumerate(counts, start=1))) <= judge.budget

    # --- shared by the schedules

    def sure_starts(self) -> Iterator[Lengths]:
        """Yield starts that are scored whatever the budget, so that the answer is never worse than any of them."""
        yield from self._equal_plans({len(lengths) for lengths in self.chosen} if self.has_starts else None)
        if not self.has_starts:
            yield self.fill_drain_plan
        yield from list(self.chosen)

    def more_starts(self) -> Iterator[Lengths]:
        """Yield starts while the budget lasts: slices of equal time on the slowest part and plans that the slice
        program met; or, with plans of other schedules, the remaining equal slices."""
        if self.has_starts:
            yield from self._equal_plans()
            return
        if self.num_granules <= MANY_GRANULES:
            for count in candidates.slice_counts(min(self.max_slices, _EQUAL_TIMES)):
                yield equal_time(self.slowest, count)
        for search in (self.program, *self.searched[0]):
            fitting = [plan for plan in search.met.values() if plan.num_slices <= self.max_slices]
            yield from (plan.lengths for plan in sorted(fitting, key=search.objective)[:_PROGRAM_PLANS])

    def _equal_plans(self, counts: Iterable[int] | None = None) -> list[Lengths]:
        counts = candidates.slice_counts(self.max_slices) if counts is None else sorted(counts)
        return [split_evenly(self.num_granules, count) for count in counts]

    @functools.cached_property
    def slowest(self) -> CostTable:
        """Return the table of the part that takes longest for a whole sequence, among parts with tables."""
        tables = [part.table for part in self.pipeline.parts if part.table is not None]
        return max(tables, key=lambda table: float(table.total_s[0, -1]))

    @functools.cached_property
    def program(self) -> Search:
        """Return the slice program's answer as if each part were the slowest; exact where all parts are equal."""
        objective = Objective(self.pipeline.num_micro_batches, len(self.pipeline.parts) - 1)
        max_work = None if self._has_equal_stages or self.num_granules <= 64 else MAX_WORK
        return search_plans(self.slowest.band, objective, self._counted_slices, max_work)

    @functools.cached_property
    def fill_drain_plan(self) -> Lengths:
        """Return a good plan for all forwards before all backwards, one part per stage and memory without limit."""
        if self._has_equal_stages:
            return self.program.best.lengths
        num_parts = len(self.pipeline.parts)
        pipeline = dataclasses.replace(self.pipeline, num_stages=num_parts, chunks_per_stage=1, memory_limit_bytes=None)
        starts = [search.best.lengths for search in (self.program, *self.searched[0])]
        return candidates.climb(Judge(pipeline, "terapipe", budget=_FILL_DRAIN_BUDGET), starts, self.more_starts())

    @functools.cached_property
    def searched(self) -> tuple[list[Search], float]:
        """Return the searches for the bound that holds for every schedule on a line, and the bound."""
        return searches(self.pipeline.parts, self.pipeline.num_micro_batches, self._counted_slices)

    @property
    def _has_equal_stages(self) -> bool:
        first = self.pipeline.parts[0]
        return first.table is not None and all(part is first for part in self.pipeline.parts)

    @property
    def _counted_slices(self) -> int | None:
        """Return the most slices, or None where there is no limit: then programs need not count slices."""
        return None if self.max_slices == self.num_granules else self.max_slices

    # --- the answer

    def _result(self, judge: Judge, answer: _BestLengths) -> PlanResult:
        pipeline, lengths = self.pipeline, answer.lengths
        predicted_s, equal = judge.seconds(lengths), self._best_equal(judge)
        busy_s, all_s = pipeline.work_s(lengths), pipeline.num_stages * predicted_s
        lower_bound_s = min(answer.lower_bound_s, predicted_s)  # both are sums of many floats
        return PlanResult(
            plans=(pipeline.plan(lengths),) * pipeline.num_micro_batches,
            schedule=judge.schedule,
            predicted_s=predicted_s,
            optimal=answer.optimal or lower_bound_s >= predicted_s * (1 - _ROUNDING),
            lower_bound_s=lower_bound_s,
            num_stages=pipeline.num_stages,
            num_micro_batches=pipeline.num_micro_batches,
            unsliced_s=judge.seconds((self.num_granules,)),
            equal_plan=pipeline.plan(equal),
            equal_s=judge.seconds(equal),
            bubble_fraction=max(1.0 - busy_s / all_s, 0.0) if all_s > 0 else 0.0,
            peak_bytes=judge.peak_bytes(lengths),
            memory_limit_bytes=pipeline.memory_limit_bytes,
            num_candidates=judge.num_tried,
            chunks_per_stage=len(judge.placement) // pipeline.num_stages,
        )

    def _best_equal(self, judge: Judge) -> Lengths:
        """Return the best equal plan that fits; unsliced if none fits."""
        # with plans of other schedules, only plans with a score
        plans = self._equal_plans()
        judged = [lengths for lengths in plans if not self.has_starts or judge.has_score(lengths)]
        return judge.fastest(judged, judge.estimate) or plans[0]
