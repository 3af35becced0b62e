"""Proof that the lowered lists run the orders of a schedule with all data in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NoReturn

from .action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from .lower import CLOSING, COMPUTE_OF, StageSchedule, Wiring
from .schedule import Schedule

Link = tuple[Kind, int, int, int, int]
"""A wire in one direction: (F or B, source stage, source part, destination stage, destination part)."""


def check_lowered(schedule: Schedule, stages: Sequence[StageSchedule]) -> None:
    """Raise `ScheduleError` unless the lowered lists run the schedule's orders with all data in place.

    Each list holds the stage's computations in their order; a load before the first unit that reads the batch; a
    posted receive before, and a send after, each computation with a neighbour on another stage; the end of the batch
    once. Per link, the sends and the receives have one order.
    """
    wiring = Wiring(schedule.orders, schedule.num_parts, schedule.forward_only)
    sends: dict[Link, list[Action]] = defaultdict(list)
    receives: dict[Link, list[Action]] = defaultdict(list)
    for stage in stages:
        _check_stage(schedule, wiring, stage)
        for action in stage.actions:
            here, there = (stage.stage_id, action.part_id), (action.peer_stage_id, action.peer_part_id)
            if action.kind in SEND_KINDS:
                sends[COMPUTE_OF[action.kind], *here, *there].append(action)
            elif action.kind in RECV_KINDS:
                receives[COMPUTE_OF[action.kind], *there, *here].append(action)
    for link in {**sends, **receives}:
        _check_link(schedule, link, sends[link], receives[link])


def _check_stage(schedule: Schedule, wiring: Wiring, stage: StageSchedule) -> None:
    order, stage_id = schedule.orders[stage.stage_id], stage.stage_id
    ends = (index for index, action in enumerate(stage.actions) if action.kind in {closing.kind for closing in CLOSING})
    end = next(ends, len(stage.actions))
    if stage.actions[end:] != wiring.closing:
        wanted = " ".join(map(str, wiring.closing)) or "no reduce and no step"
        schedule.fail_at(f"the lowered list must end with {wanted}, once", stage_id, len(order))
    seen: set[Action] = set()
    computed = 0
    for action in stage.actions[:end]:
        problem = f"{action} stands twice in the lowered list" if action in seen else ""
        if action.kind in COMPUTE_KINDS and computed < len(order) and action == order[computed]:
            problem = problem or _missing_input(wiring, stage_id, action, seen)
            computed += 1
        else:
            problem = problem or _stray(action, seen)
        if problem:
            schedule.fail_at(problem, stage_id, min(max(computed - 1, 0), len(order) - 1))
        seen.add(action)
        if action.kind is Kind.LOAD:
            seen.add(_loaded(action))
    for index, action in enumerate(order):
        for needed in (action, *wiring.send(action, stage_id)):
            if needed not in seen:
                schedule.fail_at(f"{needed} is missing from the lowered list: add it", stage_id, index)


def _loaded(action: Action) -> Action:
    """Return the mark in `seen` that the micro-batch of an action is loaded, for whichever part."""
    return Action(Kind.LOAD, action.micro_batch_id, part_id=-1)


def _missing_input(wiring: Wiring, stage_id: int, action: Action, seen: set[Action]) -> str:
    for receive in wiring.receive(action, stage_id):
        if receive not in seen:
            return f"{action} needs {receive} to be posted before it in the lowered list: post it earlier"
    if wiring.reads_batch(action) and _loaded(action) not in seen:
        return f"{action} needs L{action.micro_batch_id} before it in the lowered list: load earlier"
    return ""


def _stray(action: Action, seen: set[Action]) -> str:
    """Return what is wrong with an action that is not the stage's next computation; "" where nothing is."""
    if action.kind is Kind.LOAD:
        return f"{action} loads a micro-batch a second time: drop it" if _loaded(action) in seen else ""
    if action.kind not in COMPUTE_OF:
        return f"the lowered list has {action} where the order does not"
    computation = Action(COMPUTE_OF[action.kind], *action.unit, action.part_id, action.chunk_id)
    if action.kind in SEND_KINDS and computation not in seen:
        return f"{action} sends what {computation} has not computed yet: send it after"
    return ""


def _check_link(schedule: Schedule, link: Link, sends: list[Action], receives: list[Action]) -> None:
    _, source, _, destination, _ = link
    for number, (sent, received) in enumerate(zip_longest(sends, receives)):
        if sent is None:
            reason = f"{received} waits for a send that stage {source} lacks"
            _fail_at_message(schedule, destination, received, reason)
        if received is None:
            _fail_at_message(schedule, source, sent, f"{sent} has no receive on stage {destination}")
        if sent.unit != received.unit:
            reason = f"{received} is message {number} of its link, but stage {source} sends {sent} there"
            _fail_at_message(schedule, destination, received, f"{reason}: give both the same order")


def _fail_at_message(schedule: Schedule, stage_id: int, message: Action, reason: str) -> NoReturn:
    computation = Action(COMPUTE_OF[message.kind], *message.unit, message.part_id, message.chunk_id)
    order = schedule.orders[stage_id]
    schedule.fail_at(reason, stage_id, order.index(computation) if computation in order else len(order))
