from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import chunked_schedules, names, ragged_shapes, v_shaped

from terapipe_ds.schedule import Kind, Schedule, ScheduleError, build

Wire = tuple[bool, int, int, int, int]


def run_as_an_engine(schedule: Schedule, receive_ahead: int) -> int:
    """Run the lowered lists over wires that keep order, as an engine would; returns how many messages went.

    Every message is the unit it carries. A posted receive takes the next message of its wire, whichever that
    is; the computation checks that it got its own.
    """
    lists = [deque(stage.actions) for stage in schedule.lowered(receive_ahead)]
    wires: dict[Wire, list[tuple[int, int]]] = defaultdict(list)
    taken: dict[Wire, int] = defaultdict(int)
    posted: list[dict[tuple[Kind, int, int, int], tuple[Wire, int]]] = [{} for _ in lists]
    progress = True
    while progress:
        progress = False
        for stage_id, actions in enumerate(lists):
            while actions:
                action = actions[0]
                here, peer = (stage_id, action.part_id), (action.peer_stage_id, action.peer_part_id)
                if action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRAD):
                    wires[(action.kind is Kind.SEND_GRAD, *here, *peer)].append(action.unit)
                elif action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRAD):
                    wire = (action.kind is Kind.RECV_GRAD, *peer, *here)
                    computed = Kind.BACKWARD if wire[0] else Kind.FORWARD
                    posted[stage_id][computed, action.part_id, *action.unit] = wire, taken[wire]
                    taken[wire] += 1
                elif action.key in posted[stage_id]:
                    wire, number = posted[stage_id][action.key]
                    if len(wires[wire]) <= number:
                        break  # the message is not there yet: the stage waits
                    assert wires[wire][number] == action.unit
                    del posted[stage_id][action.key]
                actions.popleft()
                progress = True
    assert not any(lists), "the stages wait for one another"
    assert not any(posted), "a receive was posted that nothing waited for"
    assert {wire: len(units) for wire, units in wires.items()} == dict(taken)
    return sum(taken.values())


@given(names, ragged_shapes, st.integers(0, 5), st.booleans())
def test_lowered_schedules_run(name: str, shape: tuple[int, list[int]], receive_ahead: int, forward_only: bool) -> None:
    num_stages, num_slices = shape
    schedule = build(name, num_stages, len(num_slices), num_slices, forward_only=forward_only)
    messages = run_as_an_engine(schedule, receive_ahead)
    assert messages == (num_stages - 1) * sum(num_slices) * (1 if forward_only else 2)


@given(chunked_schedules(), st.integers(0, 5))
def test_lowered_schedules_of_several_chunks_run(schedule: Schedule, receive_ahead: int) -> None:
    """Messages of a micro-batch: one per pair of neighbouring parts that stand on different stages, and direction."""
    wires = 0
    for m, count in enumerate(schedule.num_slices):
        homes = {a.part_id: k for k, order in enumerate(schedule.orders) for a in order if a.micro_batch_id == m}
        wires += count * sum(homes[part] != homes[part + 1] for part in range(schedule.num_parts - 1))
    assert run_as_an_engine(schedule, receive_ahead) == wires * (1 if schedule.forward_only else 2)


def test_a_small_schedule_in_full() -> None:
    schedule = build("seq1f1b", 3, 1, 2)
    assert [" ".join(map(str, schedule.for_stage(k).actions)) for k in range(3)] == [
        "RG0.1<1 L0 F0.0 SA0.0>1 RG0.0<1 F0.1 SA0.1>1 B0.1 B0.0 RT RD ST",
        "RA0.0<0 RA0.1<0 RG0.1<2 F0.0 SA0.0>2 RG0.0<2 F0.1 SA0.1>2 B0.1 SG0.1>0 B0.0 SG0.0>0 RT RD ST",
        "RA0.0<1 RA0.1<1 L0 F0.0 F0.1 B0.1 SG0.1>1 B0.0 SG0.0>1 RT RD ST",
    ]
    middle = [" ".join(map(str, schedule.lowered(ahead)[1].actions)) for ahead in (0, 1)]
    assert middle == [
        "RA0.0<0 F0.0 SA0.0>2 RA0.1<0 F0.1 SA0.1>2 RG0.1<2 B0.1 SG0.1>0 RG0.0<2 B0.0 SG0.0>0 RT RD ST",
        "RA0.0<0 RA0.1<0 F0.0 SA0.0>2 RG0.1<2 F0.1 SA0.1>2 RG0.0<2 B0.1 SG0.1>0 B0.0 SG0.0>0 RT RD ST",
    ]
    two = build("1f1b", 3, 2, 2)
    loads = [[str(a) for a in two.for_stage(k).actions if a.kind is Kind.LOAD] for k in range(3)]
    assert loads == [["L0", "L1"], [], ["L0", "L1"]]


def test_one_stage_with_both_ends_loads_once() -> None:
    schedule = v_shaped()
    assert [str(a) for a in schedule.for_stage(0).actions if a.kind is Kind.LOAD] == ["L0"]
    assert not [a for a in schedule.for_stage(1).actions if a.kind is Kind.LOAD]


def test_evaluation_ends_without_a_step() -> None:
    schedule = build("1f1b", 2, 2, 2, forward_only=True)
    kinds = {action.kind for stage_id in range(2) for action in schedule.for_stage(stage_id).actions}
    assert kinds == {Kind.LOAD, Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION}


def test_a_computation_without_its_neighbour_is_an_error() -> None:
    schedule = build("gpipe", 2, 1, 2)
    orders = (schedule.orders[0], schedule.orders[1][1:])
    broken = Schedule("broken", 2, 1, (2,), 1, False, orders, schedule.placement)
    with pytest.raises(ScheduleError, match="F0.0 of part 0 has no counterpart on part 1"):
        broken.for_stage(0)


def test_receive_ahead_is_not_negative() -> None:
    with pytest.raises(ScheduleError, match="receive_ahead is -1"):
        build("gpipe", 2, 1, 2).lowered(receive_ahead=-1)
