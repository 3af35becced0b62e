"""Lower a schedule: from the computations of a stage to every action of its engine in a batch.

    order     F0.0               F0.1                    B0.1         B0.0
    lowered   RA RA RA L0 F SA   RA F SA           ...   RG B SG      B SG   RT RD ST

Receives are posted a few computations ahead and sends do not block (but for the budget of `proofs.budget_of_sends`), so
a tensor travels while its neighbours compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terapipe_ds.schedule.action import Action, Kind, ScheduleError

if TYPE_CHECKING:
    from terapipe_ds.schedule.nodes import Nodes

RECEIVE_AHEAD = 2
"""How many computations before its own a receive is posted."""

_CLOSING = (Action(Kind.REDUCE_TIED_GRADS), Action(Kind.REDUCE_GRADS), Action(Kind.OPTIMIZER_STEP))
_RECEIVE = {Kind.FORWARD: Kind.RECV_ACTIVATION, Kind.BACKWARD: Kind.RECV_GRAD}
_SEND = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRAD}
COMPUTE_OF = {message: kind for table in (_RECEIVE, _SEND) for kind, message in table.items()}
"""Message -> the computation that gives or needs it."""
_DIRECTION = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}
"""Activations go to the next part, gradients to the one before."""


@dataclass(frozen=True)
class StageSchedule:
    """Hold the actions of one stage in one batch: an iterable of lists of instructions, as DeepSpeed wants it."""

    stage_id: int
    actions: tuple[Action, ...]
    peak_live_slices: int

    def __iter__(self) -> Iterator[list[Action]]:
        return ([action] for action in self.actions)

    def num_pipe_buffers(self) -> int:
        """Return 0: tensors in flight are kept by unit, not in DeepSpeed's numbered buffers."""
        return 0


def lower_stage(nodes: Nodes, stage_id: int, order: Sequence[Action], forward_only: bool) -> StageSchedule:
    """Return the actions of a stage's engine, from its computations `order`.

    The receive of a computation is posted before the one `RECEIVE_AHEAD` places earlier. A link connects two parts;
    where both are on one stage there is no wire, hence no send and no receive, and the engine hands the tensor over.
    Raises `ScheduleError` where the neighbour of a computation is nowhere in the schedule.
    """
    own = slice(nodes.first[stage_id], nodes.first[stage_id + 1])
    _check_neighbours(nodes, own, stage_id, order)
    sources, peers = nodes.sources[own].tolist(), nodes.peers[own].tolist()
    receives = [message(action, source, receives=True) for action, source in zip(order, sources, strict=True)]
    actions: list[Action] = []
    loaded: set[int] = set()
    for index, (action, peer) in enumerate(zip(order, peers, strict=True)):
        first = index + RECEIVE_AHEAD if index else 0  # a receive due before entry 0 is posted at entry 0
        actions += filter(None, receives[first : index + RECEIVE_AHEAD + 1])
        # the first part reads the inputs of the batch, the last one its labels
        reads_batch = action.kind is Kind.FORWARD and action.part_id in (0, nodes.num_parts - 1)
        if reads_batch and action.micro_batch_id not in loaded:
            loaded.add(action.micro_batch_id)
            actions.append(Action(Kind.LOAD, action.micro_batch_id, part_id=action.part_id, chunk_id=action.chunk_id))
        actions.append(action)
        if (send := message(action, peer)) is not None:
            actions.append(send)
    if not forward_only:
        actions += _CLOSING
    return StageSchedule(stage_id, tuple(actions), nodes.peaks[stage_id])


def message(action: Action, peer_stage_id: int, receives: bool = False) -> Action | None:
    """Return the send of a computation's result, or the receive of its input; None where the peer is -1."""
    if peer_stage_id < 0:
        return None
    kind = (_RECEIVE if receives else _SEND)[action.kind]
    peer_part_id = action.part_id + _DIRECTION[action.kind] * (-1 if receives else 1)
    return Action(kind, *action.unit, action.part_id, action.chunk_id, peer_stage_id, peer_part_id)


def _check_neighbours(nodes: Nodes, own: slice, stage_id: int, order: Sequence[Action]) -> None:
    """Check that the schedule has each computation's source, and the taker of its result."""
    for others, sign in ((nodes.inputs, -1), (nodes.outputs, 1)):
        for action, other in zip(order, others[own].tolist(), strict=True):
            part_id = action.part_id + sign * _DIRECTION[action.kind]
            if other == nodes.num_nodes and action.kind in _SEND and 0 <= part_id < nodes.num_parts:
                unit = f"stage {stage_id}: {action} of part {action.part_id}"
                raise ScheduleError(f"{unit} has no counterpart on part {part_id}: add it")
