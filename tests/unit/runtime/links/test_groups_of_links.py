"""Groups that keep the order of what is posted: no schedule may come to a stop over them."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links.groups import wires_apart
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES, Schedule, ScheduleError, build
from terapipe_ds.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind

ACTIVATIONS = (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
Wire = tuple[int, int, int, int]
GroupOf = Callable[[Wire], Any]


def layout_of(schedule: Schedule) -> Layout:
    return Layout(schedule.num_stages, schedule.placement)


def one_group(layout: Layout) -> GroupOf:
    return lambda wire: "all"


def groups_apart(layout: Layout) -> GroupOf:
    numbers = {wire: number for number, wires in enumerate(wires_apart(layout)) for wire in wires}
    return numbers.__getitem__


def wire_of(layout: Layout, stage_id: int, action: Action) -> Wire:
    """The one wire between these two parts and stages, for the micro-batch's chunk where there are copies."""
    sends = action.kind in SEND_KINDS
    here, there = (stage_id, action.part_id), (action.peer_stage_id, action.peer_part_id)
    source, target = (here, there) if sends == (action.kind in ACTIVATIONS) else (there, here)
    own_end = 0 if source == here else 1
    found = [
        wire for wire in layout.wires()
        if (wire[0], layout.placement[wire[:2]]) == source and (wire[2], layout.placement[wire[2:]]) == target
        and wire[1 + 2 * own_end] == action.chunk_id
    ]  # fmt: skip
    (wire,) = found
    return wire


def stuck(schedule: Schedule, group_of: GroupOf) -> bool:
    """Run the lowered lists where each rank works off what it has posted in a group in order, a send ends when its
    receive has begun, and a computation waits for its input alone. Posting never waits."""
    layout = layout_of(schedule)
    lists = [deque(stage.actions) for stage in schedule.lowered()]
    posted: dict[tuple[int, bool, Any], deque[tuple[Any, bool]]] = defaultdict(deque)
    arrived: set[tuple[int, Kind, int, tuple[int, int]]] = set()
    while any(lists):
        moved = sum(_advance(layout, k, actions, posted, arrived, group_of) for k, actions in enumerate(lists)) > 0
        heads: dict[Any, list[Any]] = defaultdict(list)
        for queue in posted.values():
            if queue:
                heads[queue[0][0]].append(queue)
        for message, queues in heads.items():
            if len(queues) == 2:  # both sides have come to it
                for queue in queues:
                    queue.popleft()
                arrived.add(message[0])
                moved = True
        if not moved:
            return True
    return False


def _advance(
    layout: Layout, stage: int, actions: deque[Action], posted: Any, arrived: Any, group_of: GroupOf
) -> bool:
    moved = False
    while actions:
        action = actions[0]
        if action.kind in (Kind.FORWARD, Kind.BACKWARD) and not _input_is_here(layout, stage, action, arrived):
            break
        if action.kind in SEND_KINDS | RECV_KINDS:
            wire, is_activation = wire_of(layout, stage, action), action.kind in ACTIVATIONS
            receiver = action.peer_stage_id if action.kind in SEND_KINDS else stage
            part = action.peer_part_id if action.kind in SEND_KINDS else action.part_id
            key = receiver, Kind.FORWARD if is_activation else Kind.BACKWARD, part, action.unit
            posted[stage, is_activation, group_of(wire)].append(((key, wire), action.kind in SEND_KINDS))
        actions.popleft()
        moved = True
    return moved


def _input_is_here(layout: Layout, stage: int, action: Action, arrived: Any) -> bool:
    needed = (stage, action.kind, action.part_id, action.unit)
    end = 2 if action.kind is Kind.FORWARD else 0  # activations come in at a wire's target, gradients at its source
    has_wire = any(wire[end : end + 2] == (stage, action.chunk_id) for wire in layout.wires())
    return needed in arrived or not has_wire


def schedules(stages: int) -> Iterator[Schedule]:
    for name, micro_batches, slices in itertools.product(SCHEDULE_NAMES, (2, 8), (1, 8)):
        try:
            yield build(name, stages, micro_batches, slices, chunks_per_stage=2 if name in CHUNKED_SCHEDULES else 1)
        except ScheduleError:  # counts that it does not take
            continue


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_no_schedule_comes_to_a_stop(stages: int) -> None:
    tried = 0
    for schedule in schedules(stages):
        assert not stuck(schedule, groups_apart(layout_of(schedule))), (schedule.name, schedule.num_slices)
        tried += 1
    assert tried >= 2 * len(SCHEDULE_NAMES)


def test_one_group_would_stop_some() -> None:
    """What the groups are for."""
    found = {schedule.name for schedule in schedules(4) if stuck(schedule, one_group(layout_of(schedule)))}
    assert {"1f1b", "seq1f1b"} <= found


@pytest.mark.parametrize(("name", "stages", "most"), [("seq1f1b", 8, 2), ("zbv", 8, 4), ("chimera", 8, 4)])
def test_no_group_has_two_wires_of_a_stage(name: str, stages: int, most: int) -> None:
    layout = layout_of(build(name, stages, 16, 1))
    rounds = wires_apart(layout)
    assert sorted(wire for wires in rounds for wire in wires) == sorted(layout.wires())
    for wires in rounds:
        ends = [stage for source, _, target, _ in wires for stage in (source, target)]
        assert len(ends) == len(set(ends))
    assert len(rounds) <= most


def test_one_stage_has_no_wires() -> None:
    assert wires_apart(Layout.plain(1)) == []
