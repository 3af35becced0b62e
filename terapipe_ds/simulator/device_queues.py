"""Find schedules that hang where the streams of a GPU share hardware queues: a model of host, streams and queues.

CUDA gives the streams of a process `CUDA_DEVICE_MAX_CONNECTIONS` queues (8 unless set, 1 in Megatron's scripts). A
queue is first in, first out: a wait for an event at its head holds everything behind it, including work of another
stream. A message over NCCL is a kernel on each side. Each kernel runs until the other one has begun. A receive that is
posted ahead can therefore stand in front of the very computation whose result the other side needs first.

    one queue, two receives posted ahead                  one receive per wire

    rank 0   F0.0  send ...                               rank 0   F0.0  send ...
    rank 1   recv 0.0 | recv 0.1 | F0.0 behind 0.1        rank 1   recv 0.0 | F0.0 | recv 0.1
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic

from terapipe_ds.schedule import Schedule, ScheduleError, build
from terapipe_ds.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind, SliceKey
from terapipe_ds.schedule.proofs import budget_of_sends
from terapipe_ds.schedule.schedule import COMPUTE_OF

DEFAULT_QUEUES = 8
"""The queues of a process that sets no CUDA_DEVICE_MAX_CONNECTIONS (CUDA C++ Programming Guide)."""

Message = tuple[Kind, int, SliceKey]
"""The computation that needs a message: F or B, its part and its unit."""

Stream = tuple[str, Kind, int, int]
"""The stream of a wire: "in" or "out", F or B, the part of this rank and the stage at the other end."""

_COMPUTE: Stream = ("compute", Kind.FORWARD, -1, -1)


@dataclass(frozen=True, slots=True)
class _Op:
    """Hold one operation that the host puts into a stream: a computation, a wait, or its side of a message."""

    stream: Stream
    after: int | None  # the operation that must have ended, beside the one before it in its stream
    message: Message | None = None  # that it sends or receives


class _Host:
    """Walk the actions of a stage as its links do; `program` has the operations that it launches, in its order."""

    def __init__(self, schedule: Schedule, stage_id: int, receives_per_wire: int | None) -> None:
        self.program: list[_Op] = []
        self._limit, self._budget = receives_per_wire, budget_of_sends(schedule)
        self._place = schedule.nodes.place
        self._posted: defaultdict[Stream, deque[Message]] = defaultdict(deque)
        self._begun: defaultdict[Stream, int] = defaultdict(int)
        self._sent: defaultdict[Stream, deque[tuple[int, Message]]] = defaultdict(deque)
        self._wire_of: dict[Message, Stream] = {}
        self._number_of: dict[Message, int] = {}  # in the program
        self._computed: int | None = None  # the latest operation of the stream of computations
        for action in schedule.for_stage(stage_id).actions:
            if action.kind in RECV_KINDS:
                kind = COMPUTE_OF[action.kind]
                wire, needed = ("in", kind, action.part_id, action.peer_stage_id), (kind, action.part_id, action.unit)
                self._wire_of[needed] = wire
                self._posted[wire].append(needed)
                self._begin(wire)
            elif action.kind in COMPUTE_KINDS:
                self._compute(action)
            elif action.kind in SEND_KINDS:
                self._send(action)

    def _launch(self, message: Message, wire: Stream) -> None:
        """Launch one side of a message, after all that the stream of computations has begun so far."""
        self._number_of[message] = len(self.program)
        self.program.append(_Op(wire, self._computed, message))

    def _launch_computation(self, message: Message | None = None) -> None:
        """Launch a computation, or the wait of their stream for a message."""
        after = None if message is None else self._number_of[message]
        self._computed = len(self.program)
        self.program.append(_Op(_COMPUTE, after))

    def _begin(self, wire: Stream) -> None:
        """Begin the receives of a wire that may begin now."""
        posted = self._posted[wire]
        while self._begun[wire] < len(posted) and (self._limit is None or self._begun[wire] < self._limit):
            self._launch(posted[self._begun[wire]], wire)
            self._begun[wire] += 1

    def _compute(self, action: Action) -> None:
        needed = action.kind, action.part_id, action.unit
        if needed in self._wire_of:
            wire = self._wire_of[needed]
            self._launch_computation(needed)
            self._posted[wire].popleft()
            self._begun[wire] -= 1
            self._begin(wire)
            self._release(wire[3], action)
        self._launch_computation()

    def _release(self, peer: int, action: Action) -> None:
        """Wait for the sends that the peer consumed before it sent the message that has now come."""
        part_id = action.part_id + (-1 if action.kind is Kind.FORWARD else 1)
        sent_at = self._place(action.kind, part_id, action.unit)
        for wire, sent in self._sent.items():
            while wire[3] == peer and sent and sent[0][0] < sent_at:
                self._launch_computation(sent.popleft()[1])

    def _send(self, action: Action) -> None:
        kind = COMPUTE_OF[action.kind]
        needed, wire = (kind, action.peer_part_id, action.unit), ("out", kind, action.part_id, action.peer_stage_id)
        self._launch(needed, wire)
        sent = self._sent[wire]
        sent.append((self._place(*needed), needed))
        while len(sent) > self._budget:
            self._launch_computation(sent.popleft()[1])


def hangs(programs: Sequence[Sequence[_Op]], num_queues: int | None, seed: int | None = None) -> bool:
    """Return whether some rank never ends its program: whether operations wait for one another in a circle.

    The queues of a GPU have the host's whole program in them, because launches do not block the host. An operation
    leaves its queue when it begins. A message ends, on both sides, once both kernels have begun.

    Args:
        programs: of each stage, from `programs_of`.
        num_queues: of each GPU; None gives each stream its own queue.
        seed: spreads streams over queues at random; None takes the queues in turn, which is exact for one queue.
    """
    draw = None if seed is None else random.Random(seed)
    # numbers of the beginnings of all operations, and of the ends of messages; an end takes both beginnings
    starts = [0, *accumulate(map(len, programs))]
    messages = dict.fromkeys(op.message for program in programs for op in program if op.message is not None)
    ends = {message: number for number, message in enumerate(messages, starts[-1])}
    missing = [0] * starts[-1] + [2] * len(ends)
    unlocked: list[list[int]] = [[] for _ in missing]
    # an operation waits for the end of the one before it in its stream, and for the beginning of the one in its queue
    for start, program in zip(starts, programs, strict=False):
        streams = list(dict.fromkeys([_COMPUTE, *(op.stream for op in program)]))
        size = len(streams) if num_queues is None else num_queues
        places = [draw.randrange(size) if draw else index % size for index in range(len(streams))]
        queue_of = dict(zip(streams, places, strict=True))
        ended = [index if op.message is None else ends[op.message] for index, op in enumerate(program, start)]
        latest: dict[Stream | int, int] = {}  # the end of the last operation of a stream, and its beginning in a queue
        for index, op in enumerate(program):
            queue = queue_of[op.stream]
            after = None if op.after is None else ended[op.after]
            for needed in (latest.get(op.stream), latest.get(queue), after):
                if needed is not None:
                    unlocked[needed].append(start + index)
                    missing[start + index] += 1
            if op.message is not None:
                unlocked[start + index].append(ended[index])
            latest[op.stream], latest[queue] = ended[index], start + index
    # begin all that may begin: what is left waits for itself
    able = [number for number, needs in enumerate(missing) if not needs]
    while able:
        for number in unlocked[able.pop()]:
            missing[number] -= 1
            if not missing[number]:
                able.append(number)
    return any(missing)


MOST_ACTIONS = 20_000
"""A longer schedule is replaced by one of fewer micro-batches, because its steady state repeats."""


def programs_of(schedule: Schedule, receives_per_wire: int | None = 1) -> list[list[_Op]]:
    """Return, for each stage, the operations that its host launches in a batch.

    With `receives_per_wire` of n, at most n receives of a wire have begun without a wait for them. With None each
    begins as soon as the schedule posts it. The engine's links do the same (`runtime/links`).
    """
    return [_Host(schedule, stage_id, receives_per_wire).program for stage_id in range(schedule.num_stages)]


def mappings_that_hang(schedule: Schedule, num_queues: int, tries: int = 60, limit_s: float = 1.0) -> tuple[int, int]:
    """Return the number of mappings of streams to queues that hang, and the number of tried mappings.

    One queue has one mapping, so that the result is exact and the same on all ranks. Otherwise the mappings are
    `tries` seeded draws, or as many as `limit_s` admits.
    """
    begin_s, count = monotonic(), 0
    programs = programs_of(shortened(schedule))
    if num_queues == 1:
        return int(hangs(programs, 1)), 1
    for seed in range(tries):
        count += hangs(programs, num_queues, seed)
        if monotonic() - begin_s > limit_s:
            return count, seed + 1
    return count, tries


def shortened(schedule: Schedule) -> Schedule:
    """Return the schedule; where it is long, return one of its name with fewer micro-batches, if `build` has it."""
    num_actions = sum(len(order) for order in schedule.orders)
    if num_actions <= MOST_ACTIONS:
        return schedule
    count = max(2 * schedule.num_stages, schedule.num_micro_batches * MOST_ACTIONS // num_actions)
    count = min(schedule.num_micro_batches, count + count % 2)  # chimera needs an even number
    slices = schedule.num_slices[:count]
    try:
        return build(schedule.name, schedule.num_stages, count, slices, chunks_per_stage=schedule.chunks_per_stage)
    except ScheduleError:
        return schedule
