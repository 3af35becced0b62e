"""Lowering: from the computations of a stage to everything its engine does in a batch.

    order     F0.0               F0.1                    B0.1         B0.0
    lowered   RA RA RA L0 F SA   RA F SA           ...   RG B SG      B SG   RT RD ST

Receives are posted a few computations ahead and sends do not block, so a tensor travels while its neighbours compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .action import Action, Kind, ScheduleError

RECEIVE_AHEAD = 2
"""How many computations before its own a receive is posted."""

Orders = Sequence[Sequence[Action]]
"""Per stage, its computations in the order they run."""

CLOSING = (Action(Kind.REDUCE_TIED_GRADS), Action(Kind.REDUCE_GRADS), Action(Kind.OPTIMIZER_STEP))
_RECEIVE = {Kind.FORWARD: Kind.RECV_ACTIVATION, Kind.BACKWARD: Kind.RECV_GRAD}
_SEND = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRAD}
COMPUTE_OF = {message: kind for table in (_RECEIVE, _SEND) for kind, message in table.items()}
"""Message -> the computation that gives or needs it."""
DIRECTION = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
"""Activations go to the next part, gradients to the one before."""


@dataclass(frozen=True)
class StageSchedule:
    """What one stage runs in one batch: an iterable of lists of instructions, as DeepSpeed wants it."""

    stage_id: int
    actions: tuple[Action, ...]
    peak_live_slices: int

    def __iter__(self) -> Iterator[list[Action]]:
        return ([action] for action in self.actions)

    def num_pipe_buffers(self) -> int:
        """Return 0: tensors in flight are kept by unit, not in DeepSpeed's numbered buffers."""
        return 0


def lower(orders: Orders, num_parts: int, forward_only: bool, receive_ahead: int) -> tuple[StageSchedule, ...]:
    """Return every stage's actions.

    The receive of a computation is posted before the one `receive_ahead` places earlier. A link connects two parts;
    where both are on one stage there is no wire, hence no send and no receive, and the engine hands the tensor over.
    Raises `ScheduleError` where the neighbour of a computation is nowhere in the schedule.
    """
    if receive_ahead < 0:
        raise ScheduleError(f"receive_ahead is {receive_ahead}: give 0 (just in time) or a number of computations")
    wiring = Wiring(orders, num_parts, forward_only)
    return tuple(
        StageSchedule(stage_id, tuple(_lower_stage(wiring, stage_id, receive_ahead)), peak_live_slices(order))
        for stage_id, order in enumerate(orders)
    )


class Wiring:
    """Which messages and data a computation needs, by the places of all computations."""

    def __init__(self, orders: Orders, num_parts: int, forward_only: bool) -> None:
        self.orders, self.last_part_id, self.forward_only = orders, num_parts - 1, forward_only
        self.homes = {action.key: stage_id for stage_id, order in enumerate(orders) for action in order}

    @property
    def closing(self) -> tuple[Action, ...]:
        """The end of every lowered list."""
        return () if self.forward_only else CLOSING

    def reads_batch(self, action: Action) -> bool:
        """Return whether the computation reads the batch: the first part its inputs, the last one its labels."""
        return action.kind is Kind.FORWARD and action.part_id in (0, self.last_part_id)

    def receive(self, action: Action, stage_id: int) -> tuple[Action, ...]:
        """Return the receive that feeds a computation; () at an end of the pipeline or within one stage."""
        return self._message(action, stage_id, _RECEIVE, -DIRECTION.get(action.kind, 0))

    def send(self, action: Action, stage_id: int) -> tuple[Action, ...]:
        """Return the send of what a computation gives; () at an end of the pipeline or within one stage."""
        return self._message(action, stage_id, _SEND, DIRECTION.get(action.kind, 0))

    def _message(self, action: Action, stage_id: int, kinds: dict[Kind, Kind], to_part: int) -> tuple[Action, ...]:
        peer_part_id = action.part_id + to_part
        if action.kind not in kinds or not 0 <= peer_part_id <= self.last_part_id:
            return ()
        peer_stage_id = self.homes.get((action.kind, peer_part_id, *action.unit))
        if peer_stage_id is None:
            unit = f"stage {stage_id}: {action} of part {action.part_id}"
            raise ScheduleError(f"{unit} has no counterpart on part {peer_part_id}: add it")
        if peer_stage_id == stage_id:
            return ()
        kind = kinds[action.kind]
        return (Action(kind, *action.unit, action.part_id, action.chunk_id, peer_stage_id, peer_part_id),)


def _lower_stage(wiring: Wiring, stage_id: int, receive_ahead: int) -> Iterator[Action]:
    order = wiring.orders[stage_id]
    receives = [wiring.receive(action, stage_id) for action in order]
    loaded: set[int] = set()
    for index, action in enumerate(order):
        first = index + receive_ahead if index else 0  # what would come before entry 0 is posted at entry 0
        for receive in receives[first : index + receive_ahead + 1]:
            yield from receive
        if wiring.reads_batch(action) and action.micro_batch_id not in loaded:
            loaded.add(action.micro_batch_id)
            yield Action(Kind.LOAD, action.micro_batch_id, part_id=action.part_id, chunk_id=action.chunk_id)
        yield action
        yield from wiring.send(action, stage_id)
    yield from wiring.closing


def peak_live_slices(order: Sequence[Action]) -> int:
    """Return the most live slices of one stage, over all its chunks.

    In an order without backward no slice stops being live, so the peak is the number of forwards.
    """
    split = {(action.part_id, action.unit) for action in order if action.kind is Kind.WEIGHT}
    live = peak = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.WEIGHT or (action.part_id, action.unit) not in split:
            live -= 1
    return peak
