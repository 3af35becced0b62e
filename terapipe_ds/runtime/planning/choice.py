"""Describe the choice for sequences of one length: their slices, and the schedule by its name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import PlanResult
from terapipe_ds.planner.result import Prediction

ChoiceKey = tuple[int, int, int]
"""A sequence length, and the number and the size of the micro-batches."""


@dataclass(frozen=True)
class Choice:
    """Describe the choice for sequences of one length.

    `plans` has the plan of each micro-batch of a step, or one for all; other batches take them in turns. `recompute`
    are the layers of the model that `"recompute": "auto"` chose; None without it. `predicted` is known if the plans
    come from costs.
    """

    plans: tuple[SlicePlan, ...]
    schedule: str
    recompute: frozenset[int] | None = None
    predicted: Prediction | None = field(default=None, compare=False)

    @classmethod
    def of(cls, result: PlanResult) -> Choice:
        again = None if result.recompute is None else frozenset(itertools.chain(*result.recompute))
        return cls(result.plans, result.schedule, again, Prediction(result.predicted_s, result.unsliced_s))

    def __post_init__(self) -> None:
        if len(set(self.plans)) == 1:
            object.__setattr__(self, "plans", self.plans[:1])

    def plan_of(self, micro_batch_id: int) -> SlicePlan:
        return self.plans[micro_batch_id % len(self.plans)]

    @property
    def sequence_length(self) -> int:
        return self.plans[0].sequence_length

    @property
    def cuts(self) -> bool:
        return any(plan.num_slices > 1 for plan in self.plans)

    def of_length(self, length: int) -> Choice:
        """Return the choice for about as many tokens: slices start at the same tokens, and the last takes the rest."""
        if length == self.sequence_length:
            return self
        cuts = ([*(start for start in plan.starts if start < length), length] for plan in self.plans)
        plans = (SlicePlan(tuple(stop - start for start, stop in itertools.pairwise(each))) for each in cuts)
        return replace(self, plans=tuple(plans), predicted=None)

    def joined(self, fewest_tokens: int) -> Choice:
        """Return the choice without slices of fewer tokens (see `SlicePlan.joined`)."""
        plans = tuple(plan.joined(fewest_tokens) for plan in self.plans)
        return self if plans == self.plans else replace(self, plans=plans, predicted=None)

    def described(self) -> dict[str, Any]:
        """Return the choice in the form for checkpoints."""
        slices = [list(plan.lengths) for plan in self.plans]
        again = {"recompute": sorted(self.recompute)} if self.recompute is not None else {}
        return {"slices": slices[0] if len(slices) == 1 else slices, "schedule": self.schedule, **again}
