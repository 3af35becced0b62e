"""List plans worth trying, and climb from good ones to a plan that no small change makes better."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from terapipe_ds.planner.search.judge import Judge, memory_limit_error
from terapipe_ds.planner.search.pipeline import Lengths

_CLIMBS = 3  # starts, one after the other, each with the budget that earlier ones left


def slice_counts(most: int) -> list[int]:
    """Return 1 to 4, then numbers in steps of a third to a half: 1, 2, 3, 4, 6, 8, 12, ..., and `most`."""
    powers = (2**exponent for exponent in range(most.bit_length()))
    return sorted({count for power in powers for count in (power, 3 * power // 2) if 1 <= count <= most} | {most})


def compositions(num_granules: int, max_slices: int) -> Iterator[Lengths]:
    """Yield all ways to cut `num_granules` in at most `max_slices` slices, 2^(n-1) without that limit."""
    for count in range(1, max_slices + 1):
        for cuts in itertools.combinations(range(1, num_granules), count - 1):
            yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_granules)))


def moved(lengths: Lengths, step: int) -> Iterator[Lengths]:
    """Yield plans with `step` granules moved from one slice to another: neighbours first, then any two."""
    count = len(lengths)
    for distance in range(1, count):
        for first in range(count - distance):
            for giver, taker in ((first, first + distance), (first + distance, first)):
                if lengths[giver] > step:
                    changed = list(lengths)
                    changed[giver] -= step
                    changed[taker] += step
                    yield tuple(changed)


def merged_or_split(lengths: Lengths, max_slices: int) -> Iterator[Lengths]:
    """Yield plans with two neighbours merged, or one slice split: in halves, or a granule off either end."""
    for i in range(len(lengths) - 1):
        yield (*lengths[:i], lengths[i] + lengths[i + 1], *lengths[i + 2 :])
    if len(lengths) < max_slices:
        for i, length in enumerate(lengths):
            for left in sorted({length // 2, 1, length - 1} & set(range(1, length))):
                yield (*lengths[:i], left, length - left, *lengths[i + 1 :])


def climb(judge: Judge, sure: Iterable[Lengths], more: Iterable[Lengths]) -> Lengths:
    """Return the best plan that a climb from the best of the starts reaches; `more` are judged while the budget lasts.

    It is never worse than any of the `sure` starts that fits. Raises MemoryLimitError where none fits.
    """
    starts = list(dict.fromkeys(sure))
    most = max(map(len, starts))
    best_sure = judge.fastest(starts, judge.estimate)
    starts = list(dict.fromkeys([*starts, *more]))
    best = judge.fastest(starts, judge.estimate, within_budget=best_sure is not None)
    tops = list(dict.fromkeys(top for top in (best, best_sure) if top is not None))
    if not tops:
        raise memory_limit_error(judge, starts)
    # other starts may lead to better tops
    while len(tops) < _CLIMBS:
        another = judge.fastest((start for start in starts if start not in tops), judge.estimate, within_budget=True)
        if another is None:
            break
        tops.append(another)
    # one climb from each of the best, as long as the budget lasts
    climbed = [_climbed(judge, top, most) for top in tops]
    # estimated plans are replayed as a whole
    return judge.fastest({*climbed, *tops[:2]}, judge.seconds) or tops[0]


def _climbed(judge: Judge, best: Lengths, max_slices: int) -> Lengths:
    """Walk from `best` to a plan that no move, merge or split makes better, or until the budget is spent."""
    while True:
        before = best
        # large moves first, then ever smaller ones; then other numbers of slices
        step = 1 << (max(best).bit_length() - 1)
        while step:
            while (better := _first_better(judge, best, moved(best, step))) is not None:
                best = better
            step //= 2
        while (better := _first_better(judge, best, merged_or_split(best, max_slices))) is not None:
            best = better
        if best == before or judge.exhausted:
            return best


def _first_better(judge: Judge, best: Lengths, neighbours: Iterator[Lengths]) -> Lengths | None:
    """Return the first neighbour that is faster than `best` and fits; None without one, or without budget."""
    judge.report()
    enough = judge.estimate(best) * (1 - 1e-12)
    for lengths in neighbours:
        if judge.exhausted:
            return None
        if judge.bound_s(lengths) < enough and judge.estimate(lengths) < enough and judge.fits(lengths):
            return lengths
    return None
