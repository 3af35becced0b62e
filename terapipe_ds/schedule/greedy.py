"""Write greedy orders: a stage runs whatever it can, and its order is recorded while a clock runs.

Where no closed form suits every shape, the stages are played: a free stage starts the best computation that it can run,
and the sequence of its computations is its order. Such an order cannot deadlock, for it has just been run. `play` is
the clock, for any times and any choice; `planner.orders` plays with the costs at hand, and `list_schedule` with unit
slots.

`list_schedule` ranks computations so: a B first, for the stages before wait for it; then an F, of the later part, which
brings backwards sooner; a W only where nothing else can run. There are three rules for several B: the one that waits
longest (then the one of the later part); always the earlier part, which makes room for the next F; or always the later
part. The best rule depends on the shape, so all are played and the shortest order wins. Where backwards are split, the
share of W and the growth of attention along the sequence are unknown here. So the clock runs at several such times, and
the order that is shortest over all of them wins.

An F runs only where there is room (`room_at_places`, `room_on_stages`). The play never gets stuck as long as a place,
or all places of a stage, have room for every micro-batch: where F have no room, the oldest micro-batch is whole on each
of those parts, hence on the last one, and there its B can run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Generic, NamedTuple, TypeVar

from terapipe_ds.schedule.action import Kind, PlacedUnit, ScheduleError, SliceKey
from terapipe_ds.schedule.clock import BACKWARD, CODES, FORWARD, KINDS, WEIGHT, end_of_orders
from terapipe_ds.schedule.placement import Placement

Unit = TypeVar("Unit", int, SliceKey)


class Times(NamedTuple):
    """Hold what F, B and W take; without W where that is 0.

    `growth`: how much longer F and the whole backward of the last slice take than of the first one, over their mean.
    """

    forward: int
    backward: int
    weight: int
    growth: float = 0.0

    def slots(self, num_slices: Sequence[int]) -> dict[tuple[int, SliceKey], int]:
        """Return the slots of each kind of computation of each slice, in whole numbers: equal times stay equal."""
        slots = {}
        for m, count in enumerate(num_slices):
            for s in range(count):
                share = 100 * (1 + self.growth * ((2 * s + 1) / count - 1) / 2)
                slots[FORWARD, (m, s)] = round(self.forward * share)
                slots[BACKWARD, (m, s)] = round((self.backward + self.weight) * share) - 100 * self.weight
                slots[WEIGHT, (m, s)] = 100 * self.weight
        return slots


UNSPLIT = (Times(1, 2, 0),)
SPLIT = (Times(5, 5, 5), Times(5, 7, 3, 0.6), Times(5, 8, 2, 0.6))
"""A backward takes two forwards. W is a half of it; or less, where attention grows along the sequence."""

_MANY_UNITS = 4000  # above this only one clock runs: planning builds orders for many numbers of slices


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

HasRoom = Callable[[Sequence[Lane[SliceKey]], Lane[SliceKey], SliceKey], bool]
"""Says of the places of a stage whether one of them may run the F of a unit."""


def room_at_places(limits: Mapping[tuple[int, int], int]) -> HasRoom:
    """Return a rule that limits the live slices of each place."""
    return lambda places, lane, unit: lane.live < limits[lane.stage_id, lane.chunk_id]


def room_on_stages(limit: int, num_slices: Sequence[int], num_chunks: int) -> HasRoom:
    """Return a rule that limits the live slices of all places of a stage together.

    The F of younger micro-batches leave room for the whole oldest one that still has F on the stage.
    """
    owners = [m for m, count in enumerate(num_slices) for _ in range(count)]
    ends = list(accumulate(num_slices))
    most = limit - num_chunks * max(num_slices)

    def has_room(places: Sequence[Lane[SliceKey]], lane: Lane[SliceKey], unit: SliceKey) -> bool:
        if sum(place.live for place in places) >= limit:
            return False
        oldest = owners[min(place.done[FORWARD] for place in places)]
        return unit[0] == oldest or sum(max(0, place.done[FORWARD] - ends[oldest]) for place in places) < most

    return has_room


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
    rooms: Sequence[HasRoom],
    *,
    times: Sequence[Times],
    weights: Sequence[int] = (),
    directions: Sequence[int] | None = None,
) -> list[list[PlacedUnit]]:
    """Return the orders of the stages of a placement: from plays with each of `rooms` the shortest over all `times`.

    `weights` says how much each of `times` counts there; without it all count the same. `directions` has for each
    micro-batch the chunk that it passes on every stage, where every part has a place of each direction; without it a
    micro-batch passes all places.
    """
    units = sum(num_slices) * len(placement) * _num_kinds(times[0])
    clocks, rules = (times, _RULES) if units <= _MANY_UNITS else ([times[len(times) // 2]], _RULES[:2])
    plays = [
        _play_slots(_lanes(placement, num_slices, directions), clock, clock.slots(num_slices), has_room, rule)
        for has_room, clock, rule in product(rooms, clocks, rules)
    ]
    return shortest(plays, placement, num_slices, times, weights)


def _num_kinds(times: Times) -> int:
    return 2 + (times.weight > 0)


def shortest(
    plays: Sequence[list[list[PlacedUnit]]],
    placement: Placement,
    num_slices: Sequence[int],
    times: Sequence[Times],
    weights: Sequence[int] = (),
) -> list[list[PlacedUnit]]:
    """Return the play of the least length over its work, added up over `times` with their `weights` (all 1 without).

    All plays have the same computations on each stage, so the numbers of these, their inputs and times are found once.
    """
    distinct = [orders for place, orders in enumerate(plays) if orders not in plays[:place]]
    if len(distinct) == 1:
        return distinct[0]
    # a number for each computation, by its part and by its place on each stage
    numbers: dict[PlacedUnit, int] = {}
    places: list[dict[PlacedUnit, int]] = [{} for _ in distinct[0]]
    for stage_id, order in enumerate(distinct[0]):
        for unit in order:
            places[stage_id][unit] = numbers[(*unit[:3], placement[stage_id, unit[3]])] = len(numbers)
    none = len(numbers)
    steps = {Kind.FORWARD: -1, Kind.BACKWARD: 1}  # to the part whose result a computation takes
    inputs = [
        numbers.get((kind, m, s, part + steps[kind]), none) if kind in steps else none for kind, m, s, part in numbers
    ]
    all_slots = [of_kinds.slots(num_slices) for of_kinds in times]
    all_seconds = [[float(slots[CODES[kind], (m, s)]) for kind, m, s, _ in numbers] for slots in all_slots]

    def length(orders: list[list[PlacedUnit]]) -> float:
        of_numbers = [[of[unit] for unit in order] for of, order in zip(places, orders, strict=True)]
        total = 0.0
        for seconds, weight in zip(all_seconds, weights or [1] * len(times), strict=True):
            end = end_of_orders(of_numbers, inputs, seconds, seconds, [-1] * none)
            total += weight * end / sum(seconds)
        return total

    return min(distinct, key=length)


def _play_slots(
    lanes: list[list[Lane[SliceKey]]],
    times: Times,
    slots: Mapping[tuple[int, SliceKey], int],
    has_room: HasRoom,
    rule: Callable[[_Ready], tuple[float, ...]],
) -> list[list[PlacedUnit]]:
    """Return the computations that each stage ran with these slots."""

    def choose(places: list[Lane[SliceKey]], now: float) -> Choice[SliceKey] | None:
        came = [(found[0], lane, found[1]) for lane in places if (found := lane.next_backward()) and found[0] <= now]
        if came:
            _, lane, unit = came[0] if len(came) == 1 else min(came, key=lambda ready: rule(ready[:2]))
            return Choice(BACKWARD, lane, unit)
        for lane in reversed(places):  # the later parts first
            if (ahead := lane.next_forward(now)) is not None and has_room(places, lane, ahead):
                return Choice(FORWARD, lane, ahead)
        pending = [lane for lane in places if times.weight and lane.pending_weights]
        if not pending:
            return None
        lane = min(pending, key=lambda lane: lane.next_weight)
        return Choice(WEIGHT, lane, lane.next_weight)

    def run(choice: Choice[SliceKey], now: float) -> tuple[float, float]:
        end = now + slots[choice.kind, choice.unit]
        return end, end

    orders = play(lanes, choose, run, _num_kinds(times))
    if orders is None:
        raise ScheduleError("no stage can go on: a limit is below the slices of a micro-batch, raise the limits")
    return [[(KINDS[kind], *unit, lane.chunk_id) for kind, lane, unit in order] for order in orders]


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
