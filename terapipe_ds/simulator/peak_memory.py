"""Count the bytes of every stage over a replay. They follow from the stage's order alone; times only date them."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Protocol

from terapipe_ds.schedule import Action, Kind, Schedule
from terapipe_ds.schedule.action import SliceKey
from terapipe_ds.simulator.offload import LEAVES_AFTER, offloaded_until

Spans = Sequence[Sequence[tuple[int, int]]]
"""`spans[micro_batch_id][slice_id]` is (start, stop)."""
ByteSteps = tuple[tuple[float, int], ...]
"""(from this time on, bytes), times ascending."""

_Part = tuple[int, tuple[int, int]]  # a slice on a part
_Held = tuple[str, int, int, int]
"""(method that says its bytes, part, micro-batch, slice; -1 for what the slices of a micro-batch share)."""
_POOLED = "store_bytes", "store_grad_bytes", "evaluation_bytes"
"""Methods whose bytes the slice store lends (`attention.buffers.BufferPool`): it keeps the most of each kind."""


class Memory(Protocol):
    """Define the simulator's interface of memory; `planner.memory.MemoryModel` describes each share."""

    @property
    def offloads(self) -> bool: ...
    @property
    def host_bytes_per_s(self) -> float | None: ...
    @property
    def process_bytes(self) -> int: ...
    def key_of(self, part_ids: Sequence[int]) -> tuple[object, ...]: ...
    def static_bytes(self, *part_ids: int) -> int: ...
    def gradient_bytes(self, *part_ids: int) -> int: ...
    def step_bytes(self, *part_ids: int) -> int: ...
    def store_bytes(self, part_id: int, sequence_length: int) -> int: ...
    def store_grad_bytes(self, part_id: int, sequence_length: int, largest: int) -> int: ...
    def evaluation_bytes(self, part_id: int, sequence_length: int, largest: int) -> int: ...
    def whole_bytes(self, part_id: int, sequence_length: int) -> int: ...
    def slice_bytes(self, part_id: int, tokens: int, prefix: int) -> int: ...
    def staying_bytes(self, part_id: int, tokens: int) -> int: ...
    def weight_bytes(self, part_id: int, tokens: int, prefix: int) -> int: ...
    def sent_bytes(self, part_id: int, tokens: int) -> int: ...
    def working_bytes(self, part_id: int, tokens: int, prefix: int, is_whole: bool) -> int: ...
    def weight_groups(self, part_id: int, lengths: Sequence[int]) -> Sequence[Sequence[int]]: ...
    def joined_bytes(self, part_id: int, tokens: int) -> int: ...
    def factor_bytes(self, part_id: int, tokens: int) -> int: ...
    def product_bytes(self, part_id: int, span: tuple[int, int], group_tokens: int, is_split: bool) -> int: ...


def bytes_of_stage(
    schedule: Schedule, stage_id: int, spans: Spans, memory: Memory, outstanding: int, apart: bool = False
) -> list[int]:
    """Return the bytes of a stage before its first computation, and then two numbers per computation of its order: the
    bytes while it runs, and the bytes once it has run; after the last one, while the optimizer steps. With `apart` the
    bytes at its start and end are in place of the larger of both.

    A slice counts from its F to the end of its B; then the bytes for its weight gradients count, until the W or B of
    the last slice that shares their products. The store of a micro-batch counts from its first F to its last B on the
    part, the gradients of the store from its first B to its last. For a micro-batch of one slice `whole_bytes` takes
    the place of both. The memory of stores, and of their gradients, is lent again and again: the stage keeps the most
    that they take at a time. Without backward a slice counts while its F runs, and the store until the F of the last
    slice: an evaluation keeps nothing else. The gradients of a part's parameters come while its first B runs, as the
    slice's kept bytes go, and stay. Messages count while the stage cannot know of their arrival: at most `outstanding`
    of them on each link, its budget. In training the output of F is among the kept bytes of the slice.
    """
    order = schedule.orders[stage_id]
    parts = {part_id for (stage, _), part_id in schedule.placement.items() if stage == stage_id}
    needed = needed_by(order, schedule.forward_only, spans)
    pooled = _pooled_bytes(needed, spans, memory)
    others = {held: ends for held, ends in needed.items() if held[0] not in _POOLED}
    gained, after, late, twice = changes_of(order, others, spans, memory)
    # the gradients of a part's parameters come with its first B, and stay
    begun: list[int] = []
    for index, action in enumerate(order):
        if action.kind is Kind.BACKWARD and action.part_id not in begun:
            after[index] += memory.gradient_bytes(*begun, action.part_id) - memory.gradient_bytes(*begun)
            begun.append(action.part_id)
    # messages stay until the stage knows that they have arrived
    for index, until, action in _unheard(schedule, stage_id, outstanding):
        if action.kind is Kind.BACKWARD or schedule.forward_only:  # the next part sends back as much as it receives
            start, stop = spans[action.micro_batch_id][action.slice_id]
            size = memory.sent_bytes(action.part_id + (action.kind is Kind.FORWARD), stop - start)
            after[index] += size
            after[until] -= size
    for forward, until, size in _away(order, spans, memory) if memory.offloads else ():
        after[forward + LEAVES_AFTER] -= size
        gained[until] += size
    # a walk over the order adds up the bytes that come and go
    now = memory.process_bytes + memory.static_bytes(*parts) + pooled
    numbers = [now]
    for index, action in enumerate(order):
        start, stop = spans[action.micro_batch_id][action.slice_id]
        now += gained[index]
        is_whole = len(spans[action.micro_batch_id]) == 1
        running = now + memory.working_bytes(action.part_id, stop - start, start, is_whole) - twice[index]
        both = running + late[index], running + after[index]
        numbers += both if apart else [max(both)]
        now += after[index]
        numbers.append(now)
    if not schedule.forward_only:  # the optimizer steps when all has run
        numbers[-1] += memory.step_bytes(*parts)
    return numbers


def needed_by(order: Sequence[Action], is_evaluation: bool, spans: Spans) -> dict[_Held, tuple[int, int]]:
    """Return the indices of the first and the last computation that need a share."""
    needed: dict[_Held, tuple[int, int]] = {}
    for index, action in enumerate(order):
        for held in _held_for(action, len(spans[action.micro_batch_id]) == 1, is_evaluation):
            needed[held] = needed.get(held, (index,))[0], index
    return needed


def _pooled_bytes(needed: Mapping[_Held, tuple[int, int]], spans: Spans, memory: Memory) -> int:
    """Return the most bytes at a time of each kind of share that is lent, all kinds together."""
    total = 0
    for method in _POOLED:
        changes: Counter[int] = Counter()
        for held, (first, last) in needed.items():
            if held[0] == method:
                size = _size(held, spans, memory)
                changes[first] += size
                changes[last + 1] -= size
        total += _largest_sum(changes)
    return total


def changes_of(
    order: Sequence[Action], needed: Mapping[_Held, tuple[int, int]], spans: Spans, memory: Memory
) -> tuple[Counter[int], ...]:
    """Return, by index in the order, the bytes that come when a computation starts, and when it has run.

    The third result has the bytes that a computation holds at its end alone. The fourth has its working bytes that the
    other results count already. `needed` has the shares that count, as `needed_by` returns them.
    """
    split = {(action.part_id, action.unit) for action in order if action.kind is Kind.WEIGHT}
    gained: Counter[int] = Counter()
    after: Counter[int] = Counter()
    twice: Counter[int] = Counter()
    late = _join(order, split, spans, memory, after)
    for index, action in enumerate(order):
        # the bytes for W stay from B to W
        if action.kind is not Kind.FORWARD and (action.part_id, action.unit) in split:
            size = _size(("weight_bytes", action.part_id, *action.unit), spans, memory)
            after[index] += size if action.kind is Kind.BACKWARD else -size
            start, stop = spans[action.micro_batch_id][action.slice_id]
            twice[index] = memory.factor_bytes(action.part_id, stop - start)
            late[index] += twice[index] if action.kind is Kind.BACKWARD else 0  # none wait when a B begins
    for held, (first, last) in needed.items():
        size = _size(held, spans, memory)
        gained[first] += size
        after[last] -= size
    return gained, after, late, twice


def _join(
    order: Sequence[Action], split: Collection[_Part], spans: Spans, memory: Memory, after: Counter[int]
) -> Counter[int]:
    """Add the bytes that wait after a W, or a whole B, until the slices whose products are one have all run.

    Return the bytes by which their products exceed the B or W of the last one.
    """
    late: Counter[int] = Counter()
    groups: dict[_Part, tuple[set[_Part], list[int], int]] = {}  # missing slices, bytes that wait, tokens of all
    for index, action in enumerate(order):
        part_id, (m, slice_id) = key = action.part_id, action.unit
        if action.kind is Kind.FORWARD or (action.kind is Kind.BACKWARD and key in split):
            continue
        # the first of a micro-batch finds the groups of all
        if key not in groups:
            lengths = [stop - start for start, stop in spans[m]]
            for own in memory.weight_groups(part_id, lengths):
                members = {(part_id, (m, other)) for other in own}
                groups |= dict.fromkeys(members, (members, [], sum(lengths[other] for other in own)))
        missing, waiting, tokens = groups[key]
        missing.discard(key)
        start, stop = spans[m][slice_id]
        if missing:
            size = memory.joined_bytes(part_id, stop - start)
            if key in split:
                size = memory.weight_bytes(part_id, stop - start, start)
            waiting.append(size)
            after[index] += size
        else:
            after[index] -= sum(waiting)
            if waiting:
                late[index] = memory.product_bytes(part_id, (stop - start, start), tokens, key in split)
    return late


def _unheard(schedule: Schedule, stage_id: int, outstanding: int) -> list[tuple[int, int, Action]]:
    """Return a stage's messages, each with the index in its order that sends it and the index after which it is freed.

    A later message from the other end, sent after that end has taken the message, frees it before the stage computes.
    So does the stage's own wait for the oldest of more than `outstanding` on a link. The last computation frees the
    rest.
    """
    nodes, order = schedule.nodes, schedule.orders[stage_id]
    first = int(nodes.first[stage_id])
    own = slice(first, first + len(order))
    inputs, sources = nodes.inputs[own].tolist(), nodes.sources[own].tolist()
    outputs, peers = nodes.outputs[own].tolist(), nodes.peers[own].tolist()
    links: dict[tuple[int, Kind, int], deque[tuple[int, int]]] = {}  # messages in flight: (index here, its taker)
    given_back: list[tuple[int, int, Action]] = []
    for index, action in enumerate(order):
        for (peer, *_), sent in links.items() if sources[index] >= 0 else ():
            while peer == sources[index] and sent and sent[0][1] < inputs[index]:
                given_back.append((sent[0][0], index - 1, order[sent.popleft()[0]]))
        if peers[index] >= 0:
            sent = links.setdefault((peers[index], action.kind, action.part_id), deque())
            sent.append((index, outputs[index]))
            if len(sent) > outstanding:
                given_back.append((sent[0][0], index, order[sent.popleft()[0]]))
    last = len(order) - 1
    return given_back + [(index, last, order[index]) for sent in links.values() for index, _ in sent]


def offloaded_bytes(spans: Spans, memory: Memory) -> Callable[[int, SliceKey], int]:
    """Return a function of part and slice: the bytes that go to the host, all kept ones and a whole sequence's K and V.

    Equal slices of a part have equal bytes.
    """

    @functools.cache
    def bytes_of(part_id: int, start: int, stop: int, is_whole: bool) -> int:
        size = memory.slice_bytes(part_id, stop - start, start)
        size -= min(size, memory.staying_bytes(part_id, stop - start))
        return size + (memory.whole_bytes(part_id, stop) if is_whole else 0)

    return lambda part_id, unit: bytes_of(part_id, *spans[unit[0]][unit[1]], len(spans[unit[0]]) == 1)


def _away(order: Sequence[Action], spans: Spans, memory: Memory) -> Iterator[tuple[int, int, int]]:
    """Yield, for each offloaded slice, the computation that makes it, the one at whose start it is back, its bytes."""
    places = {(action.part_id, action.unit): i for i, action in enumerate(order) if action.kind is Kind.FORWARD}
    bytes_of = offloaded_bytes(spans, memory)
    for key, until in offloaded_until(order).items():
        yield places[key], until, bytes_of(*key)


def host_bytes(order: Sequence[Action], spans: Spans, memory: Memory) -> int:
    """Return the most bytes that a stage's offloaded slices take on the host at a time."""
    changes: Counter[int] = Counter()
    for forward, until, size in _away(order, spans, memory):
        changes[forward] += size
        changes[until + 1] -= size
    return _largest_sum(changes)


def _largest_sum(changes: Mapping[int, int]) -> int:
    return max(accumulate((changes[index] for index in sorted(changes)), initial=0))


def _held_for(action: Action, is_whole: bool, is_evaluation: bool) -> list[_Held]:
    """Return the shares that an action needs while it runs; W needs no keys and values any more."""
    if action.kind is Kind.WEIGHT:
        return []
    shared = ["whole_bytes" if is_whole else "evaluation_bytes" if is_evaluation else "store_bytes"]
    if action.kind is Kind.BACKWARD and not is_whole:
        shared.append("store_grad_bytes")
    of_slice = "slice_bytes", action.part_id, *action.unit
    return [of_slice, *((method, action.part_id, action.micro_batch_id, -1) for method in shared)]


def _size(held: _Held, spans: Spans, memory: Memory) -> int:
    method, part_id, micro_batch_id, slice_id = held
    start, stop = spans[micro_batch_id][slice_id]
    numbers = (stop - start, start) if slice_id >= 0 else (stop,)
    if method in ("store_grad_bytes", "evaluation_bytes"):
        numbers = stop, max(end - begin for begin, end in spans[micro_batch_id])
    size: int = getattr(memory, method)(part_id, *numbers)
    return size


def over_time(numbers: Sequence[int], times: Sequence[tuple[float, float]]) -> ByteSteps:
    """Return the numbers of `bytes_of_stage` where they change over time; `times`: (start, end) by computation."""
    moments = [0.0, *(time_s for span in times for time_s in span)]
    steps = dict(zip(moments, numbers, strict=True))
    return tuple(next(same) for _, same in groupby(steps.items(), key=lambda step: step[1]))
