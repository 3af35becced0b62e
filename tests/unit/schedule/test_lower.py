from collections import defaultdict, deque

import pytest
from hypothesis import given
from schedule_cases import schedules, v_shaped

from terapipe_ds.schedule import Kind, Schedule, ScheduleError, build, validate

Wire = tuple[bool, int, int, int, int]
F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
CLOSING = [Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP]


def run_as_an_engine(schedule: Schedule) -> int:
    """Run the lowered lists over wires that keep order, as an engine would; returns how many messages went.

    Every message is the unit it carries. A posted receive takes the next message of its wire, whichever that
    is; the computation checks that it got its own, and that the batch it reads is loaded. A stage sends only what it
    has computed, and computes in the order of the schedule.
    """
    lists = [deque(schedule.for_stage(k).actions) for k in range(schedule.num_stages)]
    orders = [deque(order) for order in schedule.orders]
    wires: dict[Wire, list[tuple[int, int]]] = defaultdict(list)
    taken: dict[Wire, int] = defaultdict(int)
    posted: list[dict[tuple[Kind, int, int, int], tuple[Wire, int]]] = [{} for _ in lists]
    done: set[tuple[Kind, int, int, int]] = set()
    loaded: list[list[int]] = [[] for _ in lists]
    num_ended, progress = 0, True
    while progress:
        progress = False
        for stage_id, actions in enumerate(lists):
            while actions:
                action = actions[0]
                here, peer = (stage_id, action.part_id), (action.peer_stage_id, action.peer_part_id)
                if action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRAD):
                    is_grad = action.kind is Kind.SEND_GRAD
                    assert (B if is_grad else F, action.part_id, *action.unit) in done
                    wires[(is_grad, *here, *peer)].append(action.unit)
                elif action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRAD):
                    wire = (action.kind is Kind.RECV_GRAD, *peer, *here)
                    posted[stage_id][B if wire[0] else F, action.part_id, *action.unit] = wire, taken[wire]
                    taken[wire] += 1
                elif action.kind is Kind.LOAD:
                    loaded[stage_id].append(action.micro_batch_id)
                elif action.kind in (F, B, W):
                    source = action.part_id + {F: -1, B: 1, W: 99}[action.kind]
                    if action.key in posted[stage_id]:
                        wire, number = posted[stage_id][action.key]
                        if len(wires[wire]) <= number:
                            break  # the message is not there yet: the stage waits
                        assert wires[wire][number] == action.unit
                        del posted[stage_id][action.key]
                    elif 0 <= source < schedule.num_parts:
                        assert (action.kind, source, *action.unit) in done, "the stage hands it over to itself"
                    if action.kind is F and action.part_id in (0, schedule.num_parts - 1):
                        assert action.micro_batch_id in loaded[stage_id]
                    done.add(action.key)
                    assert orders[stage_id].popleft() == action
                else:
                    assert [last.kind for last in actions] == CLOSING and not schedule.forward_only
                    actions.clear()
                    num_ended += 1
                    break
                actions.popleft()
                progress = True
    assert not any(lists), "the stages wait for one another"
    assert not any(orders) and not any(posted)
    assert num_ended == (0 if schedule.forward_only else schedule.num_stages)
    assert all(len(set(ids)) == len(ids) for ids in loaded), "a micro-batch is loaded twice"
    assert {wire: len(units) for wire, units in wires.items()} == dict(taken)
    return sum(taken.values())


@given(schedules())
def test_every_schedule_of_every_shape_is_valid_and_runs(schedule: Schedule) -> None:
    """Messages of a micro-batch: one per pair of neighbouring parts that stand on different stages, and direction."""
    validate(schedule)
    kinds = 1 if schedule.forward_only else 3 if "zb" in schedule.name else 2
    assert sum(map(len, schedule.orders)) == schedule.num_parts * kinds * sum(schedule.num_slices)
    wires = 0
    for m, count in enumerate(schedule.num_slices):
        homes = {a.part_id: k for k, order in enumerate(schedule.orders) for a in order if a.micro_batch_id == m}
        wires += count * sum(homes[part] != homes[part + 1] for part in range(schedule.num_parts - 1))
    assert run_as_an_engine(schedule) == wires * (1 if schedule.forward_only else 2)


def test_a_small_schedule_in_full() -> None:
    schedule = build("seq1f1b", 3, 1, 2)
    assert [" ".join(map(str, schedule.for_stage(k).actions)) for k in range(3)] == [
        "RG0.1<1 L0 F0.0 SA0.0>1 RG0.0<1 F0.1 SA0.1>1 B0.1 B0.0 RT RD ST",
        "RA0.0<0 RA0.1<0 RG0.1<2 F0.0 SA0.0>2 RG0.0<2 F0.1 SA0.1>2 B0.1 SG0.1>0 B0.0 SG0.0>0 RT RD ST",
        "RA0.0<1 RA0.1<1 L0 F0.0 F0.1 B0.1 SG0.1>1 B0.0 SG0.0>1 RT RD ST",
    ]


def test_a_stage_without_an_end_of_the_pipeline_loads_nothing() -> None:
    schedule = v_shaped()
    assert [str(a) for a in schedule.for_stage(0).actions if a.kind is Kind.LOAD] == ["L0"]
    assert not [a for a in schedule.for_stage(1).actions if a.kind is Kind.LOAD]


def test_a_computation_without_its_neighbour_is_an_error() -> None:
    schedule = build("gpipe", 2, 1, 2)
    orders = (schedule.orders[0], schedule.orders[1][1:])
    broken = Schedule("broken", 2, 1, (2,), 1, False, orders, schedule.placement)
    with pytest.raises(ScheduleError, match="F0.0 of part 0 has no counterpart on part 1"):
        broken.for_stage(0)
