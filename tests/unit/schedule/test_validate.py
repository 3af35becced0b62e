import dataclasses
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_cases import OTHER_KINDS, by_hand, obeys_the_rules, schedules, with_orders

from terapipe_ds.schedule import Action, Kind, Schedule, ScheduleError, build, validate
from terapipe_ds.schedule.validate import replay

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


def swap_backwards(orders: Orders) -> None:
    """On all stages, so that links keep their order and no stage waits for ever: only the order of slices is wrong."""
    for stage_id, order in enumerate(orders):
        first, second, *_ = (index for index, action in enumerate(order) if action.kind is B)
        swap(stage_id, first, second)(orders)


def another_part(orders: Orders) -> None:
    orders[1][3] = orders[1][3]._replace(part_id=2)


BROKEN = build("seq1f1b", 4, 2, 4)
F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
BACKWARDS = [index for index, action in enumerate(BROKEN.orders[2]) if action.kind is B]


@pytest.mark.parametrize(("break_it", "reason", "cell"), [
    (swap(1, 1, 2), "F0.2 runs before F0.1: .* F runs in slice order", (1, "F0.2")),
    (swap(2, *BACKWARDS[:2]), "B0.2 runs before B0.3: .* B runs in reverse slice order", (2, "B0.2")),
    (swap_backwards, "B0.2 runs before B0.3: .* B runs in reverse slice order", (0, "B0.2")),
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
])  # fmt: skip
def test_each_breakage_is_named_and_marked(
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


@pytest.mark.parametrize(("changes", "reason"), [
    ({"num_stages": 3}, "2 orders for 3 stages"),
    ({"num_slices": (2, 2)}, "2 slice counts for 1 micro-batches"),
    ({"placement": {(0, 0): 0}}, "give every .stage, chunk. a part"),
    ({"placement": {(0, 0): 0, (1, 0): 2}}, "number the parts from 0 without a gap"),
    ({"chunks_per_stage": 2}, "give every .stage, chunk. a part"),
])  # fmt: skip
def test_a_schedule_out_of_shape(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        validate(dataclasses.replace(build("gpipe", 2, 1, 2), **changes))  # type: ignore[arg-type]


@given(schedules(can_evaluate=False), st.data())
def test_any_two_entries_swapped(schedule: Schedule, data: st.DataObject) -> None:
    orders = [list(order) for order in schedule.orders]
    order = data.draw(st.sampled_from([order for order in orders if len(order) > 1]))
    first, second = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    assume(first != second)
    order[first], order[second] = order[second], order[first]
    changed = with_orders(schedule, orders)
    if obeys_the_rules(changed):
        validate(changed)
    else:
        assert "<-- ERROR HERE" in rejected(changed).picture


@given(schedules(), st.data())
def test_any_entry_dropped_or_repeated(schedule: Schedule, data: st.DataObject) -> None:
    orders = [list(order) for order in schedule.orders]
    order = data.draw(st.sampled_from([order for order in orders if order]))
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
