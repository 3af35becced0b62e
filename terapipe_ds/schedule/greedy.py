"""Write orders down while a clock of unit slots runs and each stage starts the best of what it can (list scheduling).

Where no closed form suits every shape, the stages are played: in each slot a free stage starts the best of what it can
run, and its order is what it ran. Such an order cannot deadlock, for it has just been run.

Which one is best: a B, for the stages before wait for it; then an F, that of the later part, which brings backwards
sooner; a W only where nothing else can run. Of several B it is the one that waits longest (then that of the later
part), or always that of the earlier part, which gives room for the next F, or of the later one: which of these rules
is best depends on the shape, so all are played and the shortest is taken. Where backwards are split, the share of W
is unknown here: a layer leaves half of its backward to W, or a third. So the clock runs at several such times, and of
the orders that it gives the one is taken that is shortest over all of them.

An F that would make a place hold more live slices than its limit cannot run. The play never gets stuck as long as
each limit is at least the slices of every micro-batch: where F stand at their limits, the oldest micro-batch is whole
on each of those parts, hence on the last one, and there its B can run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from terapipe_ds.schedule.action import Action, Kind, PlacedUnit, ScheduleError, SliceKey
from terapipe_ds.schedule.placement import Placement

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
Slots = tuple[int, int, int]
"""What F, B and W take; without W where the last one is 0."""

UNSPLIT: tuple[Slots, ...] = ((1, 2, 0),)
SPLIT: tuple[Slots, ...] = ((5, 5, 5), (5, 6, 4), (5, 7, 3))
"""A backward takes two forwards; of it W is a half, two fifths or three tenths."""

_MANY_UNITS = 1500  # above which one clock must do: planning builds orders for many numbers of slices


@dataclass(slots=True)
class _Lane:
    """One place (stage, chunk): its units in the order of their F and in that of their B, and how far it is."""

    stage_id: int
    chunk_id: int
    part_id: int
    limit: int
    ahead: list[SliceKey]
    back: list[SliceKey]
    before: _Lane | None = None  # the place of the part before, in this direction
    after: _Lane | None = None
    live: int = 0
    num_forwards: int = 0  # that have run; plain numbers, for planning asks often
    num_backwards: int = 0
    num_weights: int = 0
    forward_ends: dict[SliceKey, int] = field(default_factory=dict)
    backward_ends: dict[SliceKey, int] = field(default_factory=dict)

    def forward_ready_at(self) -> int | None:
        """Return when the input of the next F was there; None where it cannot run yet."""
        if self.num_forwards == len(self.ahead) or self.live >= self.limit:
            return None
        return 0 if self.before is None else self.before.forward_ends.get(self.ahead[self.num_forwards])

    def backward_ready_at(self) -> int | None:
        if self.num_backwards == len(self.back) or (unit := self.back[self.num_backwards]) not in self.forward_ends:
            return None
        return self.forward_ends[unit] if self.after is None else self.after.backward_ends.get(unit)

    def start(self, kind: Kind, end: int, splits_backward: bool) -> PlacedUnit:
        """Run the next unit of a kind."""
        if kind is Kind.FORWARD:
            unit = self.ahead[self.num_forwards]
            self.num_forwards += 1
            self.forward_ends[unit] = end
            self.live += 1
        elif kind is Kind.BACKWARD:
            unit = self.back[self.num_backwards]
            self.num_backwards += 1
            self.backward_ends[unit] = end
        else:
            unit = self.back[self.num_weights]
            self.num_weights += 1
        if kind is (Kind.WEIGHT if splits_backward else Kind.BACKWARD):
            self.live -= 1
        return kind, *unit, self.chunk_id


_RULES: tuple[Callable[[tuple[int, _Lane]], tuple[int, ...]], ...] = (
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
    """Return the orders of the stages of a placement: of several plays the one that is shortest over all `times`.

    `limits` has for each place the most live slices. `directions` has for each micro-batch the chunk that it passes on
    every stage, where every part has a place of each direction; without it a micro-batch passes all places.
    """
    units = sum(num_slices) * len(placement) * len(_clock(times[0]))
    clocks, rules = (times, _RULES) if units <= _MANY_UNITS else ([times[len(times) // 2]], _RULES[:2])
    plays = [
        _play(_lanes(placement, num_slices, limits, directions), _clock(slots), rule)
        for slots, rule in product(clocks, rules)
    ]
    return min(plays, key=lambda orders: length(orders, placement, num_slices, times))


def _clock(slots: Slots) -> dict[Kind, int]:
    return {kind: length for kind, length in zip(_KINDS, slots, strict=True) if length}


def length(
    orders: list[list[PlacedUnit]], placement: Placement, num_slices: Sequence[int], times: Sequence[Slots]
) -> float:
    """Return how long orders take, summed over some times of F, B and W, each in units of its own sum."""
    from terapipe_ds.schedule.nodes import Nodes  # numpy: commands that only name schedules do without

    actions = [
        [Action(kind, m, s, placement[stage_id, chunk], chunk) for kind, m, s, chunk in order]
        for stage_id, order in enumerate(orders)
    ]
    nodes = Nodes(actions, 1 + max(placement.values()), num_slices)
    return sum(max(nodes.run(slots)[1]) / sum(slots) for slots in times)


def _play(
    lanes: list[list[_Lane]], slots: Mapping[Kind, int], rule: Callable[..., tuple[int, ...]]
) -> list[list[PlacedUnit]]:
    """Return what each stage ran."""
    splits_backward = Kind.WEIGHT in slots
    orders: list[list[PlacedUnit]] = [[] for _ in lanes]
    free_at = [0] * len(lanes)
    left = sum(len(lane.ahead) for of_stage in lanes for lane in of_stage) * len(slots)
    woken: dict[int, set[int]] = {0: set(range(len(lanes)))}  # stages that may find something new, by when
    times = [0]
    while left:
        if not times:
            raise ScheduleError("no stage can go on: a limit is below the slices of a micro-batch, raise the limits")
        now = heapq.heappop(times)
        stages = [stage_id for stage_id in sorted(woken.pop(now)) if free_at[stage_id] <= now]
        chosen = [_choose(lanes[stage_id], now, splits_backward, rule) for stage_id in stages]
        for kind, lane in (choice for choice in chosen if choice is not None):
            end = free_at[lane.stage_id] = now + slots[kind]
            orders[lane.stage_id].append(lane.start(kind, end, splits_backward))
            left -= 1
            if end not in woken:
                woken[end] = set()
                heapq.heappush(times, end)
            peer = lane.after if kind is Kind.FORWARD else lane.before  # W wakes one for nothing
            woken[end] |= {lane.stage_id} if peer is None else {lane.stage_id, peer.stage_id}
    return orders


def _lanes(
    placement: Placement,
    num_slices: Sequence[int],
    limits: Mapping[tuple[int, int], int],
    directions: Sequence[int] | None,
) -> list[list[_Lane]]:
    lanes: list[list[_Lane]] = [[] for _ in range(1 + max(stage_id for stage_id, _ in placement))]
    places: dict[tuple[int, int], _Lane] = {}  # (direction, part)
    for (stage_id, chunk_id), part_id in sorted(placement.items()):
        own = [m for m in range(len(num_slices)) if directions is None or directions[m] == chunk_id]
        ahead = [(m, s) for m in own for s in range(num_slices[m])]
        back = [(m, s) for m in own for s in reversed(range(num_slices[m]))]
        lane = _Lane(stage_id, chunk_id, part_id, limits[stage_id, chunk_id], ahead, back)
        lanes[stage_id].append(lane)
        places[0 if directions is None else chunk_id, part_id] = lane
    for (direction, part_id), lane in places.items():
        lane.before, lane.after = places.get((direction, part_id - 1)), places.get((direction, part_id + 1))
    return lanes


def _choose(
    lanes: Sequence[_Lane], now: int, splits_backward: bool, rule: Callable[..., tuple[int, ...]]
) -> tuple[Kind, _Lane] | None:
    ready = [(at, lane) for lane in lanes if (at := lane.backward_ready_at()) is not None and at <= now]
    if ready:
        return Kind.BACKWARD, min(ready, key=rule)[1]
    ahead = [lane for lane in lanes if (at := lane.forward_ready_at()) is not None and at <= now]
    if ahead:
        return Kind.FORWARD, max(ahead, key=lambda lane: lane.part_id)
    pending = [lane for lane in lanes if lane.num_weights < lane.num_backwards]
    if splits_backward and pending:
        return Kind.WEIGHT, min(pending, key=lambda lane: lane.back[lane.num_weights])
    return None
