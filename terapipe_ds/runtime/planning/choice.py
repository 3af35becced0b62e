"""Say what runs for sequences of one length: their slices, the schedule by its name, and an order that was found."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import PlanResult
from terapipe_ds.planner.result import Prediction
from terapipe_ds.schedule import Kind, Schedule, from_csv, to_csv


@dataclass(frozen=True)
class Choice:
    """Say what runs for sequences of one length.

    `plans` has the plan of each micro-batch of a step, or one for all; other batches take them in turns. `order_csv` is
    the order of `"schedule": "search"`, as `schedule.to_csv` writes it. `recompute` are the layers of the model that
    `"recompute": "auto"` chose; None without it. `predicted` is known where the plans come from costs.
    """

    plans: tuple[SlicePlan, ...]
    schedule: str
    order_csv: str | None = None
    recompute: frozenset[int] | None = None
    predicted: Prediction | None = field(default=None, compare=False)

    @classmethod
    def of(cls, result: PlanResult) -> Choice:
        """Return what the planner chose."""
        order = None if result.order is None else to_csv(result.order)
        again = None if result.recompute is None else frozenset(itertools.chain(*result.recompute))
        return cls(result.plans, result.schedule, order, again, Prediction(result.predicted_s, result.unsliced_s))

    def __post_init__(self) -> None:
        if len(set(self.plans)) == 1:
            object.__setattr__(self, "plans", self.plans[:1])

    def plan_of(self, micro_batch_id: int) -> SlicePlan:
        """Return the plan of a micro-batch."""
        return self.plans[micro_batch_id % len(self.plans)]

    @property
    def plan(self) -> SlicePlan | None:
        """Return the one plan of all micro-batches; None where they differ."""
        return self.plans[0] if len(self.plans) == 1 else None

    @property
    def sequence_length(self) -> int:
        """Return the tokens of the sequences."""
        return self.plans[0].sequence_length

    @property
    def cuts(self) -> bool:
        """Return whether sequences are cut at all."""
        return any(plan.num_slices > 1 for plan in self.plans)

    def joined(self, fewest_tokens: int) -> Choice:
        """Return the choice without slices of fewer tokens (see `SlicePlan.joined`)."""
        plans = tuple(plan.joined(fewest_tokens) for plan in self.plans)
        return self if plans == self.plans else replace(self, plans=plans, predicted=None)

    def described(self) -> dict[str, Any]:
        """Return the choice as checkpoints hold it."""
        slices = [list(plan.lengths) for plan in self.plans]
        order = {"order": self.order_digest} if self.order_csv is not None else {}
        again = {"recompute": sorted(self.recompute)} if self.recompute is not None else {}
        return {"slices": slices[0] if len(slices) == 1 else slices, "schedule": self.schedule, **order, **again}

    @property
    def order_digest(self) -> str:
        """Return 16 hex digits that say which order was found; "" for a schedule with a name."""
        return "" if self.order_csv is None else hashlib.sha256(self.order_csv.encode()).hexdigest()[:16]

    @cached_property
    def order(self) -> Schedule | None:
        """Return the order that was found, validated."""
        return None if self.order_csv is None else from_csv(self.order_csv, self.schedule)

    def name_for(self, num_slices: Sequence[int], training: bool) -> str:
        """Return the schedule of a batch: a named one in the place of an order that was found for other slices."""
        order = self.order
        if order is None or not training or order.num_slices == tuple(num_slices):
            return self.schedule
        if order.chunks_per_stage > 1:
            return "zbv"
        is_split = any(action.kind is Kind.WEIGHT for actions in order.orders for action in actions)
        return "seq1f1b-zb" if is_split else "seq1f1b"
