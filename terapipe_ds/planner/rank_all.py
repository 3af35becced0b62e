"""All schedules side by side, each over the cut of the layers that it needs.

    plain           K parts, one per stage        gpipe, 1f1b, terapipe, seq1f1b, zb-h1, seq1f1b-zb
    loop, V         v K parts, v per stage        interleaved, seq1f1b-interleaved; zbv where v is 2
    bidirectional   K parts, two places for each  chimera, chimera-seq; K even
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.candidates import Lengths
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.given import best_of_each
from terapipe_ds.planner.judge import Progress
from terapipe_ds.planner.ranked import num_parts_of, ranked_schedules
from terapipe_ds.planner.result import PlanResult, choose, memory_and_preference
from terapipe_ds.planner.search import BUDGET, Problem
from terapipe_ds.planner.tabulate import check_count

SecondsOf = Callable[[int], float | None]
"""By the number of parts: seconds, None where they are not known."""

PartsOf = Callable[[int], Any]
"""By the number of parts: their costs, or their memory; None where the layers cannot be cut in so many."""

_OTHER_LAYOUTS = 0.2  # of the budget that the schedules of one layout would have on their own
_MOST_CHUNKS = 2  # unless more are asked for


@dataclass(frozen=True)
class Refusal:
    """A schedule none of whose plans fits in memory; the error says what the least of them needs."""

    schedule: str
    chunks_per_stage: int
    error: MemoryLimitError

    @property
    def need_bytes(self) -> int:
        """On the stage that needs most."""
        return self.error.need_bytes


@dataclass(frozen=True)
class Ranking:
    """Every schedule that can be had: ``results`` with the best first (see `choose`), then by time; ``refused`` by the
    memory limit, the least need first."""

    results: tuple[PlanResult, ...]
    refused: tuple[Refusal, ...] = ()

    @classmethod
    def of(cls, found: list[PlanResult], refused: list[Refusal]) -> Ranking:
        """In order."""
        results = sorted(found, key=lambda result: (result.total_s, *memory_and_preference(result)))
        if results:
            best = choose(results)
            results = [best, *(result for result in results if result is not best)]
        return cls(tuple(results), tuple(sorted(refused, key=lambda one: one.need_bytes)))

    @property
    def best(self) -> PlanResult:
        """The best result. Raises MemoryLimitError where the limit refuses every schedule."""
        if not self.results:
            raise self.refused[0].error
        return self.results[0]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One per schedule, for JSON, in order; what does not fit has ``need_bytes`` and neither plan nor times."""
        fitting = [
            {
                "schedule": one.schedule, "chunks_per_stage": one.chunks_per_stage, "plan": list(one.plan.lengths),
                "predicted_s": one.predicted_s, "extra_s": one.extra_s, "bubble_fraction": one.bubble_fraction,
                "peak_bytes": one.peak_bytes and list(one.peak_bytes),
            }
            for one in self.results
        ]  # fmt: skip
        return fitting + [
            {"schedule": one.schedule, "chunks_per_stage": one.chunks_per_stage, "need_bytes": one.need_bytes}
            for one in self.refused
        ]


def rank_schedules(
    costs_of: PartsOf, sequence_length: int, num_stages: int, num_micro_batches: int = 1, granularity_tokens: int = 64,
    *, memory_of: PartsOf | None = None, memory_limit_bytes: float | None = None, max_slices: int | None = None,
    chunks_per_stage: int | None = None, budget: int = BUDGET, progress: Progress | None = None,
    both_ways_s_of: SecondsOf | None = None,
) -> Ranking:  # fmt: skip
    """The best plan of every schedule on ``num_stages`` stages, compared.

    Args:
        costs_of: costs by the number of parts, as `plan_slices` takes them; asked for K, and for 2 K parts.
        memory_of: the same of memory.
        chunks_per_stage: only schedules whose stages hold so many parts; None: 1 and 2.
        budget: as of `plan_slices` with "auto"; other layouts than the plain one get a fifth of it each, on top.
            Whatever it is, each of their schedules is judged with the plans that were chosen before, and with as many
            equal slices; other numbers of slices only while its budget lasts, for each takes an order of its own.
        both_ways_s_of: what schedules whose parts stand at two places take besides their makespan (``extra_s``, see
            `planner.both_ways`); None: not known.

    Raises:
        PlannerError: an argument that cannot be, or a number of chunks that no schedule can have with these layers.
    """
    found: list[PlanResult] = []
    refused: list[Refusal] = []
    chosen: list[Lengths] = []  # what is good under one schedule is a start for the others
    for chunks, num_parts, costs, memory in _cuts(costs_of, memory_of, num_stages, chunks_per_stage):
        problem = Problem.checked(
            costs, sequence_length, num_parts_of("auto", num_stages, chunks, costs), num_micro_batches,
            granularity_tokens, max_slices, memory, memory_limit_bytes, progress,
        )  # fmt: skip
        assert len(problem.parts) == num_parts
        problem.num_stages, problem.chunks_per_stage, problem.found = num_stages, chunks, chosen
        problem.has_starts = bool(chosen)
        mine, errors = problem.best_of_each(budget if chunks == 1 else round(_OTHER_LAYOUTS * budget))
        found += _with_extra(mine, chunks, num_parts, both_ways_s_of)
        refused += [Refusal(name, chunks, error) for name, error in errors.items()]
    return _complete(found, refused, num_micro_batches)


def rank_given(
    costs_of: PartsOf, plan: SlicePlan, num_stages: int, num_micro_batches: int = 1, *,
    memory_of: PartsOf | None = None, memory_limit_bytes: float | None = None, chunks_per_stage: int | None = None,
    both_ways_s_of: SecondsOf | None = None,
) -> Ranking:  # fmt: skip
    """`rank_schedules` for slices that are given."""
    found: list[PlanResult] = []
    refused: list[Refusal] = []
    for chunks, num_parts, costs, memory in _cuts(costs_of, memory_of, num_stages, chunks_per_stage):
        mine, errors = best_of_each(
            costs, plan, num_stages, num_micro_batches, memory=memory, memory_limit_bytes=memory_limit_bytes,
            chunks_per_stage=chunks,
        )  # fmt: skip
        found += _with_extra(mine, chunks, num_parts, both_ways_s_of)
        refused += [Refusal(name, chunks, error) for name, error in errors.items()]
    return Ranking.of(found, refused)


def _with_extra(
    results: list[PlanResult], chunks: int, num_parts: int, both_ways_s_of: SecondsOf | None
) -> list[PlanResult]:
    """With what those take besides their makespan whose parts stand at two places."""
    if not results or chunks * results[0].num_stages == num_parts:
        return results
    extra_s = None if both_ways_s_of is None else both_ways_s_of(num_parts)
    return [dataclasses.replace(result, extra_s=extra_s) for result in results]


def _cuts(
    costs_of: PartsOf, memory_of: PartsOf | None, num_stages: int, chunks_per_stage: int | None
) -> Iterator[tuple[int, int, list[Any], Any]]:
    """(chunks per stage, parts, costs by part, memory) of every layout that some schedule can have."""
    num_stages = check_count("num_stages", num_stages)
    if chunks_per_stage is None:
        counts = range(1, _MOST_CHUNKS + 1)
    else:
        counts = range(check_count("chunks_per_stage", chunks_per_stage), chunks_per_stage + 1)
    shapes = [(chunks, parts) for chunks in counts for parts in dict.fromkeys((chunks * num_stages, num_stages))]
    any_cut = False
    for chunks, num_parts in shapes:
        if not ranked_schedules(num_stages, chunks, num_parts):
            continue
        costs = costs_of(num_parts)
        memory = None if memory_of is None else memory_of(num_parts)
        if costs is None or (memory_of is not None and memory is None):
            continue
        any_cut = True
        yield chunks, num_parts, list(costs) if isinstance(costs, list | tuple) else [costs] * num_parts, memory
    if not any_cut:
        raise PlannerError(
            f"chunks_per_stage = {chunks_per_stage}: no schedule can have the layers so on {num_stages} stages; give "
            "fewer chunks"
        )


def _complete(found: list[PlanResult], refused: list[Refusal], num_micro_batches: int) -> Ranking:
    """With the schedules that have the time and the memory of one that was searched."""
    same: dict[str, tuple[str, ...]] = {"terapipe": ("gpipe",)}
    if num_micro_batches == 1:
        same = {"seq1f1b": ("1f1b", "terapipe", "gpipe")}
    there = {result.schedule for result in found} | {refusal.schedule for refusal in refused}
    for result in list(found):
        names = set(same.get(result.schedule, ())) - there
        found += [dataclasses.replace(result, schedule=name) for name in sorted(names)]
    for refusal in list(refused):
        names = set(same.get(refusal.schedule, ())) - there
        refused += [dataclasses.replace(refusal, schedule=name) for name in sorted(names)]
    return Ranking.of(found, refused)
