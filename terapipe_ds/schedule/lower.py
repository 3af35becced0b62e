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

_CLOSING = (Action(Kind.REDUCE_TIED_GRADS), Action(Kind.REDUCE_GRADS), Action(Kind.OPTIMIZER_STEP))
_RECEIVE = {Kind.FORWARD: Kind.RECV_ACTIVATION, Kind.BACKWARD: Kind.RECV_GRAD}
_SEND = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRAD}
COMPUTE_OF = {message: kind for table in (_RECEIVE, _SEND) for kind, message in table.items()}
"""Message -> the computation that gives or needs it."""
_DIRECTION = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}
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


def lower(orders: Orders, num_parts: int, forward_only: bool) -> tuple[StageSchedule, ...]:
    """Return every stage's actions.

    The receive of a computation is posted before the one `RECEIVE_AHEAD` places earlier. A link connects two parts;
    where both are on one stage there is no wire, hence no send and no receive, and the engine hands the tensor over.
    Raises `ScheduleError` where the neighbour of a computation is nowhere in the schedule.
    """
    wiring = Wiring(orders, num_parts)
    closing = () if forward_only else _CLOSING
    return tuple(
        StageSchedule(stage_id, tuple(_lower_stage(wiring, stage_id, order, closing)), peak_live_slices(order))
        for stage_id, order in enumerate(orders)
    )


class Wiring:
    """Which messages a computation needs and gives, by the places of all computations."""

    def __init__(self, orders: Orders, num_parts: int) -> None:
        self.last_part_id = num_parts - 1
        self.homes = {action.key: stage_id for stage_id, order in enumerate(orders) for action in order}

    def receive(self, action: Action, stage_id: int) -> Action | None:
        """Return the receive that feeds a computation; None at an end of the pipeline or within one stage."""
        return self._message(action, stage_id, _RECEIVE, -_DIRECTION[action.kind])

    def send(self, action: Action, stage_id: int) -> Action | None:
        """Return the send of what a computation gives; None at an end of the pipeline or within one stage."""
        return self._message(action, stage_id, _SEND, _DIRECTION[action.kind])

    def _message(self, action: Action, stage_id: int, kinds: dict[Kind, Kind], to_part: int) -> Action | None:
        peer_part_id = action.part_id + to_part
        if action.kind not in kinds or not 0 <= peer_part_id <= self.last_part_id:
            return None
        peer_stage_id = self.homes.get((action.kind, peer_part_id, *action.unit))
        if peer_stage_id is None:
            unit = f"stage {stage_id}: {action} of part {action.part_id}"
            raise ScheduleError(f"{unit} has no counterpart on part {peer_part_id}: add it")
        if peer_stage_id == stage_id:
            return None
        return Action(kinds[action.kind], *action.unit, action.part_id, action.chunk_id, peer_stage_id, peer_part_id)


def _lower_stage(
    wiring: Wiring, stage_id: int, order: Sequence[Action], closing: tuple[Action, ...]
) -> Iterator[Action]:
    receives = [wiring.receive(action, stage_id) for action in order]
    loaded: set[int] = set()
    for index, action in enumerate(order):
        first = index + RECEIVE_AHEAD if index else 0  # a receive due before entry 0 is posted at entry 0
        yield from filter(None, receives[first : index + RECEIVE_AHEAD + 1])
        # the first part reads the inputs of the batch, the last one its labels
        reads_batch = action.kind is Kind.FORWARD and action.part_id in (0, wiring.last_part_id)
        if reads_batch and action.micro_batch_id not in loaded:
            loaded.add(action.micro_batch_id)
            yield Action(Kind.LOAD, action.micro_batch_id, part_id=action.part_id, chunk_id=action.chunk_id)
        yield action
        if (send := wiring.send(action, stage_id)) is not None:
            yield send
    yield from closing


def peak_live_slices(order: Sequence[Action]) -> int:
    """Return the most live slices of a stage, over all its chunks; without a backward none stops being live."""
    split = {(action.part_id, action.unit) for action in order if action.kind is Kind.WEIGHT}
    live = peak = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.WEIGHT or (action.part_id, action.unit) not in split:
            live -= 1
    return peak
