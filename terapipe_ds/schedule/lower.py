"""Lowering: from the computations of a stage to everything its engine does in a batch, and the proof of it.

    order     F0.0               F0.1                    B0.1         B0.0
    lowered   RA RA RA L0 F SA   RA F SA           ...   RG B SG      B SG   RT RD ST

Receives are posted a few computations ahead and sends do not block, so a tensor travels while its neighbours
compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NoReturn

from .action import (
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    StageSchedule,
    fail_at,
    peak_live_slices,
)

RECEIVE_AHEAD = 2
"""How many computations before its own a receive is posted."""

Link = tuple[Kind, int, int, int, int]
"""A wire in one direction: (F or B, source stage, source part, destination stage, destination part)."""

_CLOSING = (Action(Kind.REDUCE_TIED_GRADS), Action(Kind.REDUCE_GRADS), Action(Kind.OPTIMIZER_STEP))
_CLOSING_KINDS = frozenset(action.kind for action in _CLOSING)
_RECEIVE = {Kind.FORWARD: Kind.RECV_ACTIVATION, Kind.BACKWARD: Kind.RECV_GRAD}
_SEND = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRAD}
_COMPUTE_OF = {message: kind for table in (_RECEIVE, _SEND) for kind, message in table.items()}
_DIRECTION = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: -1,
}  # activations go to the next part, gradients to the one before


def lower(schedule: Schedule, receive_ahead: int = RECEIVE_AHEAD) -> tuple[StageSchedule, ...]:
    """Every stage's actions.

    The receive of a computation is posted before the one that stands ``receive_ahead`` places earlier. A link
    connects two parts; where both stand on one stage there is no wire, hence no send and no receive, and the
    engine hands the tensor over. Raises ``ScheduleError`` where the neighbour of a computation is nowhere in
    the schedule.
    """
    if receive_ahead < 0:
        raise ScheduleError(
            f"receive_ahead is {receive_ahead}: give 0 (just in time) or a number of computations"
        )
    wiring = _Wiring(schedule)
    return tuple(
        StageSchedule(stage_id, tuple(_lower_stage(wiring, stage_id, receive_ahead)), peak_live_slices(order))
        for stage_id, order in enumerate(schedule.orders)
    )


def check_lowered(schedule: Schedule, stages: Sequence[StageSchedule]) -> None:
    """Raise ``ScheduleError`` unless the lowered lists run the schedule's orders with all data in place.

    Each list holds the stage's computations in their order; a load before the first unit that reads the
    batch; a posted receive before, and a send after, each computation with a neighbour on another stage; the
    end of the batch once. Per link, the sends and the receives stand in one order.
    """
    wiring = _Wiring(schedule)
    sends: dict[Link, list[Action]] = defaultdict(list)
    receives: dict[Link, list[Action]] = defaultdict(list)
    for stage in stages:
        _check_stage(wiring, stage)
        for action in stage.actions:
            here, there = (stage.stage_id, action.part_id), (action.peer_stage_id, action.peer_part_id)
            if action.kind in SEND_KINDS:
                link = (_COMPUTE_OF[action.kind], *here, *there)
                sends[link].append(action)
            elif action.kind in RECV_KINDS:
                link = (_COMPUTE_OF[action.kind], *there, *here)
                receives[link].append(action)
    for link in {**sends, **receives}:
        _check_link(schedule, link, sends[link], receives[link])


class _Wiring:
    """Which messages and data a computation needs, from where everything stands."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last_part_id = schedule.num_parts - 1
        self.homes = {
            action.key: stage_id for stage_id, order in enumerate(schedule.orders) for action in order
        }

    def reads_batch(self, action: Action) -> bool:
        """The first part reads its inputs from the batch, the last one its labels."""
        return action.kind is Kind.FORWARD and action.part_id in (0, self.last_part_id)

    def receive(self, action: Action, stage_id: int) -> tuple[Action, ...]:
        """The receive that feeds a computation; () at an end of the pipeline or within one stage."""
        return self._message(action, stage_id, _RECEIVE, -_DIRECTION.get(action.kind, 0))

    def send(self, action: Action, stage_id: int) -> tuple[Action, ...]:
        """The send of what a computation gives; () at an end of the pipeline or within one stage."""
        return self._message(action, stage_id, _SEND, _DIRECTION.get(action.kind, 0))

    def _message(
        self, action: Action, stage_id: int, kinds: dict[Kind, Kind], to_part: int
    ) -> tuple[Action, ...]:
        peer_part_id = action.part_id + to_part
        if action.kind not in kinds or not 0 <= peer_part_id <= self.last_part_id:
            return ()
        peer_stage_id = self.homes.get((action.kind, peer_part_id, *action.unit))
        if peer_stage_id is None:
            reason = f"{action} of part {action.part_id} has no counterpart on part {peer_part_id}: add it"
            fail_at(self.schedule, reason, stage_id, self.schedule.orders[stage_id].index(action))
        if peer_stage_id == stage_id:
            return ()
        kind = kinds[action.kind]
        return (Action(kind, *action.unit, action.part_id, action.chunk_id, peer_stage_id, peer_part_id),)


def _lower_stage(wiring: _Wiring, stage_id: int, receive_ahead: int) -> Iterator[Action]:
    order = wiring.schedule.orders[stage_id]
    receives = [wiring.receive(action, stage_id) for action in order]
    loaded: set[int] = set()
    for index, action in enumerate(order):
        first = index + receive_ahead if index else 0  # what would stand before entry 0 is posted at entry 0
        for receive in receives[first : index + receive_ahead + 1]:
            yield from receive
        if wiring.reads_batch(action) and action.micro_batch_id not in loaded:
            loaded.add(action.micro_batch_id)
            yield Action(Kind.LOAD, action.micro_batch_id, part_id=action.part_id, chunk_id=action.chunk_id)
        yield action
        yield from wiring.send(action, stage_id)
    if not wiring.schedule.forward_only:
        yield from _CLOSING


def _check_stage(wiring: _Wiring, stage: StageSchedule) -> None:
    order, stage_id = wiring.schedule.orders[stage.stage_id], stage.stage_id
    ends = (index for index, action in enumerate(stage.actions) if action.kind in _CLOSING_KINDS)
    end = next(ends, len(stage.actions))
    closing = () if wiring.schedule.forward_only else _CLOSING
    if stage.actions[end:] != closing:
        reason = (
            f"the lowered list must end with {' '.join(map(str, closing)) or 'no reduce and no step'}, once"
        )
        fail_at(wiring.schedule, reason, stage_id, len(order))
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
            fail_at(wiring.schedule, problem, stage_id, min(max(computed - 1, 0), len(order) - 1))
        seen.add(action)
        if action.kind is Kind.LOAD:
            seen.add(_loaded(action))
    for index, action in enumerate(order):
        for needed in (action, *wiring.send(action, stage_id)):
            if needed not in seen:
                reason = f"{needed} is missing from the lowered list: add it"
                fail_at(wiring.schedule, reason, stage_id, index)


def _loaded(action: Action) -> Action:
    """The mark in ``seen`` that the micro-batch of an action is loaded, for whichever part."""
    return Action(Kind.LOAD, action.micro_batch_id, part_id=-1)


def _missing_input(wiring: _Wiring, stage_id: int, action: Action, seen: set[Action]) -> str:
    for receive in wiring.receive(action, stage_id):
        if receive not in seen:
            return f"{action} needs {receive} to be posted before it in the lowered list: post it earlier"
    if wiring.reads_batch(action) and _loaded(action) not in seen:
        return f"{action} needs L{action.micro_batch_id} before it in the lowered list: load earlier"
    return ""


def _stray(action: Action, seen: set[Action]) -> str:
    """What is wrong with an action that is not the stage's next computation; "" where nothing is."""
    if action.kind is Kind.LOAD:
        return f"{action} loads a micro-batch a second time: drop it" if _loaded(action) in seen else ""
    if action.kind not in _COMPUTE_OF:
        return f"the lowered list has {action} where the order does not"
    computation = Action(_COMPUTE_OF[action.kind], *action.unit, action.part_id, action.chunk_id)
    if action.kind in SEND_KINDS and computation not in seen:
        return f"{action} sends what {computation} has not computed yet: send it after"
    return ""


def _check_link(schedule: Schedule, link: Link, sends: list[Action], receives: list[Action]) -> None:
    _, source, _, destination, _ = link
    for number, (sent, received) in enumerate(zip_longest(sends, receives)):
        if sent is None:
            _fail_at_message(
                schedule, destination, received, f"{received} waits for a send that stage {source} lacks"
            )
        if received is None:
            _fail_at_message(schedule, source, sent, f"{sent} has no receive on stage {destination}")
        if sent.unit != received.unit:
            reason = f"{received} is message {number} of its link, but stage {source} sends {sent} there"
            _fail_at_message(schedule, destination, received, f"{reason}: give both the same order")


def _fail_at_message(schedule: Schedule, stage_id: int, message: Action, reason: str) -> NoReturn:
    computation = Action(_COMPUTE_OF[message.kind], *message.unit, message.part_id, message.chunk_id)
    order = schedule.orders[stage_id]
    fail_at(schedule, reason, stage_id, order.index(computation) if computation in order else len(order))
