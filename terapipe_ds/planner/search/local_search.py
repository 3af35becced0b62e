"""From good plans to one that no small change makes better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from terapipe_ds.planner.search import candidates
from terapipe_ds.planner.search.candidates import Lengths
from terapipe_ds.planner.search.judge import Judge, memory_limit_error

_CLIMBS = 3  # starts, one after the other, each with what the ones before left of the budget


def climb(judge: Judge, sure: Iterable[Lengths], more: Iterable[Lengths]) -> Lengths:
    """Return the best plan that a climb from the best of the starts reaches; `more` are judged while the budget lasts.

    It is never worse than any of the `sure` ones that fits.

    Raises:
        MemoryLimitError: no start fits.
    """
    starts = list(dict.fromkeys(sure))
    most = max(map(len, starts))
    best_sure = judge.fastest(starts, judge.estimate)
    starts = list(dict.fromkeys([*starts, *more]))
    best = judge.fastest(starts, judge.estimate, within_budget=best_sure is not None)
    tops = list(dict.fromkeys(top for top in (best, best_sure) if top is not None))
    if not tops:
        raise memory_limit_error(judge, starts)
    while len(tops) < _CLIMBS:
        another = judge.fastest((start for start in starts if start not in tops), judge.estimate, within_budget=True)
        if another is None:
            break
        tops.append(another)
    climbed = [_climbed(judge, top, most) for top in tops]
    # what was estimated is replayed as a whole
    return judge.fastest({*climbed, *tops[:2]}, judge.seconds) or tops[0]


def _climbed(judge: Judge, best: Lengths, max_slices: int) -> Lengths:
    """Walk from `best` to a plan that no move, merge or split makes better, or until the budget is spent."""
    while True:
        before = best
        step = 1 << (max(best).bit_length() - 1)
        while step:
            while (better := _first_better(judge, best, candidates.moved(best, step))) is not None:
                best = better
            step //= 2
        while (better := _first_better(judge, best, candidates.merged_or_split(best, max_slices))) is not None:
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
