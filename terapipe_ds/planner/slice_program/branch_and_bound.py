"""Branch and bound over the pair (largest forward, largest backward) of a plan; prove the best of all compositions.

The time of a plan under fill-drain is `m * sum(f + b) + bubble * (F + B)`; F = max f' and B = max b' may be of
different slices. A box holds all plans with F in [f_low, f_high] and B in [b_low, b_high]. One program under the upper
limits gives the least sum S of the box, so that every plan in it takes at least m * S + bubble * (f_low + b_low),
and the plan behind S, whose maxima are F* and B*, beats every plan of the box with F >= F* and B >= B*. The remainder
is the two boxes F < F*, and F >= F* with B < B*; the larger side of each is halved. Boxes that cannot beat the best
plan known are dropped; the lowest bounds go first, several in one batch of programs.

Two things keep this at a few dozen programs where b is nearly proportional to f, although the limits are a pair:

- F and B are times of slices that exist. Among the slices that may still be used, those with f' >= f_low have some
  least b', and B cannot be lower. So a limit on one maximum moves the limits on the other one (`Bottlenecks`).
- A slice is ruled out for good where the best plan through it, by its least head and tail, is no better than the best
  plan known (`Search.narrow`). That leaves a narrow band of lengths around the best ones.

TeraPipe (Li et al., ICML 2021, section 3.3) runs one program for every t_max instead, in increasing order, for one
table f; it is exact up to the step between the t_max that it tries.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from terapipe_ds.planner.slice_program.least_sums import NO_LIMITS, Band, Bools, Floats, least_heads, least_tails, trace

ROUNDING = 1e-12  # relative: sums of the same slices in another order differ by less
BATCH_SIZE = 16  # boxes per call of the program
SMALL_GRANULES = 64  # up to here, search until proven
MAX_WORK = 2_000_000_000  # array elements of programs; some ten seconds
WORK_PER_ROW = 128  # cost of a row of a program, beyond its elements


@dataclasses.dataclass(frozen=True)
class WeighedPlan:
    """Hold a plan in granules and the terms of its time; `sum_s` is of one micro-batch."""

    lengths: tuple[int, ...]
    sum_s: float
    max_forward_s: float
    max_backward_s: float

    @property
    def num_slices(self) -> int:
        return len(self.lengths)


@dataclasses.dataclass(frozen=True)
class Objective:
    """Compute `micro_batches * sum(f + b) + bubble * (max f' + max b')`; `bubble` is K - 1 on equal stages."""

    micro_batches: int
    bubble: float

    def __call__(self, plan: WeighedPlan) -> float:
        return self.bound(plan.sum_s, plan.max_forward_s, plan.max_backward_s)

    def bound(self, sum_s: float, max_forward_s: float, max_backward_s: float) -> float:
        filling_s = self.bubble * (max_forward_s + max_backward_s) if self.bubble else 0.0  # maxima may be infinite
        return self.micro_batches * sum_s + filling_s


@dataclasses.dataclass
class Box:
    """Hold the plans with F in [f_low, f_high] and B in [b_low, b_high]; none of them has a sum below `sum_s`."""

    f_low: float = 0.0
    f_high: float = math.inf
    b_low: float = 0.0
    b_high: float = math.inf
    sum_s: float = 0.0

    def halves(self) -> Iterable[Box]:
        """Yield the box cut in the middle of its longer side, or the box itself where it is a point."""
        long_f = self.f_high - self.f_low >= self.b_high - self.b_low
        low_name, high_name = ("f_low", "f_high") if long_f else ("b_low", "b_high")
        low, high = getattr(self, low_name), getattr(self, high_name)
        if high <= low:
            yield self
            return
        middle = low + (high - low) / 2
        yield dataclasses.replace(self, **{high_name: middle})
        yield dataclasses.replace(self, **{low_name: math.nextafter(middle, math.inf)})


class Bottlenecks:
    """Sort the slices that may still be used by f' and by b': the only values that F and B can have."""

    def __init__(self, forward: Floats, backward: Floats) -> None:
        self.forward, self.least_b, self.largest_b = self._ordered(forward, backward)
        self.backward, self.least_f, self.largest_f = self._ordered(backward, forward)

    @staticmethod
    def _ordered(times: Floats, other: Floats) -> tuple[Floats, Floats, Floats]:
        """Return `times`, ascending, the least `other` of the slices from each on, and the largest up to each."""
        order = np.argsort(times)
        other = other[order]
        return times[order], np.minimum.accumulate(other[::-1])[::-1], np.maximum.accumulate(other)

    def tighten(self, box: Box) -> bool:
        """Shrink `box` to values that slices have; False where it is empty."""
        f, b = int(self.forward.searchsorted(box.f_low)), int(self.backward.searchsorted(box.b_low))
        if max(f, b) == len(self.forward):
            return False
        box.f_low = max(self.forward[f].item(), self.least_f[b].item())
        box.b_low = max(self.backward[b].item(), self.least_b[f].item())
        f = int(self.forward.searchsorted(box.f_high, "right")) - 1
        b = int(self.backward.searchsorted(box.b_high, "right")) - 1
        if min(f, b) < 0:
            return False
        box.f_high = min(self.forward[f].item(), self.largest_f[b].item())
        box.b_high = min(self.backward[b].item(), self.largest_b[f].item())
        return box.f_low <= box.f_high and box.b_low <= box.b_high


class Search:
    """Search by branch and bound over the slices of `band` (all of them, of 1 granule and more); see `run`."""

    def __init__(
        self, band: Band, objective: Objective, num_slices: int | None = None, max_work: float | None = None
    ) -> None:
        self.every, self.band, self.objective, self.num_slices = band, band, objective, num_slices
        usual_work = math.inf if band.num_granules <= SMALL_GRANULES else MAX_WORK
        self.work_left = usual_work if max_work is None else max_work
        self.best, self.best_s = WeighedPlan((), math.inf, math.inf, math.inf), math.inf
        self.lower_bound_s, self.optimal, self.num_programs = 0.0, False, 0
        self.met: dict[tuple[int, ...], WeighedPlan] = {}
        self.heap: list[tuple[float, int, Box]] = []
        self.order = itertools.count()
        self.offer((band.num_granules,))

    def offer(self, lengths: tuple[int, ...]) -> WeighedPlan:
        """Keep a plan if it is the best one so far, or as good with fewer slices."""
        if lengths not in self.met:
            self.met[lengths] = weigh(self.every, lengths)
        plan = self.met[lengths]
        if self.num_slices is None or len(lengths) <= self.num_slices:
            seconds = self.objective(plan)
            tie = ROUNDING * self.best_s if self.best.lengths else 0.0
            if seconds < self.best_s - tie or (seconds <= self.best_s + tie and len(lengths) < self.best.num_slices):
                self.best, self.best_s = plan, seconds
        return plan

    def run(self) -> None:
        """Search until the best plan is proven or the work is spent.

        It sets `best` and `best_s` (the best plan and its time), `lower_bound_s` (no plan takes less; equal to `best_s`
        where `optimal`), `met` (all plans met on the way) and `num_programs`.
        """
        for lengths in greedy_plans(self.every):
            self.offer(lengths)
        # good first plans rule out most slices before any box is opened
        box = Box()
        if self.narrow(box, NO_LIMITS):
            self._push(box)
        turn = 0
        while self.work_left > 0 and (boxes := self._pop()):
            turn += 1
            # ever rarer, because narrowing costs as much as two programs
            if turn & (turn - 1) == 0 and turn > 1 and not self._narrow_all(boxes):
                self.heap.clear()
                break
            for box in self._evaluate(boxes):
                for half in box.halves() if self._tighten(box) else ():
                    self._push(half)
        self.optimal = not self.heap
        if self.optimal:
            self._prefer_fewer_slices()
        self.lower_bound_s = min([self.best_s, *(self._bound(box) for *_, box in self.heap)])

    def narrow(self, box: Box, limits: Floats) -> bool:
        """Rule out the slices through which no plan of `box` beats the best; False where none is left."""
        # a slice through which no plan beats the best one is never used again
        tails, heads = least_tails(self.band, limits)[0], least_heads(self.band, limits)
        self._spend(2, 1)
        if not math.isfinite(tails[0, 0]):
            return False
        box.sum_s = max(box.sum_s, tails[0, 0].item())
        self.offer(trace(self.band, tails, limits[0]))
        if self.objective.bubble == 0 and self.num_slices is None:
            return False
        bounds = self.band.through(heads, tails[0])
        bounds *= self.objective.micro_batches
        if self.objective.bubble > 0:
            largest = np.maximum(self.band.forward, box.f_low)
            largest += np.maximum(self.band.backward, box.b_low)
            largest *= self.objective.bubble
            bounds += largest
        allowed: Bools = bounds <= self.best_s
        allowed &= (self.band.forward <= box.f_high) & (self.band.backward <= box.b_high)
        if not allowed.any():
            return False
        self.bottlenecks = Bottlenecks(self.band.forward[allowed], self.band.backward[allowed])
        self.band = self.band.keep(allowed)
        return True

    def _narrow_all(self, boxes: Sequence[Box]) -> bool:
        """Call `narrow` with the limits that all open boxes share."""
        boxes = [*boxes, *(box for *_, box in self.heap)]
        f_high, b_high = max(box.f_high for box in boxes), max(box.b_high for box in boxes)
        f_low, b_low = min(box.f_low for box in boxes), min(box.b_low for box in boxes)
        return self.narrow(Box(f_low, f_high, b_low, b_high), np.array([[f_high, b_high]]))

    def _bound(self, box: Box) -> float:
        return self.objective.bound(box.sum_s, box.f_low, box.b_low)

    def _tighten(self, box: Box) -> bool:
        """Shrink `box` to the plans that can beat the best one; False where none can."""
        for _ in range(2):
            if self.objective.bubble > 0:
                room = (self.best_s - self.objective.micro_batches * box.sum_s) / self.objective.bubble
                box.f_high, box.b_high = min(box.f_high, room - box.b_low), min(box.b_high, room - box.f_low)
            if not self.bottlenecks.tighten(box):
                return False
        return self._bound(box) < self.best_s * (1 - ROUNDING)

    def _push(self, box: Box) -> None:
        if self._tighten(box):
            heapq.heappush(self.heap, (self._bound(box), next(self.order), box))

    def _pop(self) -> list[Box]:
        """Take the boxes with the lowest bounds, as many as one batch takes."""
        size = BATCH_SIZE if self.num_slices is None else 1 + BATCH_SIZE // self.num_slices
        popped = (heapq.heappop(self.heap)[2] for _ in range(len(self.heap)))
        return list(itertools.islice(filter(self._tighten, popped), size))

    def _evaluate(self, boxes: Sequence[Box]) -> Iterable[Box]:
        """Run one program for each box, and yield the remainder of the box around the plan of that program."""
        limits = np.array([(box.f_high, box.b_high) for box in boxes])
        least = least_tails(self.band, limits, self.num_slices)
        self._spend(len(boxes), least.shape[1])
        for box, sums, limit in zip(boxes, least, limits, strict=True):
            sum_s = sums[-1, 0].item()
            box.sum_s = max(box.sum_s, sum_s)
            if math.isfinite(sum_s) and self._bound(box) < self.best_s:
                plan = self.offer(trace(self.band, sums, limit))
                # the remainder of the box has a smaller largest forward, or a smaller largest backward
                f_below, b_below = (math.nextafter(x, -1.0) for x in (plan.max_forward_s, plan.max_backward_s))
                yield dataclasses.replace(box, f_high=f_below)
                yield dataclasses.replace(box, f_low=max(box.f_low, plan.max_forward_s), b_high=b_below)

    def _spend(self, programs: int, rows: int) -> None:
        self.num_programs += programs
        self.work_left -= programs * rows * self.band.num_granules * (self.band.width + WORK_PER_ROW)

    def _prefer_fewer_slices(self) -> None:
        """Take a plan with the fewest slices among those as good as the best within its maxima."""
        band = self.every
        if self.objective.bubble > 0:
            allowed = self.every.forward <= self.best.max_forward_s
            allowed &= self.every.backward <= self.best.max_backward_s
            band = self.every.keep(allowed)
        if self.num_slices is not None:
            sums = least_tails(band, num_slices=self.best.num_slices)[0]
            enough = int(np.flatnonzero(sums[:, 0] <= sums[-1, 0] * (1 + ROUNDING))[0])
            self.offer(trace(band, sums[: enough + 1], NO_LIMITS[0]))
            return
        tails, heads = least_tails(band)[0], least_heads(band)
        band = band.keep(band.through(heads, tails[0]) <= tails[0, 0] * (1 + ROUNDING))
        counts = Band(np.where(np.isfinite(band.total), 1.0, np.inf), band.forward, band.backward, band.shortest)
        self.offer(trace(counts, least_tails(counts)[0], NO_LIMITS[0]))


def search_plans(
    band: Band, objective: Objective, max_slices: int | None = None, max_work: float | None = None
) -> Search:
    """Return a finished search. The first one does not count slices, for each count would be a row of its program."""
    free = Search(band, objective, max_work=max_work)
    free.run()
    if max_slices is None or (free.optimal and free.best.num_slices <= max_slices):
        return free
    counted = Search(band, objective, max_slices, max_work)
    for lengths in free.met:
        counted.offer(lengths)
    counted.run()
    counted.num_programs += free.num_programs
    counted.met = {**free.met, **counted.met}
    counted.lower_bound_s = max(counted.lower_bound_s, min(free.lower_bound_s, counted.best_s))
    return counted


def weigh(band: Band, lengths: Sequence[int]) -> WeighedPlan:
    """Return a plan with its sum and its maxima, over a band that has all its slices."""
    rows = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.intp)))
    columns = np.asarray(lengths) - band.shortest
    forward, backward = band.forward[rows, columns].max(), band.backward[rows, columns].max()
    return WeighedPlan(tuple(lengths), band.total[rows, columns].sum().item(), forward.item(), backward.item())


def greedy_plans(band: Band) -> Iterable[tuple[int, ...]]:
    """Yield plans of slices that take about equal times: good first plans, nothing more."""
    n = band.num_granules
    both = band.forward + band.backward
    low, high = both[:, 0].max(), max(both[0, n - 1], both[:, 0].max())
    if high <= 0:
        return
    for limit in np.geomspace(max(low, 1e-6 * high), high, 48):
        lengths: list[int] = []
        j = 0
        while j < n:
            lengths.append(max(1, int(both[j, : n - j].searchsorted(limit, "right"))))
            j += lengths[-1]
        yield tuple(lengths)
