"""What one stage holds of the batch that is running, kept by part, micro-batch and slice, never by order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.sliceable import SliceableTensors, Tensors
from terapipe_ds.schedule import Schedule
from terapipe_ds.schedule.action import Kind, SliceKey

Key = tuple[int, int, int]
"""(part_id, micro_batch_id, slice_id)."""


class InFlightError(RuntimeError):
    """The stage's books do not add up: a bug in the engine, never a wrong gradient."""


class Places:
    """Where a computation stands in the order of a stage. Made once per schedule, for the stages that are asked for.

    It holds the orders and not the schedule, so that it can be dropped together with a schedule that nobody keeps.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._orders = schedule.orders
        self._by_stage: dict[int, dict[tuple[Kind, int, SliceKey], int]] = {}

    def find(self, stage_id: int, kind: Kind, part_id: int, unit: SliceKey) -> int:
        """The index of F, B or W of ``unit`` in the order of ``stage_id``."""
        if stage_id not in self._by_stage:
            order = self._orders[stage_id]
            self._by_stage[stage_id] = {(a.kind, a.part_id, a.unit): i for i, a in enumerate(order)}
        return self._by_stage[stage_id][(kind, part_id, unit)]


@dataclass
class SliceInFlight:
    """A slice between its F and its B: the leaves that went in, what came out, and on the last part its loss."""

    inputs: Tensors
    outputs: Any
    loss: torch.Tensor | None = None


@dataclass
class MicroBatchInFlight:
    """A micro-batch on this stage. Inputs and labels are there only on the first and the last part."""

    plan: SlicePlan
    shape: MicroBatchShape
    inputs: SliceableTensors | None = None
    labels: SliceableTensors | None = None
    weights: tuple[float, ...] = ()
    losses: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


@dataclass
class BatchInFlight:
    """One batch on one stage."""

    schedule: Schedule
    stage_id: int
    training: bool
    micro_batches: list[MicroBatchInFlight]
    slices: dict[Key, SliceInFlight] = field(default_factory=dict)
    live_peak: int = 0

    def kinds(self) -> frozenset[Hashable]:
        """Tell what decides which kernels run: the schedule, and the slices of each micro-batch."""
        how = self.training, self.schedule.name
        return frozenset((how, each.shape.rows, each.shape.length, each.plan.lengths) for each in self.micro_batches)

    def signature(self, unit: SliceKey) -> tuple[bool, int, int, int]:
        """What the shapes of a slice's activations depend on: (mode, rows, sequence length, slice length)."""
        micro_batch = self.micro_batches[unit[0]]
        shape = micro_batch.shape
        return self.training, shape.rows, shape.length, micro_batch.plan.lengths[unit[1]]

    def put(self, key: Key, slice_: SliceInFlight) -> None:
        """Keep a slice whose F has run; it is live from now on."""
        if key in self.slices:
            raise InFlightError(f"F{key[1]}.{key[2]} ran twice on stage {self.stage_id} (part {key[0]})")
        self.slices[key] = slice_
        self.live_peak = max(self.live_peak, len(self.slices))

    def get(self, key: Key) -> SliceInFlight:
        """A live slice."""
        try:
            return self.slices[key]
        except KeyError:
            raise InFlightError(
                f"slice {key[1]}.{key[2]} is not live on stage {self.stage_id} (part {key[0]})"
            ) from None

    def drop(self, key: Key) -> None:
        """The slice's last action has run."""
        self.get(key)
        del self.slices[key]

    def assert_done(self, expected_peak: int) -> None:
        """Nothing is left, and as many slices were live at once as the schedule says."""
        if self.slices:
            raise InFlightError(
                f"stage {self.stage_id} still holds slices {sorted(self.slices)} (part, micro-batch, slice) at the end "
                "of a batch"
            )
        if self.training and self.live_peak != expected_peak:
            raise InFlightError(
                f"stage {self.stage_id} held {self.live_peak} live slices at once, the schedule says {expected_peak}"
            )
