"""Keep the data of one stage for the running batch, by part, micro-batch and slice, never by order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from terapipe_ds.attention import SliceStore
from terapipe_ds.plan import SlicePlan, weight_groups
from terapipe_ds.planner.result import Prediction
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, Tensors
from terapipe_ds.runtime.layout.layout import Place
from terapipe_ds.schedule import Schedule
from terapipe_ds.schedule.action import Action, Kind, SliceKey

Key = tuple[int, int, int]  # `(part_id, micro_batch_id, slice_id)`


class InFlightError(RuntimeError):
    """Say that the stage's books do not add up: a bug in the engine, never a wrong gradient."""


@dataclass
class SliceInFlight:
    """Hold a slice between its F and its B: its input leaves, its outputs, and on the last part its loss."""

    inputs: Tensors
    outputs: Any
    loss: Any = None


@dataclass
class MicroBatchInFlight:
    """Hold a micro-batch on this stage. Inputs and labels exist only on the first and the last part."""

    plan: SlicePlan
    shape: MicroBatchShape
    inputs: SliceableTensors | None = None
    labels: SliceableTensors | None = None
    weights: tuple[float, ...] = ()  # of each slice's loss on this rank
    all_weights: tuple[float, ...] = ()  # of each sequence rank's share of each slice, in the order of tokens

    def to(self, device: torch.device) -> None:
        if self.inputs is not None:
            self.inputs = self.inputs.to(device)
        if self.labels is not None:
            self.labels = self.labels.to(device)


@dataclass
class BatchInFlight:
    """Hold one batch on one stage."""

    schedule: Schedule
    stage_id: int
    training: bool
    micro_batches: list[MicroBatchInFlight]
    slices: dict[Key, SliceInFlight] = field(default_factory=dict)
    live_peak: int = 0
    predicted: Prediction | None = None

    @cached_property
    def split(self) -> frozenset[Key]:
        """Return the slices whose weight gradients have an action of their own, W."""
        order = self.schedule.orders[self.stage_id] if self.training else ()
        return frozenset((action.part_id, *action.unit) for action in order if action.kind is Kind.WEIGHT)

    def weight_groups(self, ranks: int = 1) -> list[frozenset[Key]]:
        """Return the slices whose weight gradients are one product each; `ranks` divide the tokens of each slice."""
        order = self.schedule.orders[self.stage_id] if self.training else ()
        groups = []
        for part_id, m in {(action.part_id, action.micro_batch_id) for action in order}:
            lengths, rows = self.micro_batches[m].plan.lengths, self.micro_batches[m].shape.rows
            groups += [frozenset((part_id, m, s) for s in group) for group in weight_groups(lengths, rows / ranks)]
        return groups

    def kinds(self) -> dict[Hashable, list[tuple[int, ...]]]:
        """Return all that decides on the kernels apart from sizes: mode, schedule, packed, cut, with logits.

        Each comes with its sizes: rows, tokens of a sequence, and tokens of a slice.
        """
        kinds: dict[Hashable, list[tuple[int, ...]]] = {}
        for each in self.micro_batches:
            shape, is_cut = each.shape, each.plan.num_slices > 1
            kind = self.training, self.schedule.name, shape.starts is not None, is_cut, shape.with_logits
            kinds.setdefault(kind, []).extend((shape.rows, shape.length, length) for length in each.plan.lengths)
        return kinds

    def signature(self, unit: SliceKey) -> tuple[bool, int, int, int]:
        """Return the values that decide the shapes of activations: (mode, rows, sequence length, slice length)."""
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
        if key not in self.slices:
            raise InFlightError(f"slice {key[1]}.{key[2]} is not live on stage {self.stage_id} (part {key[0]})")
        return self.slices[key]

    def drop(self, key: Key) -> None:
        """Drop a slice whose last action has run."""
        self.get(key)
        del self.slices[key]

    def assert_done(self, expected_peak: int) -> None:
        """Check that nothing is left, and that the peak number of live slices is the one in the schedule."""
        if self.slices:
            raise InFlightError(
                f"stage {self.stage_id} still holds slices {sorted(self.slices)} (part, micro-batch, slice) at the end "
                "of a batch"
            )
        if self.training and self.live_peak != expected_peak:
            raise InFlightError(
                f"stage {self.stage_id} held {self.live_peak} live slices at once, the schedule says {expected_peak}"
            )


@dataclass
class PartInFlight:
    """Hold the slices of one part in a batch, and alone decide how long their memory lives.

    | after                       | training                                      | evaluation                    |
    |-----------------------------|-----------------------------------------------|-------------------------------|
    | F                           | all is kept; on the last part no outputs      | kept, except on the last part |
    | the last F of a micro-batch | its whole inputs and labels go                | its keys and values go, too   |
    | the message of F            |                                               | the slice goes                |
    | B                           | outputs and loss go                           |                               |
    | B of slice 0                | the keys and values of the micro-batch go     |                               |
    | the message of B            | the slice goes; with a W to come, its inputs  |                               |
    | W                           | the slice goes                                |                               |
    """

    batch: BatchInFlight
    place: Place
    store: SliceStore
    sends_outputs: bool  # an action of its own sends the outputs of F; otherwise finishing F finishes its message
    sends_gradients: bool  # the same for the gradients of B

    def key(self, action: Action) -> Key:
        return self.place.part_id, action.micro_batch_id, action.slice_id

    def get(self, action: Action) -> SliceInFlight:
        return self.batch.get(self.key(action))

    def keep(self, action: Action, inputs: Tensors, outputs: Any, loss: Any) -> None:
        """Keep the results of F. The logits of the last part live on in the graph of the loss if it holds them."""
        if not self.place.is_last:
            self.batch.put(self.key(action), SliceInFlight(inputs, outputs))
        elif self.batch.training:
            self.batch.put(self.key(action), SliceInFlight(inputs, None, loss))

    def finish(self, action: Action) -> None:
        """Free all that no later action needs, now that `action` (F, B, W, or the message of F or B) has run."""
        self._FINISH[action.kind](self, action)

    def _finish_forward(self, action: Action) -> None:
        micro_batch = self.batch.micro_batches[action.micro_batch_id]
        # no later F of this micro-batch cuts its inputs or labels; live slices have views of their own
        if action.slice_id == micro_batch.plan.num_slices - 1:
            if self.place.is_first:
                micro_batch.inputs = None
            if self.place.is_last:
                micro_batch.labels = None
            if not self.batch.training:
                self.store.release(self.place.part_id, action.micro_batch_id)
        if not self.sends_outputs and not self.place.is_last:
            self._outputs_are_gone(action)

    def _finish_backward(self, action: Action) -> None:
        slice_ = self.get(action)
        # the graph is used up
        slice_.outputs = slice_.loss = None
        if not self.sends_gradients:
            self._gradients_are_gone(action)
        # B of slice 0 is the last one that reads keys and values of the micro-batch
        if action.slice_id == 0:
            self.store.release(self.place.part_id, action.micro_batch_id)

    def _outputs_are_gone(self, action: Action) -> None:
        if not self.batch.training:
            self.batch.drop(self.key(action))

    def _gradients_are_gone(self, action: Action) -> None:
        key = self.key(action)
        if key in self.batch.split:
            self.batch.get(key).inputs = ()
        else:
            self.batch.drop(key)

    _FINISH = {
        Kind.FORWARD: _finish_forward,
        Kind.SEND_ACTIVATION: _outputs_are_gone,
        Kind.BACKWARD: _finish_backward,
        Kind.SEND_GRAD: _gradients_are_gone,
        Kind.WEIGHT: lambda self, action: self.batch.drop(self.key(action)),
    }
