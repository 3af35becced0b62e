"""The final choice: candidate plans, judged by a replay of the very schedule that will run them.

``terapipe`` on equal stages is the slice program itself (``slice_dp``). Every other schedule, and unequal stages, start
from equal slices, slices of equal time and the program's plans for several effective numbers of stages, and climb from
the best of them by moving granules, merging and splitting; where there are few plans, all of them are judged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from terapipe_ds.plan import SlicePlan, show_value
from terapipe_ds.planner import candidates
from terapipe_ds.planner.asked import AskedCosts, ask_parts, whole_s
from terapipe_ds.planner.bounds import busy_bound_s, least_works_s, searches
from terapipe_ds.planner.branch import Search
from terapipe_ds.planner.candidates import Lengths
from terapipe_ds.planner.climb import climb
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.judge import Judge, Progress, most_work_s
from terapipe_ds.planner.limits import memory_limit_error
from terapipe_ds.planner.ranked import num_parts_of, ranked_schedules
from terapipe_ds.planner.result import PlanResult, choose
from terapipe_ds.planner.slice_dp import SliceSolution, equal_time, solve, solve_equal
from terapipe_ds.planner.slice_dp import candidates as program_plans
from terapipe_ds.planner.tabulate import check_count
from terapipe_ds.schedule import SCHEDULE_NAMES, SPLIT_SCHEDULES, ScheduleError
from terapipe_ds.schedule.generate import check_options

_AUTO = {"terapipe": 0.2, "seq1f1b": 0.5, "1f1b": 0.3}
"""What "auto" tries, with shares of the budget; ``gpipe`` takes the time and the memory of ``terapipe``."""
_AUTO_OF_ONE = {"seq1f1b": 1.0}  # with one micro-batch all schedules are the same
_AUTO_SPLIT = {"seq1f1b-zb": 0.5, "zb-h1": 0.2}
"""On top, where costs say what W takes."""
_AUTO_CHUNKED = {"seq1f1b-interleaved": 0.6, "interleaved": 0.4, "zbv": 0.6, "chimera-seq": 0.6, "chimera": 0.4}
"""Instead, where stages hold several chunks: those of them that have so many chunks and parts."""

BUDGET = 10_000_000  # computations replayed; some 3 s on one core, more for very long sequences
_ALL_PLANS = 4096  # where there are no more, and the budget allows, all of them are judged
_MANY_GRANULES = 512  # above, the slice program's own plan is not looked at more closely
_EQUAL_TIMES = 32  # slices; a program for slices of equal time takes as many steps
_PROGRAM_PLANS = 16  # of each search
_ROUNDING = 1e-9  # relative: prediction and bound are summed in different orders


def plan_slices(
    costs: Any, sequence_length: int, num_stages: int, num_micro_batches: int = 1, granularity_tokens: int = 64,
    schedule: str = "terapipe", max_slices: int | None = None, memory: Any = None,
    memory_limit_bytes: float | None = None, *, progress: Progress | None = None, budget: int = BUDGET,
    chunks_per_stage: int = 1, placement: Mapping[tuple[int, int], int] | None = None,
    schedule_options: Mapping[str, object] | None = None,
) -> PlanResult:  # fmt: skip
    """The plan with the least predicted time under ``schedule`` (or ``"auto"``) that fits in memory.

    Args:
        costs: ``forward_s(tokens, prefix)``, ``backward_s(tokens, prefix)`` and, where links cost something,
            ``send_s(tokens)``; one object for all parts or a list with one per part. Each pair is asked at most once.
        granularity_tokens: plans cut at multiples of it; the last slice takes the rest (see `granularity_for`).
        memory: a `MemoryModel`, or what has its methods; both are asked by part.
        chunks_per_stage: as for ``schedule.build``; "auto" tries the schedules that have so many chunks, and as many
            parts as costs are given (see `ranked_schedules`).
        schedule_options: what ``schedule.build`` takes besides counts, for one schedule by its name.
        placement: where the parts stand already: "auto" tries the schedules that run on it.
        budget: work of the search, in computations replayed; the same budget gives the same plan everywhere.

    Raises:
        MemoryLimitError: no plan fits ``memory_limit_bytes``; says the least need and what would lower it.
        PlannerError: an argument that cannot be, or costs that are negative or not finite.
    """
    if schedule != "auto" and schedule not in SCHEDULE_NAMES:
        known = ", ".join((*SCHEDULE_NAMES, "auto"))
        raise PlannerError(f"schedule = {show_value(schedule)}: the planner knows {known}; give one of them")
    num_stages = check_count("num_stages", num_stages)
    _check_options(schedule, num_stages, chunks_per_stage, schedule_options or {})
    problem = Problem.checked(
        costs, sequence_length, num_parts_of(schedule, num_stages, chunks_per_stage, costs), num_micro_batches,
        granularity_tokens, max_slices, memory, memory_limit_bytes, progress,
    )  # fmt: skip
    problem.num_stages, problem.chunks_per_stage, problem.placement = num_stages, chunks_per_stage, placement
    if schedule != "auto":
        if schedule in SPLIT_SCHEDULES and not problem.knows_weights:
            raise PlannerError(
                f"schedule = {show_value(schedule)} splits backwards, but the costs have no weight_s(tokens, prefix): "
                "add it, or plan for 'seq1f1b'"
            )
        return problem.best(schedule, budget, schedule_options or {})
    found, refused = problem.best_of_each(budget)
    if not found:
        raise min(refused.values(), key=lambda error: error.need_bytes)
    return choose(found)


def _check_options(schedule: str, num_stages: int, chunks_per_stage: int, options: Mapping[str, object]) -> None:
    if options and schedule == "auto":
        raise PlannerError(
            f"schedule_options = {show_value(dict(options))}: they go with the name of one schedule, not with 'auto'; "
            "leave them out"
        )
    try:
        check_options(schedule, num_stages, options, chunks_per_stage)
    except ScheduleError as error:
        raise PlannerError(error.reason) from None


def granularity_for(granularity_tokens: int, tensor_parallel: int = 1, sequence_parallel: bool = False) -> int:
    """The least multiple of ``granularity_tokens`` that every slice can be cut by on the tensor-parallel ranks.

    Megatron's sequence parallelism spreads the tokens of a slice over these ranks, so it has to divide by them.
    """
    granularity_tokens = check_count("granularity_tokens", granularity_tokens)
    tensor_parallel = check_count("tensor_parallel", tensor_parallel)
    return math.lcm(granularity_tokens, tensor_parallel) if sequence_parallel else granularity_tokens


@dataclass
class Problem:
    """What the schedules over one cut of the layers share: the costs, the slice program's plans, the bound."""

    parts: tuple[AskedCosts, ...]
    sequence_length: int
    num_micro_batches: int
    granularity_tokens: int
    max_slices: int
    memory: Any
    memory_limit_bytes: float | None
    progress: Progress | None
    num_stages: int = 1
    chunks_per_stage: int = 1
    placement: Mapping[tuple[int, int], int] | None = None
    found: list[Lengths] = dataclasses.field(default_factory=list)  # what other schedules chose, over any cut
    has_starts: bool = False  # these are starts enough: programs over another cut of the layers would add little

    @classmethod
    def checked(
        cls, costs: Any, sequence_length: int, num_parts: int, num_micro_batches: int, granularity_tokens: int,
        max_slices: int | None, memory: Any, memory_limit_bytes: float | None, progress: Progress | None,
    ) -> Problem:  # fmt: skip
        sequence_length = check_count("sequence_length", sequence_length)
        granularity_tokens = check_count("granularity_tokens", granularity_tokens)
        if granularity_tokens > sequence_length:
            raise PlannerError(
                f"granularity_tokens = {granularity_tokens} is larger than the sequence of {sequence_length} tokens: "
                f"give at most {sequence_length}"
            )
        limit = memory_limit_bytes
        if limit is not None and memory is None:
            raise PlannerError("memory_limit_bytes needs memory: give a MemoryModel, or leave the limit out")
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise PlannerError(f"memory_limit_bytes = {show_value(limit)}: give a number of bytes > 0")
        granules = -(-sequence_length // granularity_tokens)
        most = granules if max_slices is None else min(check_count("max_slices", max_slices), granules)
        parts = ask_parts(costs, num_parts, sequence_length, granularity_tokens)
        m = check_count("num_micro_batches", num_micro_batches)
        return cls(parts, sequence_length, m, granularity_tokens, most, memory, limit, progress)

    def tried(self) -> dict[str, float]:
        """What "auto" tries, with shares of the budget."""
        if self.chunks_per_stage == 1:
            tried = _AUTO if self.num_micro_batches > 1 else _AUTO_OF_ONE
            return tried | _AUTO_SPLIT if self.knows_weights else tried
        names = ranked_schedules(
            self.num_stages, self.chunks_per_stage, len(self.parts), self.knows_weights, self.placement
        )
        return {name: _AUTO_CHUNKED[name] for name in names}

    @property
    def knows_weights(self) -> bool:
        """Whether all costs say what W takes of a backward."""
        return all(hasattr(part, "weight_s") for part in self.parts)

    @property
    def num_granules(self) -> int:
        return -(-self.sequence_length // self.granularity_tokens)

    def best_of_each(self, budget: int) -> tuple[list[PlanResult], dict[str, MemoryLimitError]]:
        """For each schedule that "auto" tries the best plan, or why none fits."""
        found: list[PlanResult] = []
        refused: dict[str, MemoryLimitError] = {}
        for name, share in self.tried().items():
            try:
                found.append(self.best(name, round(share * budget)))
            except MemoryLimitError as error:
                refused[name] = error
        return found, refused

    def best(self, schedule: str, budget: int, options: Mapping[str, object] = MappingProxyType({})) -> PlanResult:
        """The best plan for one schedule."""
        judge = Judge(
            schedule, self.parts, self.num_micro_batches, sequence_length=self.sequence_length,
            granularity_tokens=self.granularity_tokens, memory=self.memory,
            memory_limit_bytes=self.memory_limit_bytes, budget=budget, progress=self.progress,
            num_stages=self.num_stages, chunks_per_stage=self.chunks_per_stage, schedule_options=options,
        )  # fmt: skip
        if judge.is_flow_shop:
            solution, lengths = self.solution, self._lengths(self.solution.plan)
            if (solution.optimal or not self._can_judge_all(judge)) and judge.fits(lengths):
                # links slower than the computation before them are not in the program's formula for equal stages
                proven = solution.optimal and judge.seconds(lengths) <= solution.lower_bound_s * (1 + _ROUNDING)
                if proven or self.num_granules > _MANY_GRANULES:
                    return self._result(judge, lengths, proven, solution.lower_bound_s)
        if self._can_judge_all(judge):
            lengths = self._best_of_all(judge)
            return self._result(judge, lengths, True, judge.seconds(lengths))
        if judge.has_chunks:
            works_s = least_works_s(self.parts, self.num_micro_batches, self.max_slices)
            bound_s = most_work_s(works_s, judge.placement, self.num_stages)
        elif judge.splits_backward:
            bound_s = busy_bound_s(self.parts, self.num_micro_batches, self.max_slices)
        else:
            bound_s = max(self.searched[1], self.solution.lower_bound_s if judge.is_flow_shop else 0.0)
        return self._result(judge, climb(judge, self.sure_starts(), self.more_starts()), False, bound_s)

    # --- all plans

    def _can_judge_all(self, judge: Judge) -> bool:
        if self.num_granules > _ALL_PLANS.bit_length():
            return False
        counts = [math.comb(self.num_granules - 1, count - 1) for count in range(1, self.max_slices + 1)]
        return sum(counts) <= _ALL_PLANS and judge.cost_of(dict(enumerate(counts, start=1))) <= judge.budget

    def _best_of_all(self, judge: Judge) -> Lengths:
        ranked = list(candidates.compositions(self.num_granules, self.max_slices))
        best = judge.fastest(ranked, judge.seconds)
        if best is None:
            raise memory_limit_error(judge, ranked)
        return best

    # --- what the schedules share

    def sure_starts(self) -> Iterator[Lengths]:
        """Judged whatever the budget, so that the answer is never worse than any of them: what other schedules of this
        call chose, equal slices, as many as theirs where those are starts enough, and else the slice program's plan."""
        counts = {len(lengths) for lengths in self.found} if self.has_starts else self._equal_counts
        for count in sorted(counts):
            yield candidates.uniform(self.num_granules, count)
        if not self.has_starts:
            yield self._lengths(self.solution.plan)
        yield from list(self.found)

    def more_starts(self) -> Iterator[Lengths]:
        """Slices of equal time on the slowest part, and plans of the slice program for other weights of the bubble; or
        the equal slices that are not sure."""
        if self.has_starts:
            yield from (candidates.uniform(self.num_granules, count) for count in self._equal_counts)
            return
        table = self.slowest.table
        assert table is not None
        if self.num_granules <= _MANY_GRANULES:
            for count in candidates.slice_counts(min(self.max_slices, _EQUAL_TIMES)):
                yield self._lengths(equal_time(table, count))
            found = program_plans(table, len(self.parts), self.num_micro_batches, self.max_slices)
            yield from (self._lengths(one.plan) for one in found[:_PROGRAM_PLANS])
        for search in self.searched[0]:
            fitting = [found for found in search.found.values() if found.num_slices <= self.max_slices]
            yield from (found.lengths for found in sorted(fitting, key=search.objective)[:_PROGRAM_PLANS])

    @functools.cached_property
    def slowest(self) -> AskedCosts:
        """The part that takes longest for a whole sequence, of those that have tables."""
        tabulated = [part for part in self.parts if part.table is not None]
        return max(tabulated, key=lambda part: whole_s(part, self.sequence_length))

    @functools.cached_property
    def solution(self) -> SliceSolution:
        """The slice program's answer, for all forwards before all backwards, as if each part had a stage."""
        most = None if self.max_slices == self.num_granules else self.max_slices
        table = self.parts[0].table
        if table is not None and all(part is self.parts[0] for part in self.parts):
            return solve_equal(table, len(self.parts), self.num_micro_batches, most)
        return solve(
            list(self.parts), self.sequence_length, len(self.parts), self.num_micro_batches, self.granularity_tokens,
            most,
        )  # fmt: skip

    @functools.cached_property
    def searched(self) -> tuple[list[Search], float]:
        """The searches for the bound that holds for every schedule, and the bound."""
        most = None if self.max_slices == self.num_granules else self.max_slices
        return searches(self.parts, self.num_micro_batches, most)

    def _lengths(self, plan: SlicePlan) -> Lengths:
        return candidates.to_lengths(plan, self.granularity_tokens)

    def _result(self, judge: Judge, lengths: Lengths, optimal: bool, lower_bound_s: float) -> PlanResult:
        predicted_s = judge.seconds(lengths)
        self.found.append(lengths)
        equal = self._best_equal(judge)
        busy_s, all_s = judge.work_s(lengths), self.num_stages * predicted_s
        lower_bound_s = min(lower_bound_s, predicted_s)  # both are sums of many floats
        return PlanResult(
            judge.plan(lengths), judge.schedule, predicted_s, optimal or lower_bound_s >= predicted_s * (1 - _ROUNDING),
            lower_bound_s, self.num_stages, self.num_micro_batches, judge.seconds((self.num_granules,)),
            judge.plan(equal), judge.seconds(equal), max(1.0 - busy_s / all_s, 0.0) if all_s > 0 else 0.0,
            judge.peak_bytes(lengths), self.memory_limit_bytes, judge.num_tried, judge.placed_chunks,
        )  # fmt: skip

    def _best_equal(self, judge: Judge) -> Lengths:
        """Among those that fit, and, where the budget holds for equal ones too, have been judged; where none does,
        unsliced."""
        plans = [candidates.uniform(self.num_granules, count) for count in self._equal_counts]
        judged = [lengths for lengths in plans if not self.has_starts or judge.has_score(lengths)]
        return judge.fastest(judged, judge.estimate) or plans[0]

    @property
    def _equal_counts(self) -> list[int]:
        return candidates.slice_counts(self.max_slices)
