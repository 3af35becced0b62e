"""From good plans to one that no small change makes better."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from terapipe_ds.planner import candidates
from terapipe_ds.planner.candidates import Lengths
from terapipe_ds.planner.judge import Judge
from terapipe_ds.planner.limits import memory_limit_error

_CLIMBS = 3  # starts, one after the other, each with what the ones before left of the budget


def climb(judge: Judge, sure: Iterable[Lengths], more: Iterable[Lengths]) -> Lengths:
    """The best plan that a climb from the best of the starts reaches, never worse than any of the ``sure`` ones that
    fits; ``more`` are judged while the budget lasts.

    Raises:
        MemoryLimitError: no start fits.
    """
    starts = list(dict.fromkeys(sure))
    most = max(map(len, starts))
    first = judge.fastest(starts, judge.estimate)
    starts = list(dict.fromkeys([*starts, *more]))
    tops = [] if first is None else [first]
    best = judge.fastest(starts, judge.estimate, within_budget=first is not None)
    if best is None and first is None:
        raise memory_limit_error(judge, starts)
    tops = list(dict.fromkeys(one for one in (best, first) if one is not None))
    while len(tops) < _CLIMBS:
        left = [one for one in starts if one not in tops]
        another = judge.fastest(left, judge.estimate, within_budget=True)
        if another is None:
            break
        tops.append(another)
    climber = _Climber(judge, most)
    climbed = [climber.climbed(start) for start in tops]
    # what was estimated is replayed as a whole
    return judge.fastest({*climbed, *tops[:2]}, judge.seconds) or tops[0]


class _Climber:
    def __init__(self, judge: Judge, max_slices: int) -> None:
        self.judge, self.max_slices = judge, max_slices

    def climbed(self, best: Lengths) -> Lengths:
        while True:
            before = best
            step = 1 << (max(best).bit_length() - 1)
            while step:
                best = self._improved(best, functools.partial(candidates.moved, step=step))
                step //= 2
            changed = functools.partial(candidates.merged_or_split, max_slices=self.max_slices)
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
                enough = seconds * (1 - 1e-12)
                if judge.bound_s(lengths) < enough and judge.estimate(lengths) < enough and judge.fits(lengths):
                    best, seconds, found = lengths, judge.estimate(lengths), True
                    break
            judge.report()
        return best
