"""Carry messages over links: the wires from one part to the next, one per direction.

A link is two channels, a `SendChannel` on one stage and a `ReceiveChannel` on the other, on a process group that
carries this direction only. Receives are posted ahead and sends do not block. Only `ReceiveChannel.wait` blocks, and
`SendChannel.keep_at_most` if more messages are on their way than the schedule's budget allows. Messages travel in the
order of the schedule, which is proved to be the same on both sides. A receiver names each by its unit
`(micro_batch_id, slice_id)`.

Shapes are not sent with each slice. The sender announces the first message of a signature (mode, rows, sequence length,
slice length); from then on both sides know the form of a slice of that signature. (In DeepSpeed's own order with
`dynamic_shape` each message has a signature of its own.) The gradient of a unit has the shape of its activation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from terapipe_ds.runtime.batch.cut_tensors import Tensors
from terapipe_ds.runtime.links.compression import Packing
from terapipe_ds.runtime.links.specs import LinkError, MessageSpec, TensorSpec
from terapipe_ds.runtime.links.staging import host_buffer, to_host
from terapipe_ds.schedule.action import SliceKey

Signature = Hashable

_TAGS_BY_HOST = 1 << 16  # added to a link's tag for messages in the control group, which also carries announcements

NO_LIMIT = timedelta(days=365)
"""Of waits that the watch-dog ends: torch's own limit is 10 minutes over NCCL, and 30 over gloo."""


class MessageBuffers:
    """Hand out memory for the messages of one end of a wire, so that no message over NCCL needs the allocator.

    torch records the stream of each point-to-point message on its tensor. Freed memory must then wait for an event of
    that stream. An allocator that runs out waits for all of them, even for receives that wait for this very rank.

    Memory is free again when nothing else holds its storage: no tensor, no view and no graph. The current stream orders
    its next use behind all work that the host has launched before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[torch.UntypedStorage] = []
        self.num_allocated = 0  # in all, for tests

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with any content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # one use: nothing but this object holds the storage
        free = [each for each in self._storages if int(torch._C._storage_Use_Count(each._cdata)) == 1]
        fitting = min(
            (each for each in free if each.nbytes() >= num_bytes), key=torch.UntypedStorage.nbytes, default=None
        )
        if fitting is None:
            # lengths have grown: free buffers are too small for them, so drop these before taking more
            self._storages = [each for each in self._storages if not any(each is small for small in free)]
            fitting = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._device).untyped_storage()
            self._storages.append(fitting)
            self.num_allocated += 1
        taken = torch.empty(0, dtype=dtype, device=self._device)
        return taken.set_(fitting, 0, shape)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Wire:
    """Describe the path of the messages of one channel; an engine gets its wires from `PipelineGroups.connect`."""

    peer: int  # the rank at the other end
    group: Any
    control: Any  # the group on the CPU
    device: torch.device
    name: str  # "activations to stage 1"
    staged: bool = False  # messages go by way of the host's memory
    streamed: bool = False  # a message is a kernel in a stream of the device, as over NCCL
    peer_stage_id: int = -1
    tag: int = 0  # tells this link from others of the same two ranks; backends without tags have a group for each
    wire_format: str | None = None  # of packed messages; None: they travel as they are

    def packing(self, spec: MessageSpec) -> Packing | None:
        """Return how messages of that form are packed into one buffer; None if they travel unpacked."""
        return Packing.of(self.wire_format, spec.tensors)

    def isend(self, tensor: torch.Tensor) -> Any:
        """Begin to send the result of `outgoing`; return the handle to wait for."""
        return torch_dist.isend(_bytes(tensor), self.peer, group=self.group, tag=self._message_tag)

    def irecv(self, buffer: torch.Tensor) -> Any:
        """Begin to receive into a `buffer`; return the handle to wait for."""
        return torch_dist.irecv(_bytes(buffer), self.peer, group=self.group, tag=self._message_tag)

    def wait(self, work: Any) -> None:
        """Wait for a message: on the host, or in the current stream if messages are in streams."""
        # with a limit a wait over NCCL would block the host; without one gloo takes the limit that its group began with
        work.wait() if self.streamed else work.wait(NO_LIMIT)

    def by_host(self) -> Wire:
        """Return the same wire over the control group, where no message makes the device wait for the other end."""
        return replace(self, group=self.control, staged=True, streamed=False)

    @property
    def copies(self) -> bool:
        """Return whether a message has memory of its own when its send begins (`outgoing`)."""
        return self.streamed or self.staged

    @property
    def _message_tag(self) -> int:
        return self.tag + _TAGS_BY_HOST if self.group is self.control else self.tag

    def outgoing(self, tensor: torch.Tensor, buffers: MessageBuffers | None = None) -> torch.Tensor:
        """Return `tensor` in a form that the backend can send: contiguous, and in the host's memory if it is staged."""
        tensor = tensor.detach()
        # a copy: the allocator must not wait for the message when the layer's output goes
        if self.streamed and buffers is not None:
            tensor = buffers.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        tensor = tensor.resolve_conj().resolve_neg().contiguous()  # torch shows no such view as bytes
        return to_host(tensor) if self.staged else tensor

    def buffer(self, spec: TensorSpec, buffers: MessageBuffers | None = None) -> torch.Tensor:
        """Return memory for the backend to receive such a tensor in, from `buffers` if messages are in streams."""
        if self.staged:
            return host_buffer(spec.shape, spec.dtype, self.device)
        if self.streamed and buffers is not None:
            return buffers.take(spec.shape, spec.dtype)
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def incoming(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor that arrived in `buffer`, on the device."""
        return buffer.to(self.device) if self.staged else buffer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor in a dtype that every backend sends: NCCL lacks bool, int16 and complex ones."""
    return tensor.reshape(-1).view(torch.uint8)


class _Channel:
    """Represent one end of one direction of a link. Between batches nothing is on its way."""

    def __init__(self, wire: Wire) -> None:
        self.wire = self._connected = wire
        self._buffers = MessageBuffers(wire.device)

    def go_by_host(self, by_host: bool) -> None:
        """Choose how messages of the new batch travel; both ends must choose the same."""
        self.wire = self._connected.by_host() if by_host else self._connected


class SendChannel(_Channel):
    """Send on one direction of a link."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.announced: dict[Signature, MessageSpec] = {}
        self._in_flight: deque[tuple[int, list[Any], list[torch.Tensor]]] = deque()
        self._announcements: list[tuple[Any, torch.Tensor]] = []  # they go before the next message, as a part of it

    @property
    def num_outstanding(self) -> int:
        """Return how many messages keep their memory here, because the peer may not have them yet."""
        return len(self._in_flight)

    def announce(self, signature: Signature, spec: MessageSpec) -> None:
        """Announce to the receiver, once per signature, the form of its messages; later ones must keep this form."""
        before = self.announced.get(signature)
        if before is None:
            self.announced[signature] = spec
            announcement = spec.encode()
            work = torch_dist.isend(announcement, self.wire.peer, group=self.wire.control, tag=self.wire.tag)
            self._announcements.append((work, announcement))
        elif before != spec:
            raise LinkError(
                f"{self.wire.name}: the layers gave {spec} for a slice for which they gave {before} before; what a "
                "stage hands on may depend on the batch size, the sequence length and the slice length only. Before a "
                "batch with other shapes call engine.reset_activation_shape(). If micro-batches of one batch differ, "
                'pad the inputs, or take PipelineModule(dynamic_shape=True), terapipe.slices 1 and "schedule": "1f1b"'
            )

    def send(self, tensors: Sequence[torch.Tensor], consumed_at: int, spec: MessageSpec | None = None) -> None:
        """Send without blocking. `consumed_at` is the index in the peer's order of the unit that waits."""
        # One buffer of fewer bytes if the wire has a format
        packing = None if spec is None else self.wire.packing(spec)
        if packing is not None:
            tensors = [packing.pack(tensors)]
        ready = [self.wire.outgoing(t, self._buffers) for t in tensors]
        works = [self.wire.isend(t) for t in ready]
        # The announcement goes with the message: its memory is free when the message has arrived
        for work, announcement in self._announcements:
            works.append(work)
            ready.append(announcement)
        self._announcements.clear()
        self._in_flight.append((consumed_at, works, ready))

    def release(self, before: int) -> None:
        """Free the memory of messages that the peer has consumed: it has run its order up to this index."""
        while self._in_flight and self._in_flight[0][0] < before:
            self._wait_oldest()  # done already, but gloo frees the memory only in a wait

    def keep_at_most(self, count: int) -> None:
        """Wait for the oldest messages until at most `count` are outstanding.

        Call it with the count that the schedule is proven to run with (`budget_of_sends`), or when the peer has all
        messages that it waits for.
        """
        while len(self._in_flight) > count:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        _, works, _ = self._in_flight.popleft()
        for work in works:
            self.wire.wait(work)


@dataclass(slots=True)
class _Posted:
    unit: SliceKey
    spec: MessageSpec | None = None
    packing: Packing | None = None
    works: tuple[Any, ...] = ()
    buffers: Tensors = ()


class ReceiveChannel(_Channel):
    """Receive on one direction of a link; `spec_of` returns the spec of a unit's message, or None while unknown."""

    def __init__(self, wire: Wire, spec_of: Callable[[SliceKey], MessageSpec | None]) -> None:
        super().__init__(wire)
        self.spec_of = spec_of
        self._posted: deque[_Posted] = deque()
        self._started = 0  # the number of started receives, from the first on

    def post(self, unit: SliceKey) -> None:
        """Receive the message of `unit` as soon as its shape is known. Post units in the order of the schedule."""
        self._posted.append(_Posted(unit))
        self._start_posted()

    def _start_posted(self) -> None:
        """Start the receives whose shape is known, in order: one behind an unknown shape has to wait for it.

        In streams one receive is at work at a time. If streams share a queue of the device, a second one could precede
        work that the peer needs first (`simulator/device_queues.py`).
        """
        while self._started < (min(1, len(self._posted)) if self.wire.streamed else len(self._posted)):
            posted, wire = self._posted[self._started], self.wire
            # Messages arrive in order, so that a later one cannot be received into the memory of this one
            spec = posted.spec = self.spec_of(posted.unit)
            if spec is None:
                return
            packing = posted.packing = wire.packing(spec)
            posted.buffers = tuple([wire.buffer(of, self._buffers) for of in (packing or spec).tensors])
            posted.works = tuple([wire.irecv(buffer) for buffer in posted.buffers])
            self._started += 1

    def wait(self, unit: SliceKey) -> tuple[MessageSpec, Tensors]:
        """Return the message of `unit`, which must be the next one of the schedule, once it has arrived."""
        if not self._posted or self._posted[0].unit != unit:
            expected = self._posted[0].unit if self._posted else "nothing"
            raise LinkError(f"{self.wire.name}: asked for the message of {unit}, but the next one posted is {expected}")
        # Messages since the post may have made the shape known; otherwise wait for the announcement
        self._start_posted()
        if not self._started:
            self._learn(unit)
            self._start_posted()
        posted = self._posted.popleft()
        self._started -= 1
        assert posted.spec is not None
        # Here the main thread waits for the peer
        for work in posted.works:
            self.wire.wait(work)
        if self.wire.streamed:
            self._start_posted()  # the next one, now that the wait for this one is over
        came = tuple(map(self.wire.incoming, posted.buffers))
        return posted.spec, came if posted.packing is None else posted.packing.unpack(*came)

    def _learn(self, unit: SliceKey) -> None:
        """Get the spec of a unit at the latest moment; this may block."""
        raise LinkError(
            f"{self.wire.name}: the message of {unit} is due, but the activations it belongs to were never sent"
        )

    def assert_empty(self) -> None:
        """Check, at the end of a batch, that every posted receive was used."""
        if self._posted:
            raise LinkError(f"{self.wire.name}: never used the message of {[p.unit for p in self._posted]}")


class AnnouncedChannel(ReceiveChannel):
    """Receive messages whose forms the sender announces: the other end of `SendChannel.announce`."""

    def __init__(self, wire: Wire, signature_of: Callable[[SliceKey], Signature]) -> None:
        self.known: dict[Signature, MessageSpec] = {}
        self._signature_of = signature_of
        super().__init__(wire, lambda unit: self.known.get(signature_of(unit)))

    def _learn(self, unit: SliceKey) -> None:
        announcement = MessageSpec.blank()
        torch_dist.recv(announcement, self.wire.peer, group=self.wire.control, tag=self.wire.tag)
        self.known[self._signature_of(unit)] = MessageSpec.decode(announcement)
