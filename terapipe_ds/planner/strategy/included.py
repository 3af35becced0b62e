"""Settings that are ranked beside what the search finds: published ones, or those that a user runs today."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.strategy.candidate import Candidate, Score
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.search import Search
from terapipe_ds.planner.strategy.space import Choices, Space

_MARGINS = (1.0, 0.94, 0.85, 0.7)  # shares of the memory limit that the cut aims at, until it fits


@dataclass(frozen=True)
class Included:
    """Degrees, rows of a micro-batch and slices, an int for equal ones. Cut, placement and ZeRO are the best found."""

    stages: int
    tensor_parallel: int
    data_parallel: int
    micro_batch: int = 1
    slices: int | tuple[int, ...] = 1
    schedule: str | None = None  # None: `1f1b` unsliced, `seq1f1b` sliced

    def plan(self, sequence_length: int) -> SlicePlan:
        """Return the slices. Raises PlannerError where they are of another length."""
        if isinstance(self.slices, int):
            return SlicePlan.equal(sequence_length, self.slices)
        if sum(self.slices) != sequence_length:
            raise PlannerError(f"include: slices = {list(self.slices)}: give lengths with the sum {sequence_length}")
        return SlicePlan(self.slices)


def ranked_with(search: Search, scores: Sequence[Score], include: Sequence[Included]) -> list[Score]:
    """Return the scores with those of the included settings, the best first.

    Raises:
        PlannerError: a setting that the search has no candidate for, or that does not fit in memory.
    """
    ranked = list(scores)
    for setting in include:
        best = _best(search, setting)
        if all(_what_runs(score) != _what_runs(best) or score.seconds > best.seconds for score in ranked):
            ranked.append(best)
            search.open_s = min(search.open_s, best.seconds)  # what is ranked is no less than the bound of all
    return sorted(ranked, key=lambda score: score.rank)


def _what_runs(score: Score) -> tuple[object, ...]:
    return score.candidate, score.schedule, score.plan


def _best(search: Search, setting: Included) -> Score:
    choices = Choices(setting.stages, setting.tensor_parallel, setting.data_parallel, setting.schedule)
    space = dataclasses.replace(search.space, choices=choices)
    candidates = [candidate for candidate in space.candidates() if candidate.micro_batch == setting.micro_batch]
    if not candidates:
        raise PlannerError(f"include: {setting}: no strategy has these degrees and micro-batches; leave it out")
    found = [score for candidate in candidates for score in _scores(space, setting, candidate)]
    if not found:
        gigabytes = space.limit_bytes / 1e9
        raise PlannerError(f"include: {setting}: no cut fits in {gigabytes:.4g} GB per device; leave it out")
    return min(found, key=lambda score: score.rank)


def _scores(space: Space, setting: Included, candidate: Candidate) -> Iterator[Score]:
    """Yield the candidate with the cut that the programs find, where that fits."""
    plan = setting.plan(space.sequence_length)
    schedule = setting.schedule or ("1f1b" if plan.num_slices == 1 else "seq1f1b")
    priced = Priced(space.layers, space.cluster, space.sequence_length, candidate)
    for margin in _MARGINS:
        for _, bounds in priced.estimates(plan.num_slices, margin * space.limit_bytes)[:1]:
            score = priced.score(bounds, schedule, plan, space.limit_bytes)
            if score is not None:
                yield score
                return
