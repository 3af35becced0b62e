"""How many messages may be on their way: the proof against stages that are played action by action."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import by_hand, schedules

from terapipe_ds.schedule import SCHEDULE_NAMES, Kind, Schedule, build, validate
from terapipe_ds.schedule.proofs import OUTSTANDING_SENDS, budget_of_sends, can_run_within
from terapipe_ds.schedule.schedule import COMPUTE_OF

Wire = tuple[Kind, int, int, int]  # what is sent, by which part, from which stage to which


def plays_to_the_end(schedule: Schedule, budget: int) -> bool:
    """Play what each stage does; a message is taken in when the computation that needs it comes up, no sooner."""
    stages = range(schedule.num_stages)
    actions = [list(schedule.for_stage(k).actions) for k in stages]
    at = [0] * schedule.num_stages
    sent: dict[Wire, int] = defaultdict(int)
    taken: dict[Wire, int] = defaultdict(int)
    posted: list[dict[Any, Wire]] = [{} for _ in stages]  # of a stage: the wire that a computation takes from
    has_sent: set[tuple[int, int]] = set()

    def step(k: int) -> bool:
        action = actions[k][at[k]]
        if action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRAD):
            computation = COMPUTE_OF[action.kind]
            wire = computation, action.peer_part_id, action.peer_stage_id, k
            posted[k][computation, action.part_id, action.unit] = wire
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
            wire = posted[k].get((action.kind, action.part_id, action.unit))
            if wire is not None:
                if (k, at[k]) not in has_sent:  # from now on the receive is there, and the sender may go on
                    has_sent.add((k, at[k]))
                    taken[wire] += 1
                    return True
                if sent[wire] < taken[wire]:
                    return False
        elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRAD):
            wire = COMPUTE_OF[action.kind], action.part_id, k, action.peer_stage_id
            if (k, at[k]) not in has_sent:
                has_sent.add((k, at[k]))
                sent[wire] += 1
            if sent[wire] - min(sent[wire], taken[wire]) > budget:
                return False
        at[k] += 1
        return True

    while any(at[k] < len(actions[k]) and step(k) for k in stages):
        pass
    return all(at[k] == len(actions[k]) for k in stages)


@given(schedules(), st.integers(1, 4))
def test_the_proof_says_what_a_play_shows(schedule: Schedule, budget: int) -> None:
    assert can_run_within(schedule, budget) == plays_to_the_end(schedule, budget)


@given(schedules(), st.integers(1, 4))
def test_the_least_budget_is_safe_and_no_smaller_one_is(schedule: Schedule, wanted: int) -> None:
    least = budget_of_sends(schedule, wanted)
    assert least >= wanted and plays_to_the_end(schedule, least)
    assert least == wanted or not plays_to_the_end(schedule, least - 1)


def far_ahead(count: int) -> Schedule:
    """All forwards of stage 0 come first, while stage 1 sends each gradient at once: both run ahead."""
    units = range(count)
    first = [f"F{i}.0" for i in units] + [f"B{i}.0" for i in units]
    return by_hand([first, [f"{kind}{i}.0" for i in units for kind in "FB"]])


@pytest.mark.parametrize("count", [3, 4, 5, 6, 18, 19, 20, 40])
def test_a_schedule_that_needs_more_gets_the_least_that_is_safe(count: int) -> None:
    """With c of each on their way stage 1 has come to F(c), and stage 0 cannot send F(2 c + 1) before it goes on."""
    schedule = far_ahead(count)
    validate(schedule)
    assert budget_of_sends(schedule, 1) == max(1, -(-(count - 1) // 2))
    assert budget_of_sends(schedule) == max(OUTSTANDING_SENDS, -(-(count - 1) // 2))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_few_slices_run_with_the_usual_budget(name: str, forward_only: bool) -> None:
    for stages, micro_batches, slices in ((2, 1, 8), (4, 8, 4), (8, 32, 1), (6, 5, 7)):
        shape = stages, micro_batches, slices
        schedule = build(name, *shape, forward_only=forward_only, chunks_per_stage=1 + ("interleaved" in name))
        assert budget_of_sends(schedule) == OUTSTANDING_SENDS


@pytest.mark.parametrize(
    ("name", "shape", "least"),
    [("interleaved", (2, 1, 24), 12), ("1f1b", (4, 2, 32), 32), ("zbv", (2, 1, 32), 11), ("seq1f1b", (4, 2, 32), 8)],
)
def test_orders_of_whole_micro_batches_need_more_for_slices(name: str, shape: tuple[int, int, int], least: int) -> None:
    schedule = build(name, *shape, chunks_per_stage=1 + ("interleaved" in name))
    assert budget_of_sends(schedule) == least
    assert plays_to_the_end(schedule, least) and (least == 8 or not plays_to_the_end(schedule, least - 1))
    assert budget_of_sends(build(name, *shape, forward_only=True, chunks_per_stage=schedule.chunks_per_stage)) == 8


def test_stages_without_links_wait_for_nothing() -> None:
    assert budget_of_sends(build("1f1b", 1, 3, 2), 1) == 1
