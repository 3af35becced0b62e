"""What a search answers, and how to choose among the answers for several schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError

PREFERENCE = (
    *("seq1f1b", "1f1b", "seq1f1b-zb", "zb-h1", "terapipe", "gpipe"),
    *("seq1f1b-interleaved", "interleaved", "zbv", "chimera-seq", "chimera"),
)
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
    chunks_per_stage: int = 1  # parts that a stage holds
    extra_s: float | None = 0.0  # on top of predicted_s, what other schedules have nothing of; None: not known

    @property
    def total_s(self) -> float:
        """What schedules are compared by: with `extra_s`, where it is known."""
        return self.predicted_s + (self.extra_s or 0.0)

    @property
    def gap(self) -> float:
        """How far the prediction is above the proven bound: 0.02 for 2 %."""
        return max(self.predicted_s / self.lower_bound_s - 1.0, 0.0) if self.lower_bound_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for JSON."""
        plans = {"plan": list(self.plan.lengths), "equal_plan": list(self.equal_plan.lengths)}
        return dataclasses.asdict(self) | plans | {"gap": self.gap}


def choose(results: Iterable[PlanResult]) -> PlanResult:
    """Return the result with the least time; within 0.1 % of it that with the least memory, then the preferred
    schedule."""
    known = list(results)
    if not known:
        raise PlannerError("no results to choose from: give at least one")
    least_s = min(result.total_s for result in known)
    near = [result for result in known if result.total_s <= least_s * (1 + _TIE)]
    return min(near, key=memory_and_preference)


def memory_and_preference(result: PlanResult) -> tuple[int, int]:
    """Return what decides where times are alike: the bytes of the fullest stage, then the preferred schedule."""
    known = result.schedule in PREFERENCE
    return max(result.peak_bytes or (0,)), PREFERENCE.index(result.schedule) if known else len(PREFERENCE)
