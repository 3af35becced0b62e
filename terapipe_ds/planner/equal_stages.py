"""The best plan for equal stages under fill-drain, and the plans around it, from one cost table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.branch import Found, Objective, Search, greedy_plan, weigh
from terapipe_ds.planner.programs import Band, least_tails, trace
from terapipe_ds.planner.tabulate import CostTable, PlannerError, check_count

NUM_THRESHOLDS = 16


@dataclasses.dataclass(frozen=True)
class SliceSolution:
    """A plan, what it takes and how good it is proven to be.

    ``lower_bound_s <= the least time of any plan <= predicted_s``, and ``optimal`` where the two are equal (to
    rounding). ``sum_s`` is sum(f + b) over the slices of one micro-batch; ``max_forward_s`` and ``max_backward_s`` are
    the largest f' and b' (with the transfer, where there are links). With unequal stages these three are of the
    slowest stage. ``num_programs`` counts the dynamic programs.
    """

    plan: SlicePlan
    predicted_s: float
    optimal: bool
    lower_bound_s: float
    sum_s: float
    max_forward_s: float
    max_backward_s: float
    num_programs: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that no other one met beats in both its sum and its maxima; the fields are as in `SliceSolution`."""

    plan: SlicePlan
    sum_s: float
    max_forward_s: float
    max_backward_s: float


def solve_equal(
    table: CostTable,
    num_stages: int,
    num_micro_batches: int = 1,
    max_slices: int | None = None,
    max_work: float | None = None,
) -> SliceSolution:
    """The plan with the least ``m * sum(f + b) + (K - 1) * (max f' + max b')`` of all cuts of the table.

    See `slice_dp.solve` for the formula, its source and the arguments.
    """
    objective, max_slices = _checked(num_stages, num_micro_batches, max_slices)
    search = search_plans(band_of(table), objective, max_slices, max_work)
    best = search.best
    return SliceSolution(
        plan=table.plan(best.lengths),
        predicted_s=search.best_s,
        optimal=search.optimal,
        lower_bound_s=search.lower_bound_s,
        sum_s=best.sum_s,
        max_forward_s=best.max_forward_s,
        max_backward_s=best.max_backward_s,
        num_programs=search.num_programs,
    )


def search_plans(
    band: Band, objective: Objective, max_slices: int | None = None, max_work: float | None = None
) -> Search:
    """A finished search.

    A program that counts slices takes as long as one per slice allowed, so the first search does not count: where its
    optimum has few enough slices, that is the answer.
    """
    free = Search(band, objective, max_work=max_work)
    free.run()
    if max_slices is None or (free.optimal and free.best.num_slices <= max_slices):
        return free
    counted = Search(band, objective, max_slices, max_work)
    for lengths in free.found:
        counted.offer(lengths)
    counted.run()
    counted.num_programs += free.num_programs
    counted.found = {**free.found, **counted.found}
    counted.lower_bound_s = max(counted.lower_bound_s, min(free.lower_bound_s, counted.best_s))
    return counted


def equal_time(table: CostTable, num_slices: int) -> SlicePlan:
    """``num_slices`` slices whose times are as equal as the cuts allow: the largest f + b is least, then the sum.

    Raises:
        PlannerError: there are fewer granules than slices.
    """
    num_slices = check_count("num_slices", num_slices)
    if num_slices > table.num_granules:
        raise PlannerError(
            f"{num_slices} slices cut at multiples of {table.granularity_tokens} tokens do not fit in a sequence of "
            f"{table.sequence_length} tokens: give at most {table.num_granules}, or a smaller granularity"
        )
    both = table.total_s
    every = Band(both, both, both)
    for limit in (_reachable_time(every, num_slices), np.inf):
        band = every.keep((both <= limit) & np.isfinite(both))
        least = least_tails(band, num_slices=num_slices, exactly=True, largest=True)[0, -1, 0]
        if np.isfinite(least):
            break
    band = every.keep(both <= least)
    limits = np.full((1, 2), least)
    sums = least_tails(band, limits, num_slices, exactly=True)[0]
    return table.plan(trace(band, sums, limits[0]))


def candidates(
    table: CostTable, num_stages: int, num_micro_batches: int = 1, max_slices: int | None = None
) -> tuple[Candidate, ...]:
    """Plans for a closer look, least fill-drain time first: the optimum, what the search met around it, and the least
    sums under a range of limits on f' + b' (for schedules that pay for the largest slice more or less often)."""
    objective, max_slices = _checked(num_stages, num_micro_batches, max_slices)
    band = band_of(table)
    found = list(search_plans(band, objective, max_slices).found.values()) + threshold_plans(band)
    fitting = (x for x in found if max_slices is None or x.num_slices <= max_slices)
    best = sorted(not_beaten(fitting), key=lambda x: (objective(x), x.num_slices, x.lengths))
    return tuple(Candidate(table.plan(x.lengths), x.sum_s, x.max_forward_s, x.max_backward_s) for x in best)


def threshold_plans(band: Band, count: int = NUM_THRESHOLDS) -> list[Found]:
    """The plans of least sum under ``count`` limits on f' + b', from the least possible one to no limit."""
    both = band.forward + band.backward
    least = least_tails(Band(both, both, both), largest=True)[0, 0, 0]
    free = weigh(band, trace(band, least_tails(band)[0], np.full(2, np.inf)))
    most = free.max_forward_s + free.max_backward_s
    if not 0 < least < most:
        return [free]
    limits = np.repeat(np.geomspace(least * (1 + 1e-12), most, count)[:, None], 2, axis=1)
    limited = Band(band.total, both, both)
    sums = least_tails(limited, limits)
    return [weigh(band, trace(limited, x, limit)) for x, limit in zip(sums, limits, strict=True)] + [free]


def not_beaten(found: Iterable[Found]) -> list[Found]:
    """The plans that no other one beats in both the sum and F + B; of equals, the one with the fewest slices."""
    kept: list[Found] = []
    for x in sorted(found, key=lambda x: (x.sum_s, x.max_forward_s + x.max_backward_s, x.num_slices, x.lengths)):
        if not kept or x.max_forward_s + x.max_backward_s < kept[-1].max_forward_s + kept[-1].max_backward_s:
            kept.append(x)
    return kept


def band_of(table: CostTable) -> Band:
    """All slices of a table, with the transfer in what the maxima are taken of."""
    return Band(table.total_s, table.forward_hop_s, table.backward_hop_s)


def _checked(num_stages: int, num_micro_batches: int, max_slices: int | None) -> tuple[Objective, int | None]:
    num_stages = check_count("num_stages", num_stages)
    num_micro_batches = check_count("num_micro_batches", num_micro_batches)
    if max_slices is not None:
        max_slices = check_count("max_slices", max_slices)
    return Objective(num_micro_batches, num_stages - 1), max_slices


def _reachable_time(band: Band, num_slices: int) -> float:
    """A time that ``num_slices`` slices probably need not pass, by halving; only narrows the program that follows."""
    both = band.total
    low, high = 0.0, both[np.isfinite(both)].max().item()
    for _ in range(30):
        middle = low + (high - low) / 2
        lengths = greedy_plan(both, middle)
        if len(lengths) <= num_slices and weigh(band, lengths).max_forward_s <= middle:
            high = middle
        else:
            low = middle
    return float(high)
