"""What a search answers, and how to choose among the answers for several schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError

PREFERENCE = ("seq1f1b", "1f1b", "terapipe", "gpipe")
"""Which schedule wins where time and memory are the same."""

_TIE = 1e-3  # a difference in time below the noise of any measurement


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

    def describe(self) -> str:
        """A few lines for a log or a terminal."""
        lengths, equal = self.plan.lengths, self.equal_plan.num_slices
        slices = ", ".join(map(str, lengths)) if len(set(lengths)) > 1 else f"{lengths[0]} tokens each"
        above = f"within {self.gap:.2%} of a time that no plan can beat"
        proof = "no plan with this schedule takes less" if self.optimal else above
        lines = [
            f"schedule  {self.schedule}",
            f"plan      {len(lengths)} slice{'s' * (len(lengths) > 1)}: {slices}",
            f"step      {_time(self.predicted_s)} predicted, without reduce and optimizer",
            f"          {_time(self.unsliced_s)} unsliced ({self._ratio(self.unsliced_s)})",
            f"          {_time(self.equal_s)} with the best equal slices, {equal} ({self._ratio(self.equal_s)})",
            f"proof     {proof}",
            f"bubble    {self.bubble_fraction:.1%} of the stages' time",
        ]
        if self.peak_bytes is not None:
            most, least = max(self.peak_bytes), min(self.peak_bytes)
            text = f"memory    {most / 1e9:.2f} GB on stage {self.peak_bytes.index(most)}"
            text += f", {least / 1e9:.2f} GB on stage {self.peak_bytes.index(least)}" if least < most else ""
            limit = self.memory_limit_bytes
            lines.append(text + (f"; the limit is {limit / 1e9:.2f} GB" if limit is not None else ""))
        return "\n".join(lines)

    def _ratio(self, seconds: float) -> str:
        return f"{seconds / self.predicted_s:.3f}x" if self.predicted_s > 0 else "no time"

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and lists, for JSON."""
        plans = {"plan": list(self.plan.lengths), "equal_plan": list(self.equal_plan.lengths)}
        return dataclasses.asdict(self) | plans | {"gap": self.gap}


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


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
