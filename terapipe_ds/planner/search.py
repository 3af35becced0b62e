"""The final choice: candidate plans, judged by a replay of the very schedule that will run them.

``terapipe`` on equal stages is the slice program itself (``slice_dp``). Every other schedule, and unequal stages, start
from equal slices, slices of equal time and the program's plans for several effective numbers of stages, and climb from
the best of them by moving granules, merging and splitting; where there are few plans, all of them are judged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan, show_value
from terapipe_ds.planner import candidates
from terapipe_ds.planner.asked import AskedCosts, ask_parts
from terapipe_ds.planner.bounds import alike_bound_s, stage_bound_s
from terapipe_ds.planner.candidates import Lengths
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.judge import Judge
from terapipe_ds.planner.limits import memory_limit_error
from terapipe_ds.planner.slice_dp import SliceSolution, solve
from terapipe_ds.schedule import SCHEDULE_NAMES

PREFERENCE = ("seq1f1b", "1f1b", "terapipe", "gpipe")
"""Which schedule wins where time and memory are the same."""

_TIE = 1e-3  # a difference in time below the noise of any measurement
_BUDGET = 6_000_000  # computations replayed; about 3 s on one core of 2025
_ALL_PLANS = 4096  # where there are no more, and the budget allows, all of them are judged
_MANY_GRANULES = 512  # a slice program per effective number of stages would take long
_CLIMBS = 3  # starts, one after the other, each with what the ones before left of the budget

Progress = Callable[[str, int, int], None]
"""Called now and then with (what, done, of how many), for a progress line."""


@dataclass(frozen=True)
class PlanResult:
    """A plan and what it is worth; seconds are those of one batch without reduce and optimizer step."""

    plan: SlicePlan
    schedule: str
    predicted_s: float
    optimal: bool  # proven: no plan with this schedule, granularity and limits takes less
    lower_bound_s: float  # proven: no plan takes less than this
    num_stages: int
    num_micro_batches: int
    unsliced_s: float
    equal_plan: SlicePlan  # the best of the equal plans that fit
    equal_s: float
    bubble_fraction: float
    peak_bytes: tuple[int, ...] | None  # per stage
    memory_limit_bytes: float | None
    num_candidates: int

    @property
    def gap(self) -> float:
        """How far the prediction is above the proven bound: 0.02 for 2 %."""
        return max(self.predicted_s / self.lower_bound_s - 1.0, 0.0) if self.lower_bound_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and lists, for JSON."""
        plans = {"plan": list(self.plan.lengths), "equal_plan": list(self.equal_plan.lengths)}
        return dataclasses.asdict(self) | plans | {"gap": self.gap}


def plan_slices(
    costs: Any, sequence_length: int, num_stages: int, num_micro_batches: int = 1, granularity_tokens: int = 64,
    schedule: str = "terapipe", max_slices: int | None = None, memory: Any = None,
    memory_limit_bytes: float | None = None, *, progress: Progress | None = None, budget: int = _BUDGET,
) -> PlanResult:  # fmt: skip
    """The plan with the least predicted time under ``schedule`` (or ``"auto"``) that fits in memory.

    Args:
        costs: ``forward_s(tokens, prefix)``, ``backward_s(tokens, prefix)`` and, where links cost something,
            ``send_s(tokens)``; one object for all parts or a list with one per part. Each pair is asked at most once.
        granularity_tokens: plans cut at multiples of it; the last slice takes the rest (see `granularity_for`).
        memory: a `MemoryModel`, or what has its methods.
        budget: work of the search, in computations replayed; the same budget gives the same plan everywhere.

    Raises:
        MemoryLimitError: no plan fits ``memory_limit_bytes``; says the least need and what would lower it.
        PlannerError: an argument that cannot be, or costs that are negative or not finite.
    """
    problem = _Problem.checked(
        costs, sequence_length, num_stages, num_micro_batches, granularity_tokens, max_slices, memory,
        memory_limit_bytes, progress,
    )  # fmt: skip
    if schedule != "auto":
        if schedule not in SCHEDULE_NAMES:
            known = ", ".join((*SCHEDULE_NAMES, "auto"))
            raise PlannerError(f"schedule = {show_value(schedule)}: the planner knows {known}")
        return problem.best(schedule, budget)
    found: list[PlanResult] = []
    refused: list[MemoryLimitError] = []
    for name in PREFERENCE:
        try:
            found.append(problem.best(name, budget // len(PREFERENCE)))
        except MemoryLimitError as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.need_bytes)
    return choose(found)


def choose(results: Iterable[PlanResult]) -> PlanResult:
    """The result with the least time; within 0.1 % of it the one with the least memory, then the preferred schedule."""
    found = list(results)
    if not found:
        raise PlannerError("no results to choose from: give at least one")
    least_s = min(result.predicted_s for result in found)
    near = [result for result in found if result.predicted_s <= least_s * (1 + _TIE)]

    def rank(result: PlanResult) -> tuple[int, int]:
        known = result.schedule in PREFERENCE
        place = PREFERENCE.index(result.schedule) if known else len(PREFERENCE)
        return max(result.peak_bytes or (0,)), place

    return min(near, key=rank)


def granularity_for(granularity_tokens: int, tensor_parallel: int = 1, sequence_parallel: bool = False) -> int:
    """The least multiple of ``granularity_tokens`` that every slice can be cut by on the tensor-parallel ranks.

    Megatron's sequence parallelism spreads the tokens of a slice over these ranks, so it has to divide by them.
    """
    granularity_tokens = _count("granularity_tokens", granularity_tokens)
    tensor_parallel = _count("tensor_parallel", tensor_parallel)
    return math.lcm(granularity_tokens, tensor_parallel) if sequence_parallel else granularity_tokens


def _count(what: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise PlannerError(f"{what} = {show_value(value)}: give an integer >= 1")
    return number


@dataclass
class _Problem:
    """What the schedules of one call share: the costs, the slice program's plans, the bound."""

    parts: tuple[AskedCosts, ...]
    sequence_length: int
    num_micro_batches: int
    granularity_tokens: int
    max_slices: int
    memory: Any
    memory_limit_bytes: float | None
    progress: Progress | None

    @classmethod
    def checked(
        cls, costs: Any, sequence_length: int, num_stages: int, num_micro_batches: int, granularity_tokens: int,
        max_slices: int | None, memory: Any, memory_limit_bytes: float | None, progress: Progress | None,
    ) -> _Problem:  # fmt: skip
        sequence_length = _count("sequence_length", sequence_length)
        granularity_tokens = _count("granularity_tokens", granularity_tokens)
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
        most = granules if max_slices is None else min(_count("max_slices", max_slices), granules)
        parts = ask_parts(costs, _count("num_stages", num_stages), sequence_length, granularity_tokens)
        m = _count("num_micro_batches", num_micro_batches)
        return cls(parts, sequence_length, m, granularity_tokens, most, memory, limit, progress)

    def __post_init__(self) -> None:
        self._solutions: dict[tuple[int, int], SliceSolution] = {}
        self._bound_s: float | None = None

    @property
    def num_stages(self) -> int:
        return len(self.parts)

    @property
    def num_granules(self) -> int:
        return self.parts[0].num_granules

    def best(self, schedule: str, budget: int) -> PlanResult:
        """The best plan for one schedule."""
        judge = Judge(
            schedule, self.parts, self.num_micro_batches, sequence_length=self.sequence_length,
            granularity_tokens=self.granularity_tokens, memory=self.memory,
            memory_limit_bytes=self.memory_limit_bytes, budget=budget,
        )  # fmt: skip
        if judge.may_have_formula:
            solution = self._solve(self.parts[0], self.num_stages)
            lengths = self._lengths(solution)
            if judge.has_formula(lengths) and judge.fits(lengths):
                return self._result(judge, lengths, solution.optimal, solution.lower_bound_s)
        if self._can_judge_all(judge):
            lengths = self._best_of_all(judge)
            return self._result(judge, lengths, True, judge.seconds(lengths))
        return self._result(judge, _Climb(self, judge).best(), False, self._bound())

    def report(self, what: str, done: int, of: int) -> None:
        """Tell the caller how far the search is."""
        if self.progress is not None:
            self.progress(what, done, of)

    # --- all plans

    def _can_judge_all(self, judge: Judge) -> bool:
        if self.num_granules > _ALL_PLANS.bit_length():
            return False
        counts = [math.comb(self.num_granules - 1, count - 1) for count in range(1, self.max_slices + 1)]
        return sum(counts) <= _ALL_PLANS and judge.cost_of(dict(enumerate(counts, start=1))) <= judge.budget

    def _best_of_all(self, judge: Judge) -> Lengths:
        ranked = candidates.compositions(self.num_granules, self.max_slices)
        order = sorted(ranked, key=lambda lengths: (judge.seconds(lengths), len(lengths)))
        fitting = next(filter(judge.fits, order), None)
        if fitting is None:
            raise memory_limit_error(judge, order)
        return fitting

    # --- what the schedules share

    def starts(self) -> Iterator[Lengths]:
        """Equal slices, slices of equal time on the slowest part, and the slice program's plans."""
        slowest = self.slowest()
        both = slowest.whole_table("forward_s") + slowest.whole_table("backward_s")
        for count in candidates.slice_counts(self.max_slices):
            yield candidates.uniform(self.num_granules, count)
            if 1 < count < self.num_granules:
                yield candidates.equal_time(both, count)
        yield from map(self._lengths, self._program_plans())

    def _program_plans(self) -> Iterator[SliceSolution]:
        """For all stages, and for effective numbers of stages: more of them ask for shorter slices."""
        if any(part is not self.parts[0] for part in self.parts):
            yield solve(
                list(self.parts), self.sequence_length, self.num_stages, self.num_micro_batches,
                self.granularity_tokens, self.max_slices,
            )  # fmt: skip
        shares = (1.0,) if self.num_granules > _MANY_GRANULES else (0.25, 0.5, 1.0, 2.0, 4.0)
        for count in sorted({1 + math.ceil(share * (self.num_stages - 1)) for share in shares}):
            yield self._solve(self.slowest(), count)

    def slowest(self) -> AskedCosts:
        """The part that takes longest for a whole sequence."""
        length = self.sequence_length
        return max(self.parts, key=lambda part: float(part.forward_s(length, 0) + part.backward_s(length, 0)))

    def _solve(self, part: AskedCosts, num_stages: int) -> SliceSolution:
        key = id(part), num_stages
        if key not in self._solutions:
            self._solutions[key] = solve(
                part, self.sequence_length, num_stages, self.num_micro_batches, self.granularity_tokens,
                self.max_slices,
            )  # fmt: skip
        return self._solutions[key]

    def _bound(self) -> float:
        if self._bound_s is None:
            alike = alike_bound_s(self.parts, lambda part, count: self._solve(part, count).lower_bound_s)
            self._bound_s = max(alike, stage_bound_s(self.parts, self.num_micro_batches))
        return self._bound_s

    def _lengths(self, solution: SliceSolution) -> Lengths:
        return candidates.to_lengths(solution.plan, self.granularity_tokens)

    def _result(self, judge: Judge, lengths: Lengths, optimal: bool, lower_bound_s: float) -> PlanResult:
        predicted_s = judge.seconds(lengths)
        equal = self._best_equal(judge)
        busy_s, whole_s = math.fsum(judge.work_s(lengths)), self.num_stages * predicted_s
        lower_bound_s = min(lower_bound_s, predicted_s)  # both are sums of many floats
        return PlanResult(
            judge.plan(lengths), judge.schedule, predicted_s, optimal or lower_bound_s >= predicted_s * (1 - 1e-12),
            lower_bound_s, self.num_stages, self.num_micro_batches, judge.seconds((self.num_granules,)),
            judge.plan(equal), judge.seconds(equal), max(1.0 - busy_s / whole_s, 0.0) if whole_s > 0 else 0.0,
            judge.peak_bytes(lengths), self.memory_limit_bytes, judge.num_tried,
        )  # fmt: skip

    def _best_equal(self, judge: Judge) -> Lengths:
        """Among those that fit; where none does, the fastest."""
        plans = [candidates.uniform(self.num_granules, count) for count in candidates.slice_counts(self.max_slices)]
        order = sorted(plans, key=lambda plan: (judge.estimate(plan), len(plan)))
        return next(filter(judge.fits, order), order[0])


class _Climb:
    """From the best of the starts to a plan that no small change makes better, within the budget."""

    def __init__(self, problem: _Problem, judge: Judge) -> None:
        self.problem, self.judge = problem, judge

    def best(self) -> Lengths:
        """Raises MemoryLimitError where nothing fits."""
        starts = sorted(dict.fromkeys(self.problem.starts()), key=self._rank)
        fitting = [lengths for lengths in starts if self.judge.fits(lengths)]
        if not fitting:
            raise memory_limit_error(self.judge, starts)
        tops = [self._climbed(lengths) for lengths in fitting[:_CLIMBS]]
        if self.judge.is_exact(tops[0]):
            return min(tops, key=self._rank)
        # what was estimated is replayed as a whole, for the best of each kind
        finalists = {min(tops, key=self._rank), fitting[0]}
        return min(finalists, key=lambda lengths: (self.judge.seconds(lengths), len(lengths), lengths))

    def _rank(self, lengths: Lengths) -> tuple[float, int, Lengths]:
        return self.judge.estimate(lengths), len(lengths), lengths

    def _climbed(self, best: Lengths) -> Lengths:
        while True:
            before = best
            step = 1 << (max(best).bit_length() - 1)
            while step:
                best = self._improved(best, functools.partial(candidates.moved, step=step))
                step //= 2
            changed = functools.partial(candidates.merged_or_split, max_slices=self.problem.max_slices)
            best = self._improved(best, changed)
            if best == before or self.judge.exhausted:
                return best

    def _improved(self, best: Lengths, neighbours: Callable[[Lengths], Iterator[Lengths]]) -> Lengths:
        """Take the first better neighbour, and again, until there is none."""
        judge, seconds = self.judge, self.judge.estimate(best)
        found = True
        while found:
            found = False
            for lengths in neighbours(best):
                if judge.exhausted:
                    return best
                if judge.estimate(lengths) < seconds * (1 - 1e-12) and judge.fits(lengths):
                    best, seconds, found = lengths, judge.estimate(lengths), True
                    break
            self.problem.report(judge.schedule, min(judge.spent, judge.budget), judge.budget)
        return best
