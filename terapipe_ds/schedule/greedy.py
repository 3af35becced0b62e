"""Write greedy orders: a stage runs whatever it can, and its order is recorded while a clock runs.

Where no closed form suits every shape, the stages are played: a free stage starts the best computation that it can run,
and the sequence of its computations is its order. Such an order cannot deadlock, for it has just been run. `play` is
the clock, for any times and any choice; `planner.orders` plays with the costs at hand, and `list_schedule` with unit
slots.

`list_schedule` ranks computations so: a B first, for the stages before wait for it; then an F, of the later part, which
brings backwards sooner; a W only where nothing else can run. There are three rules for several B: the one that waits
longest (then the one of the later part); always the earlier part, which makes room for the next F; or always the later
part. The best rule depends on the shape, so all are played and the shortest order wins. Where backwards are split, the
share of W is unknown here: a layer leaves half of its backward to W, or a third. So the clock runs at several such
times, and the order that is shortest over all of them wins.

An F that would make a place hold more live slices than its limit cannot run. The play never gets stuck as long as
each limit is at least the slices of every micro-batch: where F stand at their limits, the oldest micro-batch is whole
on each of those parts, hence on the last one, and there its B can run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Generic, NamedTuple, TypeVar

from terapipe_ds.schedule.action import Kind, PlacedUnit, ScheduleError, SliceKey
from terapipe_ds.schedule.clock import BACKWARD, FORWARD, WEIGHT, end_of_orders
from terapipe_ds.schedule.placement import Placement

Unit = TypeVar("Unit", int, SliceKey)
Slots = tuple[int, int, int]
"""What F, B and W take; without W where the last one is 0."""

UNSPLIT: tuple[Slots, ...] = ((1, 2, 0),)
SPLIT: tuple[Slots, ...] = ((5, 5, 5), (5, 6, 4), (5, 7, 3))
"""A backward takes two forwards; of it W is a half, two fifths or three tenths."""

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
_MANY_UNITS = 1500  # above this only one clock runs: planning builds orders for many numbers of slices


# --- the clock


@dataclass(slots=True)
class Lane(Generic[Unit]):
    """Hold one place (stage, chunk): its units in the order of their F and of their B, and its progress."""

    stage_id: int
    chunk_id: int
    part_id: int
    ahead: Sequence[Unit]
    back: Sequence[Unit]
    before: Lane[Unit] | None = None  # the place of the part before, in this direction
    after: Lane[Unit] | None = None
    live: int = 0
    done: list[int] = field(default_factory=lambda: [0, 0, 0])  # F, B and W that have started
    ends: dict[Unit, float] = field(default_factory=dict)  # of F, on this stage
    arrivals: tuple[dict[Unit, float], dict[Unit, float]] = field(default_factory=lambda: ({}, {}))  # F, B elsewhere

    def next_forward(self, now: float) -> Unit | None:
        """Return the next F, if its input has arrived."""
        if self.done[FORWARD] == len(self.ahead):
            return None
        unit = self.ahead[self.done[FORWARD]]
        return unit if self.before is None or self.before.arrivals[FORWARD].get(unit, now + 1) <= now else None

    def next_backward(self) -> tuple[float, Unit] | None:
        """Return the time from which the next B can run, and the unit; None where the time is not known yet."""
        if self.done[BACKWARD] == len(self.back) or (unit := self.back[self.done[BACKWARD]]) not in self.ends:
            return None
        came = 0.0 if self.after is None else self.after.arrivals[BACKWARD].get(unit)
        return None if came is None else (max(came, self.ends[unit]), unit)

    @property
    def pending_weights(self) -> int:
        """Return the number of W that can run."""
        return self.done[BACKWARD] - self.done[WEIGHT]

    @property
    def next_weight(self) -> Unit:
        return self.back[self.done[WEIGHT]]


class Choice(NamedTuple, Generic[Unit]):
    """Hold a computation that a stage starts; `kind` is a number of `schedule.nodes`."""

    kind: int
    lane: Lane[Unit]
    unit: Unit


Choose = Callable[[list[Lane[Unit]], float], Choice[Unit] | None]
"""Chooses for the places of a free stage, at a time; None: the stage waits."""

Run = Callable[[Choice[Unit], float], tuple[float, float]]
"""Returns when a computation ends that starts at a time, and when its result is at the other end."""


def connect(lanes: Mapping[tuple[int, int], Lane[Unit]]) -> None:
    """Connect each lane, by (direction, part), with the lanes before and after it."""
    for (direction, part_id), lane in lanes.items():
        lane.before, lane.after = lanes.get((direction, part_id - 1)), lanes.get((direction, part_id + 1))


def play(
    lanes: list[list[Lane[Unit]]], choose: Choose[Unit], run: Run[Unit], num_kinds: int
) -> list[list[Choice[Unit]]] | None:
    """Return the computations that each stage ran; None where no stage can go on."""
    orders: list[list[Choice[Unit]]] = [[] for _ in lanes]
    free_at = [0.0] * len(lanes)
    left = num_kinds * sum(len(lane.ahead) for of_stage in lanes for lane in of_stage)
    moments = [(0.0, stage_id) for stage_id in range(len(lanes))]  # a stage may have something new to run then
    while moments:
        now, stage_id = heapq.heappop(moments)
        if free_at[stage_id] > now or (choice := choose(lanes[stage_id], now)) is None:
            continue
        end, arrival = run(choice, now)
        kind, lane, unit = choice
        free_at[stage_id] = end
        orders[stage_id].append(choice)
        # the place counts its live slices, and records when results arrive
        lane.done[kind] += 1
        lane.live += (kind == FORWARD) - (kind == num_kinds - 1)
        if kind == FORWARD:
            lane.ends[unit] = end
        left -= 1
        heapq.heappush(moments, (end, stage_id))
        if kind != WEIGHT:
            lane.arrivals[kind][unit] = arrival
            peer = lane.after if kind == FORWARD else lane.before
            if peer is not None:
                heapq.heappush(moments, (arrival, peer.stage_id))
    return None if left else orders


# --- orders without costs

_Ready = tuple[float, Lane[SliceKey]]
_RULES: tuple[Callable[[_Ready], tuple[float, ...]], ...] = (
    lambda ready: (ready[0], -ready[1].part_id),
    lambda ready: (ready[1].part_id,),
    lambda ready: (-ready[1].part_id,),
)
"""Of several B that can run, (since when, where), the least one by such a rule runs first."""


def list_schedule(
    placement: Placement,
    num_slices: Sequence[int],
    limits: Mapping[tuple[int, int], int],
    *,
    times: Sequence[Slots],
    directions: Sequence[int] | None = None,
) -> list[list[PlacedUnit]]:
    """Return the orders of the stages of a placement: from several plays the shortest one over all `times`.

    `limits` has for each place the maximum of live slices. `directions` has for each micro-batch the chunk that it
    passes on every stage, where every part has a place of each direction; without it a micro-batch passes all places.
    """
    units = sum(num_slices) * len(placement) * _num_kinds(times[0])
    clocks, rules = (times, _RULES) if units <= _MANY_UNITS else ([times[len(times) // 2]], _RULES[:2])
    plays = [
        _play_slots(_lanes(placement, num_slices, directions), slots, limits, rule)
        for slots, rule in product(clocks, rules)
    ]

    def length(orders: list[list[PlacedUnit]]) -> float:
        return sum(num_slots(orders, placement, slots) / sum(slots) for slots in times)

    return min(plays, key=length)


def _num_kinds(slots: Slots) -> int:
    return 2 + (slots[WEIGHT] > 0)


def num_slots(orders: list[list[PlacedUnit]], placement: Placement, slots: Slots) -> float:
    """Return the length of orders in slots."""
    parts = [[(*unit[:3], placement[stage_id, unit[3]]) for unit in order] for stage_id, order in enumerate(orders)]
    numbers = {unit: number for number, unit in enumerate(unit for order in parts for unit in order)}
    steps = {Kind.FORWARD: -1, Kind.BACKWARD: 1}  # to the part whose result a computation takes
    inputs = [
        numbers.get((kind, m, s, part + steps[kind]), len(numbers)) if kind in steps else len(numbers)
        for kind, m, s, part in numbers
    ]
    seconds = [float(slots[_KINDS.index(unit[0])]) for unit in numbers]
    orders_of_numbers = [[numbers[unit] for unit in order] for order in parts]
    return end_of_orders(orders_of_numbers, inputs, seconds, seconds, [-1] * len(numbers))


def _play_slots(
    lanes: list[list[Lane[SliceKey]]],
    slots: Slots,
    limits: Mapping[tuple[int, int], int],
    rule: Callable[[_Ready], tuple[float, ...]],
) -> list[list[PlacedUnit]]:
    """Return the computations that each stage ran with unit slots."""

    def choose(places: list[Lane[SliceKey]], now: float) -> Choice[SliceKey] | None:
        came = [(found[0], lane, found[1]) for lane in places if (found := lane.next_backward()) and found[0] <= now]
        if came:
            _, lane, unit = min(came, key=lambda ready: rule(ready[:2]))
            return Choice(BACKWARD, lane, unit)
        for lane in reversed(places):  # the later parts first
            has_room = lane.live < limits[lane.stage_id, lane.chunk_id]
            if has_room and (ahead := lane.next_forward(now)) is not None:
                return Choice(FORWARD, lane, ahead)
        pending = [lane for lane in places if slots[WEIGHT] and lane.pending_weights]
        if not pending:
            return None
        lane = min(pending, key=lambda lane: lane.next_weight)
        return Choice(WEIGHT, lane, lane.next_weight)

    def run(choice: Choice[SliceKey], now: float) -> tuple[float, float]:
        return now + slots[choice.kind], now + slots[choice.kind]

    orders = play(lanes, choose, run, _num_kinds(slots))
    if orders is None:
        raise ScheduleError("no stage can go on: a limit is below the slices of a micro-batch, raise the limits")
    return [[(_KINDS[kind], *unit, lane.chunk_id) for kind, lane, unit in order] for order in orders]


def _lanes(
    placement: Placement, num_slices: Sequence[int], directions: Sequence[int] | None
) -> list[list[Lane[SliceKey]]]:
    """Return the lanes of each stage, earlier parts first."""
    lanes: list[list[Lane[SliceKey]]] = [[] for _ in range(1 + max(stage_id for stage_id, _ in placement))]
    places: dict[tuple[int, int], Lane[SliceKey]] = {}
    for (stage_id, chunk_id), part_id in sorted(placement.items(), key=lambda place: place[1]):
        passing = [m for m in range(len(num_slices)) if directions is None or directions[m] == chunk_id]
        ahead = [(m, s) for m in passing for s in range(num_slices[m])]
        back = [(m, s) for m in passing for s in reversed(range(num_slices[m]))]
        lane = Lane(stage_id, chunk_id, part_id, ahead, back)
        lanes[stage_id].append(lane)
        places[0 if directions is None else chunk_id, part_id] = lane
    connect(places)
    return lanes
