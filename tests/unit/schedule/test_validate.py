from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_cases import OTHER_KINDS, by_hand, names, ragged_shapes, with_orders

from terapipe_ds.schedule import Action, Kind, Schedule, ScheduleError, StageSchedule, build, validate
from terapipe_ds.schedule.validate import dependencies, replay
from terapipe_ds.schedule.validate_lowered import check_lowered

Orders = list[list[Action]]


def rejected(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return caught.value


def marked_cell(error: ScheduleError) -> tuple[int, str]:
    """The stage and the cell that the picture's marker stands under."""
    lines = error.picture.splitlines()
    marker = next(index for index, line in enumerate(lines) if "<-- ERROR HERE" in line)
    column = lines[marker].index("^")
    stage_id = int(lines[marker - 1].split("|")[0].removeprefix("stage "))
    return stage_id, (lines[marker - 1][column:].split() or [""])[0]


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_schedules_are_valid(kind: str) -> None:
    validate(OTHER_KINDS[kind]())


def swap(stage_id: int, first: int, second: int) -> Callable[[Orders], None]:
    def change(orders: Orders) -> None:
        order = orders[stage_id]
        order[first], order[second] = order[second], order[first]

    return change


def insert(stage_id: int, place: int, action: Action) -> Callable[[Orders], None]:
    return lambda orders: orders[stage_id].insert(place, action)


def drop(stage_id: int, place: int) -> Callable[[Orders], None]:
    return lambda orders: orders[stage_id].__delitem__(place)


def move_first(stage_id: int, place: int) -> Callable[[Orders], None]:
    return lambda orders: orders[stage_id].insert(0, orders[stage_id].pop(place))


def another_part(orders: Orders) -> None:
    orders[1][3] = dataclasses.replace(orders[1][3], part_id=2)


BROKEN = build("seq1f1b", 4, 2, 4)
F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
BACKWARDS = [index for index, action in enumerate(BROKEN.orders[2]) if action.kind is B]


@pytest.mark.parametrize(
    ("break_it", "reason", "cell"),
    [
        (swap(1, 1, 2), "F0.2 runs before F0.1: .* F runs in slice order", (1, "F0.2")),
        (swap(2, *BACKWARDS[:2]), "B0.2 runs before B0.3: .* B runs in reverse slice order", (2, "B0.2")),
        (move_first(2, BACKWARDS[0]), "B0.3 runs before F0.3: each F comes before its B", (2, "B0.3")),
        (drop(0, 2), "F0.2 of part 0 is missing", (0, "F0.3")),
        (drop(3, -1), "B1.0 of part 3 is missing", (3, "")),
        (insert(1, 99, BROKEN.orders[1][0]), "F0.0 of part 1 runs a second time", (1, "F0.0")),
        (another_part, "names part 2 but chunk 0 of this stage is part 1", (1, "F0.3")),
        (insert(0, 0, Action(Kind.SEND_ACTIVATION, 0, 0, 0, 0, 1, 1)), "an order holds computations", (0, "SA0.0")),
        (insert(0, 99, Action(F, 0, 4, 0)), "micro-batch 0 has 4 slices", (0, "F0.4")),
        (insert(0, 99, Action(F, 2, 0, 0)), "there are 2 micro-batches", (0, "F2.0")),
        (insert(0, 99, Action(F, 0, 0, 0, 1)), "stages have 1 chunks", (0, "F0.0")),
        (insert(0, 0, Action(W, 0, 0, 0)), "W0.0 runs before B0.0: .* each B before its W", (0, "W0.0")),
    ],
)
def test_each_kind_of_breakage_is_named_and_marked(
    break_it: Callable[[Orders], None], reason: str, cell: tuple[int, str]
) -> None:
    orders = [list(order) for order in BROKEN.orders]
    break_it(orders)
    error = rejected(with_orders(BROKEN, orders))
    assert re.search(reason, error.reason)
    assert marked_cell(error) == cell
    assert f"stage {cell[0]}, entry" in error.reason
    assert "\n" not in error.reason


def test_a_deadlock_shows_who_waits_for_whom() -> None:
    schedule = by_hand([["F0.0", "B0.0", "F1.0", "B1.0"], ["F0.0", "F1.0", "B0.0", "B1.0"]])
    error = rejected(schedule)
    assert "deadlock" in error.reason
    assert "stage 0 holds B0.0 until B0.0 of part 1 (stage 1)" in error.reason
    assert "stage 1 holds F1.0 until F1.0 of part 0 (stage 0)" in error.reason
    assert marked_cell(error) == (0, "B0.0")
    with pytest.raises(ScheduleError, match="deadlock"):
        replay(schedule)


def test_messages_of_a_link_keep_their_order() -> None:
    error = rejected(by_hand([["F0.0", "F1.0", "B0.0", "B1.0"], ["F1.0", "F0.0", "B0.0", "B1.0"]]))
    assert "RA1.0<0 is message 0 of its link, but stage 0 sends SA0.0>1 there" in error.reason
    assert marked_cell(error) == (1, "F1.0")


def test_a_micro_batch_stays_at_one_place_of_a_part() -> None:
    placement = {(0, 0): 0, (1, 0): 0}
    error = rejected(by_hand([["F0.0", "B0.0"], ["F0.1", "B0.1"]], placement))
    assert "part 0 has units of micro-batch 0 at stage 0, chunk 0" in error.reason
    assert marked_cell(error) == (1, "F0.1")


def test_backwards_in_an_evaluation() -> None:
    schedule = dataclasses.replace(build("gpipe", 2, 1, 1), forward_only=True)
    assert "a forward-only schedule has forwards only" in rejected(schedule).reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_stages": 3}, "2 orders for 3 stages"),
        ({"num_slices": (2, 2)}, "2 slice counts for 1 micro-batches"),
        ({"placement": {(0, 0): 0}}, "give every .stage, chunk. a part"),
        ({"placement": {(0, 0): 0, (1, 0): 2}}, "number the parts from 0 without a gap"),
        ({"chunks_per_stage": 2}, "give every .stage, chunk. a part"),
    ],
)
def test_a_schedule_out_of_shape(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        validate(dataclasses.replace(build("gpipe", 2, 1, 2), **changes))  # type: ignore[arg-type]


LOWERED = build("seq1f1b", 3, 2, 2)


def without(text: str) -> Callable[[list[Action]], None]:
    return lambda actions: actions.remove(find(actions, text))


def moved(text: str, behind: str) -> Callable[[list[Action]], None]:
    def move(actions: list[Action]) -> None:
        action = find(actions, text)
        actions.remove(action)
        actions.insert(actions.index(find(actions, behind)) + 1, action)

    return move


def doubled(text: str) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(0, find(actions, text))


def find(actions: list[Action], text: str) -> Action:
    return next(action for action in actions if str(action) == text)


def stray(action: Action) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(len(actions) - 3, action)


@pytest.mark.parametrize(
    ("stage_id", "break_it", "reason", "cell"),
    [
        (1, without("SA0.1>2"), "SA0.1>2 is missing from the lowered list", (1, "F0.1")),
        (1, without("SG1.0>0"), "SG1.0>0 is missing from the lowered list", (1, "B1.0")),
        (1, without("RA0.1<0"), "F0.1 needs RA0.1<0", (1, "F0.1")),
        (0, without("RG1.1<1"), "B1.1 needs RG1.1<1", (0, "B1.1")),
        (1, moved("RA1.0<0", "F1.0"), "F1.0 needs RA1.0<0 to be posted before it", (1, "F1.0")),
        (1, moved("F1.0", "SA1.0>2"), "SA1.0>2 sends what F1.0 has not computed", None),
        (0, without("L1"), "F1.0 needs L1 before it", (0, "F1.0")),
        (2, doubled("L1"), "L1 loads a micro-batch a second time|L1 stands twice", None),
        (2, stray(Action(Kind.LOAD, 1, part_id=1)), "L1 loads a micro-batch a second time", None),
        (0, doubled("RG0.1<1"), "RG0.1<1 stands twice", None),
        (0, without("F1.1"), "SA1.1>1 sends what F1.1 has not|has B0.1 where the order", None),
        (0, without("ST"), "the lowered list must end with RT RD ST, once", None),
        (0, doubled("ST"), "the lowered list must end with RT RD ST, once", None),
        (1, moved("RA0.0<0", "RA0.1<0"), "RA0.1<0 is message 0 of its link, but stage 0 sends SA0.0>1", (1, "F0.1")),
        (0, stray(Action(Kind.SEND_ACTIVATION, 0, 1, 0, 0, 2, 2)), "SA0.1>2 has no receive on stage 2", (0, "F0.1")),
        (2, stray(Action(Kind.RECV_ACTIVATION, 9, 9, 2, 0, 1, 1)), "RA9.9<1 waits for a send that stage 1", None),
        (0, stray(Action(Kind.RECV_GRAD, 1, 1, 0, 0, 9, 9)), "RG1.1<9 waits for a send that stage 9 lacks", None),
    ],
)
def test_breakage_in_a_lowered_list(
    stage_id: int, break_it: Callable[[list[Action]], None], reason: str, cell: tuple[int, str] | None
) -> None:
    stages = [LOWERED.for_stage(k) for k in range(3)]
    actions = list(stages[stage_id].actions)
    break_it(actions)
    stages[stage_id] = StageSchedule(stage_id, tuple(actions), 0)
    with pytest.raises(ScheduleError, match=reason) as caught:
        check_lowered(LOWERED, stages)
    if cell is not None:
        assert marked_cell(caught.value) == cell


@given(st.integers(0, 2), st.data())
def test_no_action_of_a_lowered_list_can_go(stage_id: int, data: st.DataObject) -> None:
    stages = [LOWERED.for_stage(k) for k in range(3)]
    actions = list(stages[stage_id].actions)
    del actions[data.draw(st.integers(0, len(actions) - 1))]
    stages[stage_id] = StageSchedule(stage_id, tuple(actions), 0)
    with pytest.raises(ScheduleError):
        check_lowered(LOWERED, stages)


def obeys_the_rules(schedule: Schedule) -> bool:
    """The rules once more, by brute force: something can always run, and links keep their order."""
    queues = [list(order) for order in schedule.orders]
    done: set[tuple[Kind, int, int, int]] = set()
    ran = True
    while ran:
        ran = False
        for queue in queues:
            needs = dependencies(queue[0], schedule.num_parts, schedule.num_slices) if queue else [None]
            if all(key in done for key in needs):
                done.add(queue.pop(0).key)
                ran = True
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        lists = [[action.unit for action in order if action.kind is kind] for order in schedule.orders]
        if any(units != lists[0] for units in lists):
            return False
    return not any(queues)


@given(names, ragged_shapes, st.data())
def test_any_two_entries_swapped(name: str, shape: tuple[int, list[int]], data: st.DataObject) -> None:
    num_stages, num_slices = shape
    schedule = build(name, num_stages, len(num_slices), num_slices)
    orders = [list(order) for order in schedule.orders]
    order = orders[data.draw(st.integers(0, num_stages - 1))]
    first, second = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    assume(first != second)
    order[first], order[second] = order[second], order[first]
    changed = with_orders(schedule, orders)
    if obeys_the_rules(changed):
        validate(changed)
    else:
        assert "<-- ERROR HERE" in rejected(changed).picture


@given(names, ragged_shapes, st.data())
def test_any_entry_dropped_or_repeated(name: str, shape: tuple[int, list[int]], data: st.DataObject) -> None:
    num_stages, num_slices = shape
    schedule = build(name, num_stages, len(num_slices), num_slices)
    orders = [list(order) for order in schedule.orders]
    order = orders[data.draw(st.integers(0, num_stages - 1))]
    index = data.draw(st.integers(0, len(order) - 1))
    if data.draw(st.booleans()):
        if order.pop(index).kind is Kind.WEIGHT:
            validate(with_orders(schedule, orders))  # without a W of its own, B is a whole backward
            return
    else:
        order.insert(data.draw(st.integers(0, len(order))), order[index])
    error = rejected(with_orders(schedule, orders))
    assert "<-- ERROR HERE" in error.picture


def test_big_schedules_show_the_neighbourhood_only() -> None:
    schedule = build("seq1f1b", 32, 16, 8)
    orders = [list(order) for order in schedule.orders]
    del orders[20][100]
    error = rejected(with_orders(schedule, orders))
    lines = error.picture.splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120
    assert lines[0] == "  ... stages 0 to 15"
    assert lines[-1] == "  ... stages 25 to 31"
    assert marked_cell(error)[0] == 20


def test_the_error_reads_as_a_whole() -> None:
    error = rejected(by_hand([["F0.0", "F0.1", "B0.1", "B0.0"], ["F0.0", "F0.1", "B0.0", "B0.1"]]))
    assert str(error) == (
        "schedule 'by hand', stage 1, entry 2: B0.0 runs before B0.1:"
        " within a micro-batch B runs in reverse slice order; swap them\n"
        "stage 0 | F0.0 F0.1 B0.1 B0.0\n"
        "stage 1 | F0.0 F0.1 B0.0 B0.1\n"
        "                    ^^^^ <-- ERROR HERE (B0.0)"
    )


def test_replay_waits_for_data() -> None:
    assert replay(build("gpipe", 3, 1, 2)) == [[0, 1, 6, 7], [1, 2, 5, 6], [2, 3, 4, 5]]
