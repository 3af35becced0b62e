"""The up to four channels of one stage: activations in and out, gradients in and out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from terapipe_ds.runtime.batch import Tensors
from terapipe_ds.runtime.buffers import BatchInFlight, Places
from terapipe_ds.runtime.groups import PipelineGroups
from terapipe_ds.runtime.link import AnnouncedSpecs, LinkError, MessageSpec, ReceiveChannel, SendChannel, Unit
from terapipe_ds.runtime.stall import Wait
from terapipe_ds.schedule.action import Action, Kind

_EVALUATION_SENDS = 8  # on their way at once; the next stage waits for nothing but these, so this cannot deadlock


class StageLinks:
    """Sends and receives of one stage, addressed by actions of the schedule.

    A message that arrives tells how far its sender has come in its order; whatever that rank had to receive before has
    then arrived as well, and the memory of those sends is given back.
    """

    def __init__(self, groups: PipelineGroups, stage_id: int, num_stages: int, device: torch.device) -> None:
        self._stage_id = stage_id
        self.waiting: Callable[[Wait], AbstractContextManager[Any]] = nullcontext  # around waits for a send to arrive
        self._batch: BatchInFlight | None = None
        self._places_of: dict[int, Places] = {}  # by the identity of a schedule, for as long as that lives
        self._activations_in: ReceiveChannel | None = None
        self._activations_out: SendChannel | None = None
        self._gradients_in: ReceiveChannel | None = None
        self._gradients_out: SendChannel | None = None
        if stage_id > 0:
            wire = groups.wire("activations", stage_id - 1, towards=False, device=device)
            announced = AnnouncedSpecs(wire, self._signature)
            self._activations_in = ReceiveChannel(wire, announced.spec_of, announced.learn)
            self._gradients_out = SendChannel(groups.wire("gradients", stage_id - 1, towards=True, device=device))
        if stage_id < num_stages - 1:
            self._activations_out = SendChannel(groups.wire("activations", stage_id + 1, towards=True, device=device))
            wire = groups.wire("gradients", stage_id + 1, towards=False, device=device)
            self._gradients_in = ReceiveChannel(wire, self._gradient_spec, _never_learned)

    # -- a batch -----------------------------------------------------------------------------------------------------

    def open_batch(self, batch: BatchInFlight) -> None:
        """Messages are those of ``batch`` from now on."""
        self._batch = batch
        key = id(batch.schedule)
        if key not in self._places_of:
            self._places_of[key] = Places(batch.schedule)
            weakref.finalize(batch.schedule, self._places_of.pop, key).atexit = False
        self._places = self._places_of[key]

    def close_batch(self) -> None:
        """Every message of the batch was used, and everything sent has been received."""
        for receiving in (self._activations_in, self._gradients_in):
            if receiving is not None:
                receiving.assert_empty()
        for sending in (self._activations_out, self._gradients_out):
            if sending is not None:
                with self.waiting(_wait_of_send(sending)):
                    sending.flush()
        self._batch = None

    def _open(self) -> BatchInFlight:
        if self._batch is None:
            raise LinkError("no batch is open")
        return self._batch

    def _signature(self, unit: Unit) -> tuple[bool, int, int, int]:
        return self._open().signature(unit)

    def _gradient_spec(self, unit: Unit) -> MessageSpec | None:
        assert self._activations_out is not None
        sent = self._activations_out.announced.get(self._signature(unit))
        return None if sent is None else sent.gradient()

    # -- activations -------------------------------------------------------------------------------------------------

    def post_activation(self, action: Action) -> None:
        assert self._activations_in is not None
        self._activations_in.post(action.unit)

    def receive_activation(self, action: Action) -> tuple[MessageSpec, Tensors]:
        """Blocks until the input of F ``action`` is here."""
        assert self._activations_in is not None and self._gradients_out is not None
        message = self._activations_in.wait(action.unit)
        sent_at = self._places.find(self._stage_id - 1, Kind.FORWARD, action.part_id - 1, action.unit)
        self._gradients_out.release(before=sent_at)
        return message

    def send_activation(self, action: Action, spec: MessageSpec, tensors: Sequence[torch.Tensor]) -> None:
        assert self._activations_out is not None
        needed_at = self._places.find(action.peer_stage_id, Kind.FORWARD, action.peer_part_id, action.unit)
        self._activations_out.announce(self._signature(action.unit), spec, consumed_at=needed_at)
        self._activations_out.send(tensors, consumed_at=needed_at)
        if not self._open().training:  # no gradient will tell that these have arrived
            with self.waiting(_wait_of_send(self._activations_out)):
                self._activations_out.keep_at_most(_EVALUATION_SENDS)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def post_gradients(self, action: Action) -> None:
        assert self._gradients_in is not None
        self._gradients_in.post(action.unit)

    def receive_gradients(self, action: Action) -> Tensors:
        """Blocks until the output gradients of B ``action`` are here; one for each output that requires one."""
        assert self._gradients_in is not None and self._activations_out is not None
        _, gradients = self._gradients_in.wait(action.unit)
        sent_at = self._places.find(self._stage_id + 1, Kind.BACKWARD, action.part_id + 1, action.unit)
        self._activations_out.release(before=sent_at)
        return gradients

    def send_gradients(self, action: Action, gradients: Sequence[torch.Tensor]) -> None:
        assert self._gradients_out is not None
        needed_at = self._places.find(action.peer_stage_id, Kind.BACKWARD, action.peer_part_id, action.unit)
        self._gradients_out.send(gradients, consumed_at=needed_at)

    def describe_wait(self, action: Action) -> Wait:
        """For reports: what an F or a B waits for, and from whom."""
        forward = action.kind is Kind.FORWARD
        channel = self._activations_in if forward else self._gradients_in
        assert channel is not None
        text = f"the {'input' if forward else 'gradients'} of {action}: {channel.wire.name}"
        return Wait(text, (channel.wire.peer,))


def _wait_of_send(channel: SendChannel) -> Wait:
    return Wait(f"the arrival of {channel.wire.name}", (channel.wire.peer,))


def _never_learned(unit: Unit) -> None:
    raise LinkError(f"gradients of slice {unit} are due, but its activations were never sent")
