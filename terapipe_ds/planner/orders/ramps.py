"""Search over the slices of each micro-batch, with an order for each: more slices at both ends, fewer in the middle.

The first and the last micro-batches fill and drain the pipeline, where short slices pay most; in between each slice
only costs. So a choice is three numbers: slices of the outer micro-batches, slices of the inner ones, and the number of
outer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.orders.find import FoundOrder, budget_for, find_order, looks_for
from terapipe_ds.schedule import ScheduleError

Cut = Callable[[int], SlicePlan]
"""Returns the plan with a number of slices."""

_LOOK = 0.04  # of the budget, to try one choice
_STEPS = 16  # choices tried at most
_QUICK_NAMES = ("seq1f1b-zb", "seq1f1b")  # for a first try of a choice


@dataclass(frozen=True)
class _Ramp:
    outer: int
    inner: int
    ends: int  # outer micro-batches on each side

    def counts(self, num_micro_batches: int) -> list[int]:
        middle = range(self.ends, num_micro_batches - self.ends)
        return [self.inner if m in middle else self.outer for m in range(num_micro_batches)]

    def neighbours(self, most: int, num_micro_batches: int) -> Iterator[_Ramp]:
        """Yield ramps that differ in one number; from one plan for all, ramps over the first and last quarter."""
        ends = max(1, num_micro_batches // 4)
        base = replace(self, ends=ends) if self.outer == self.inner else self
        middles = [self.inner - 1, self.inner // 2, self.inner + 1] if num_micro_batches > 2 * ends else []
        for inner in dict.fromkeys(middles):
            if 1 <= inner <= most:
                yield replace(base, inner=inner)
        for outer in dict.fromkeys((self.outer + 1, 2 * self.outer, self.outer - 1)):
            if 1 <= outer <= most:
                yield replace(base, outer=outer)
        for near in (self.ends - 1, self.ends + 1):
            if self.outer != self.inner and near >= 1 and 2 * near < num_micro_batches:
                yield replace(self, ends=near)


def find_order_and_slices(
    costs: Any,
    cut: Cut,
    counts: Sequence[int],
    num_stages: int,
    num_micro_batches: int,
    *,
    most_slices: int,
    evaluations: int | None = None,
    budget: float = 1.0,
    **limits: Any,
) -> FoundOrder:
    """Search plans of each of `counts` slices and ramps near the best of them, and return the fastest order.

    Args:
        cut: returns plans of 1 to `most_slices` slices.
        evaluations: for the order of the chosen plans; None: `budget` as a share of some five seconds.
        limits: the other arguments of `find_order`.

    Raises:
        ScheduleError: no order that the search meets keeps the limit.
    """
    tried: dict[tuple[int, ...], FoundOrder | None] = {}
    kinds = 3 * int(limits.get("chunks_per_stage", 1)) * num_stages

    def find(ramp: _Ramp, share: float, **more: Any) -> FoundOrder | None:
        slices = ramp.counts(num_micro_batches)
        used = budget_for(kinds * sum(slices), share * budget) if evaluations is None else round(share * evaluations)
        plans = [cut(count) for count in slices]
        try:
            return find_order(costs, plans, num_stages, num_micro_batches, evaluations=used, **limits, **more)
        except ScheduleError:  # the limit
            return None

    def look(ramp: _Ramp) -> float:
        key = tuple(ramp.counts(num_micro_batches))
        if key not in tried:
            tried[key] = find(ramp, _LOOK, names=_QUICK_NAMES)
        looked = tried[key]
        return float("inf") if looked is None else looked.makespan_s

    # a short look at the same number everywhere, then at neighbours of the best while one is better
    starts = [_Ramp(count, count, 0) for count in dict.fromkeys(counts)]
    steps = looks_for(kinds * num_micro_batches * max(counts), budget) if evaluations is None else _STEPS
    best, is_better = min(starts[: max(1, steps)], key=look), True
    while is_better:
        before = best
        for ramp in list(best.neighbours(most_slices, num_micro_batches)):
            if len(tried) < steps and look(ramp) < look(best):
                best = ramp
        is_better = best is not before
    # The caller's plans get a full search too: a short look may misjudge them.
    finalists = list(dict.fromkeys((best, min(starts[: max(1, steps)], key=look))))
    found = [find(ramp, 0.5 / len(finalists)) for ramp in finalists]
    # the fastest of all orders, including those of a short look
    possible = [each for each in (*found, *tried.values()) if each is not None]
    if not possible:
        find_order(costs, cut(min(counts)), num_stages, num_micro_batches, evaluations=8, **limits)  # says why not
        raise ScheduleError(f"no order of {min(counts)} to {max(counts)} slices keeps the limit: raise it")
    return min(possible, key=lambda each: each.makespan_s)
