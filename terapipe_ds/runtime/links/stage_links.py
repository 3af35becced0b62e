"""Send and receive the activations and gradients of each part of one stage.

Each direction of a link has a process group of its own (`channel`). The first message of a signature, which tells the
sizes of a slice, announces its form.
After that `post` starts to receive a later message, `receive` waits until it is there, and sends do not block: their
memory stays until the peer is known to have received it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from terapipe_ds.attention.backends import plans_kept
from terapipe_ds.runtime.batch.cut_tensors import Tensors
from terapipe_ds.runtime.batch.in_flight import BatchInFlight
from terapipe_ds.runtime.failures.report import Wait
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.channel import AnnouncedChannel, ReceiveChannel, SendChannel, Signature
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.links.queues import QueueCheck
from terapipe_ds.runtime.links.specs import LinkError, MessageSpec
from terapipe_ds.schedule import Schedule
from terapipe_ds.schedule.action import Action, Kind, SliceKey
from terapipe_ds.schedule.proofs import budget_of_sends
from terapipe_ds.schedule.schedule import COMPUTE_OF

BATCHES_BY_HOST = 3  # batches of a kind whose messages go by way of the host: by then its kernels are loaded

HOST_SHARE = 0.01
"""Share of batches up to which those with sizes of their own go by way of the host, between the sizes that have run."""


class _KindRun:
    """Hold how many batches of a kind have run, and their fewest and most rows, and tokens of sequences and slices.

    cuDNN loads kernels for each size. For the sizes in `_planned` they are loaded.
    """

    def __init__(self) -> None:
        self.count = 0
        self._planned: set[tuple[int, ...]] = set()
        self.has_others = False  # the kernels that take the place of cuDNN's are loaded
        self._ranges: list[tuple[float, float]] = [(math.inf, 0.0)] * 3  # of rows, sequences and slices

    def covers(self, sizes: Sequence[tuple[int, ...]]) -> bool:
        """Return whether the sizes (`BatchInFlight.kinds`) lie between those that have run."""
        both = [(size, of) for each in sizes for size, of in zip(each, self._ranges, strict=True)]
        return all(least <= size <= largest for size, (least, largest) in both)

    def plans(self, sizes: Sequence[tuple[int, ...]], by_host: bool = False) -> bool:
        """Return whether cuDNN has plans for these sizes, or may build them in a batch `by_host`.

        The second sizes get none: the kernels that others will need load then.
        """
        return self._planned.issuperset(sizes) or (by_host and (self.count == 0 or self.has_others))

    def add(self, sizes: Sequence[tuple[int, ...]], plans: bool) -> None:
        """Count a batch, in which cuDNN `plans`, or other kernels take its place."""
        self.count += 1
        self.has_others |= not (plans or self.plans(sizes))
        self._planned.update(sizes if plans else ())
        both = zip(zip(*sizes, strict=True), self._ranges, strict=True)
        self._ranges = [(min(least, *each), max(largest, *each)) for each, (least, largest) in both]


class StageLinks:
    """Send and receive for one stage, addressed by actions of the schedule.

    A message that arrives shows how far its sender has come in its order. Everything that the sender had to receive
    before has then arrived as well, and the memory of those sends is freed. Without such messages, a stage waits for
    its oldest message before a link has more of them than the schedule's budget; the schedule is proven to run with
    this budget. Between two parts of this stage there is no wire: the tensors of one part wait here for the other.

    If messages wait for their other end on the device, the messages of the first batches of each kind go by way of the
    host. A batch with more or fewer rows, or with longer or shorter sequences or slices, than all before sends its
    messages that way too: a window limits longer sequences only, and has kernels of its own. CUDA loads a kernel at its
    first launch, and may then wait for all work on the device, even for receives that end only after the next work of
    this stage. CUDA_MODULE_LOADING=EAGER on all ranks loads most at the start, but none that is compiled later.

    cuDNN builds kernels for each new size, in batches by way of the host alone. Batches with sizes between those that
    have run go that way while they are at most `HOST_SHARE` of all. Until then other kernels compute their attention.

    With `announce_each` shapes may differ from one message to the next, and each is announced. Otherwise only the first
    of a signature is announced, and the next ones are received as soon as they arrive.
    """

    def __init__(
        self, wires: Wires, layout: Layout, stage_id: int, announce_each: bool = False, compiles: bool = False
    ) -> None:
        self.waiting: Callable[[Wait], AbstractContextManager[Any]] = nullcontext  # around waits for a send to arrive
        self._layout, self._stage_id, self._announce_each = layout, stage_id, announce_each
        self._post_on_device = wires.post_on_device
        # the first batch of a mode runs layers uncompiled, and the second one compiles their kernels
        self._loads_at_start = wires.loads_at_start and not compiles
        self._queues = QueueCheck(wires.num_queues, warns=stage_id == 0)
        self._run: defaultdict[Hashable, _KindRun] = defaultdict(_KindRun)  # by kind
        self._num_batches = self._num_by_host = 0
        self._plans = False, False
        self._batch: BatchInFlight | None = None
        self._budgets: WeakKeyDictionary[Schedule, int] = WeakKeyDictionary()  # of sends; they take long to compute
        self.outstanding_sends = 0  # the budget of each link in the open batch
        self._handed: dict[tuple[Kind, int, SliceKey], tuple[MessageSpec, Tensors]] = {}
        # By F or B and chunk. A wire between two parts of one stage does not exist: `hand_on` keeps the tensors for it
        self._in: dict[tuple[Kind, int], ReceiveChannel] = {}
        self._out: dict[tuple[Kind, int], SendChannel] = {}
        for ends in layout.wires():
            source, source_chunk, target, target_chunk = ends
            if stage_id in (source, target):
                activations, gradients = wires.by_ends[ends]
            if stage_id == source:
                self._out[Kind.FORWARD, source_chunk] = SendChannel(activations)
                spec_of = partial(self._gradient_spec, source_chunk)
                self._in[Kind.BACKWARD, source_chunk] = ReceiveChannel(gradients, spec_of)
            elif stage_id == target:
                self._in[Kind.FORWARD, target_chunk] = AnnouncedChannel(activations, self._signature)
                self._out[Kind.BACKWARD, target_chunk] = SendChannel(gradients)

    def _gradient_spec(self, chunk_id: int, unit: SliceKey) -> MessageSpec | None:
        sent = self._out[Kind.FORWARD, chunk_id].announced.get(self._signature(unit))
        return None if sent is None else sent.gradient

    def open_batch(self, batch: BatchInFlight) -> None:
        """Treat messages as those of `batch` from now on."""
        self._batch = batch
        self._handed.clear()
        # A kernel that CUDA loads now would wait for receives that end only after the next work of this stage
        by_host = self.goes_by_host(batch)
        # a plan for whole sequences is torch's, by sizes; those for slices are here, by shapes
        may_plan = all(run.plans(sizes, by_host) for run, sizes in self._runs_of(batch))
        self._plans = by_host and may_plan, may_plan
        self._num_batches += 1
        self._num_by_host += by_host
        for channel in (*self._in.values(), *self._out.values()):
            channel.go_by_host(by_host)
        if self._announce_each:
            self.forget_announced()
        # The schedule may be a new object in each batch
        if batch.schedule not in self._budgets:
            self._queues.check(batch.schedule)
            self._budgets[batch.schedule] = budget_of_sends(batch.schedule)
        self.outstanding_sends = self._budgets[batch.schedule]

    @property
    def host_share(self) -> float | None:
        """Return the share of batches whose messages went by way of the host; None if no device carries any."""
        return self._num_by_host / max(1, self._num_batches) if self._post_on_device else None

    def goes_by_host(self, batch: BatchInFlight) -> bool:
        """Return whether the messages of `batch` go by way of the host; the result is the same on all stages."""
        # one does in any case: kernels that are compiled as the job runs are loaded by then, and buffers made
        count, runs = 1 if self._loads_at_start else BATCHES_BY_HOST, self._runs_of(batch)
        # other kernels load where the first batch had the least and the largest sizes already
        is_loaded = all(run.has_others or run.plans(sizes) for run, sizes in runs)
        is_known = is_loaded and all(run.count >= count and run.covers(sizes) for run, sizes in runs)
        is_planned = all(run.plans(sizes) for run, sizes in runs)
        has_room = self._num_by_host < HOST_SHARE * self._num_batches
        return self._post_on_device and (not is_known or (has_room and not is_planned))

    def _runs_of(self, batch: BatchInFlight) -> list[tuple[_KindRun, list[tuple[int, ...]]]]:
        return [(self._run[kind], sizes) for kind, sizes in batch.kinds().items()]

    def plans_kept(self) -> AbstractContextManager[None]:
        """Return a context for the actions of the open batch, in which cuDNN loads no kernels behind receives."""
        return plans_kept(*self._plans) if self._post_on_device else nullcontext()

    def close_batch(self) -> None:
        """Check that every message of the batch was used, and wait until everything sent has been received."""
        # An unused message would be taken for one of the next batch
        for receiving in self._in.values():
            receiving.assert_empty()
        for sending in self._out.values():
            with self.waiting(_wait_of_send(sending)):
                sending.keep_at_most(0)
        # After some batches of a kind its kernels are loaded: later ones go by way of the device
        if self._batch is not None:
            for run, sizes in self._runs_of(self._batch):
                run.add(sizes, plans=self._plans[1])
        self._batch = None

    def _open(self) -> BatchInFlight:
        if self._batch is None:
            raise LinkError("no batch is open")
        return self._batch

    def _signature(self, unit: SliceKey) -> Signature:
        return unit if self._announce_each else self._open().signature(unit)

    def expect_new_kernels(self) -> None:
        """Send the next batches by way of the host, as the first ones. Call it between batches, on all stages."""
        self._run.clear()

    def forget_announced(self) -> None:
        """Announce each signature again. Call it between batches, on both ends of a link."""
        for receiving in self._in.values():
            if isinstance(receiving, AnnouncedChannel):
                receiving.known.clear()
        for sending in self._out.values():
            sending.announced.clear()

    def post(self, action: Action) -> None:
        """Begin to receive the input of a later F, or the gradients of a later B, while others are computed."""
        self._in[_of_input(action)].post(action.unit)

    def receive(self, action: Action) -> tuple[MessageSpec, Tensors]:
        """Return the input of F `action`, or of B a gradient for each output that requires one, once it has arrived."""
        channel = self._in.get(_of_input(action))
        if channel is None:
            return self._handed.pop((action.kind, action.part_id, action.unit))
        message = channel.wait(action.unit)
        # The peer has received all that it needed before this message
        sent_at = self._place(action, -1 if action.kind is Kind.FORWARD else 1)
        for sending in self._out.values():
            if sending.wire.peer_stage_id == channel.wire.peer_stage_id:
                sending.release(before=sent_at)
        return message

    def _place(self, action: Action, step: int) -> int:
        """Return the place, on its stage, of the F or B of the same unit on a neighbouring part."""
        kind = COMPUTE_OF.get(action.kind, action.kind)
        return self._open().schedule.nodes.place(kind, action.part_id + step, action.unit)

    def send_activation(self, action: Action, tensors: Sequence[torch.Tensor], is_tuple: bool) -> None:
        """Send the outputs of F; `is_tuple`: the layers returned a tuple."""
        channel = self._out[Kind.FORWARD, action.chunk_id]
        # The peer has received the message when something arrives that it sends after this action
        needed_at = self._place(action, 1)
        # Both ends know the form of a signature from its first message on; another form is an error here
        spec = MessageSpec.of(tensors, is_tuple)
        channel.announce(self._signature(action.unit), spec)
        channel.send(tensors, needed_at, spec)
        self._keep_budget(channel)

    def send_gradients(self, action: Action, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of what a slice has received; `action` is its B, or the message of B."""
        channel = self._out[Kind.BACKWARD, action.chunk_id]
        needed_at = self._place(action, -1)
        # The gradients have the form of the received activations; with a format both ends must know the packing
        activations = self._in[Kind.FORWARD, action.chunk_id].spec_of(action.unit)
        channel.send(gradients, needed_at, None if activations is None else activations.gradient)
        self._keep_budget(channel)

    def _keep_budget(self, channel: SendChannel) -> None:
        """Wait for the oldest message if too many are outstanding; it is proven that the peer will receive it."""
        if channel.num_outstanding > self.outstanding_sends:
            with self.waiting(_wait_of_send(channel)):
                channel.keep_at_most(self.outstanding_sends)

    def has_wire(self, kind: Kind, chunk_id: int) -> bool:
        """Return whether the result of an F (B) of the part at `chunk_id` goes to another stage."""
        return (kind, chunk_id) in self._out

    def copies_outputs(self, chunk_id: int) -> bool:
        """Return whether the wire from the part at `chunk_id` copies what it sends."""
        channel = self._out.get((Kind.FORWARD, chunk_id))
        return channel is not None and channel.wire.copies

    def hand_on(self, action: Action, tensors: Sequence[torch.Tensor], is_tuple: bool = True) -> None:
        """Keep the results of F or B `action` for the neighbour on this stage."""
        spec = MessageSpec.of(tensors, is_tuple)
        part_id = action.part_id + (1 if action.kind is Kind.FORWARD else -1)
        self._handed[action.kind, part_id, action.unit] = spec, tuple(tensor.detach() for tensor in tensors)

    def describe_wait(self, action: Action) -> Wait:
        """Describe for reports the message that an F or a B waits for, and its sender."""
        channel = self._in.get(_of_input(action))
        what = f"the {'input' if action.kind is Kind.FORWARD else 'gradients'} of {action}"
        if channel is None:
            return Wait(f"{what}, from this stage", ())
        return Wait(f"{what}: {channel.wire.name}", (channel.wire.peer,))


def _of_input(action: Action) -> tuple[Kind, int]:
    """Return the key of the channel of the message that an F or a B waits for."""
    return COMPUTE_OF.get(action.kind, action.kind), action.chunk_id


def _wait_of_send(channel: SendChannel) -> Wait:
    return Wait(f"the arrival of {channel.wire.name}", (channel.wire.peer,))
