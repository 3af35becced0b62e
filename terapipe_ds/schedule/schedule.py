"""Define the `Schedule`, the computations of every stage in their order, and lower it to the actions of a stage.

It is a plain value: frozen, compared by content. The object that is printed and validated is therefore the very object
that the engine runs.

Lowering makes of a stage's computations every action of its engine in a batch, here on the middle stage of three:

    order     F0.0            F0.1         B0.1    B0.0
    lowered   RA RA RG F SA   RG F SA      B SG    B SG   RT RD ST

Receives are posted a few computations ahead and sends do not block (but for the budget of `proofs.budget_of_sends`), so
a tensor travels while its neighbours compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

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
_WINDOW_STAGES, _WINDOW_ENTRIES = 4, 8  # how much of a big schedule an error shows on each side of the place


@dataclass(frozen=True)
class Schedule:
    """Hold the computations of every stage, in their order.

    `orders[stage_id]` holds the computations of a stage in the order they run; `placement[(stage_id, chunk_id)]` is
    the part at that place (one part may have several places); `num_slices` has one entry per micro-batch. Sends,
    receives and the end of the batch are in `for_stage`.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_slices: tuple[int, ...]
    chunks_per_stage: int
    forward_only: bool
    orders: tuple[tuple[Action, ...], ...]
    placement: dict[tuple[int, int], int]

    def __hash__(self) -> int:
        """Return a hash of the sizes alone: a hash of all computations would take as long as a replay."""
        return hash((self.name, self.num_stages, self.num_slices, self.chunks_per_stage, self.forward_only))

    @property
    def num_parts(self) -> int:
        return len(set(self.placement.values()))

    def compute_order(self, stage_id: int) -> list[str]:
        """Return the computations of a stage as text: `["F0.0", "F0.1", ..., "B0.0"]`."""
        with_chunk = self.chunks_per_stage > 1
        return [action.text(with_chunk) for action in self.orders[self._checked(stage_id)]]

    def for_stage(self, stage_id: int) -> StageSchedule:
        """Return the actions of the engine of this stage: computations, loads, messages, reduces and the step."""
        checked = self._checked(stage_id)
        if checked not in self._stages:
            self._stages[checked] = lower_stage(self.nodes, checked, self.orders[checked], self.forward_only)
        return self._stages[checked]

    def peak_live_slices(self) -> tuple[int, ...]:
        """Return, per stage, the peak number of slices whose F has run and whose last of B and W has not."""
        return self.nodes.peaks

    def fail_at(self, reason: str, stage_id: int, index: int) -> NoReturn:
        """Raise `ScheduleError` with an entry of an order marked; an index past the end marks a missing entry."""
        place = f"stage {stage_id}, entry {index}"
        raise ScheduleError(f"schedule {self.name!r}, {place}: {reason}", self._marked_grid(stage_id, index))

    @cached_property
    def nodes(self) -> Nodes:
        from terapipe_ds.schedule.nodes import Nodes  # numpy: commands that only name schedules do without

        return Nodes(self.orders, self.num_parts, self.num_slices)

    @cached_property
    def _stages(self) -> dict[int, StageSchedule]:
        return {}

    def _checked(self, stage_id: int) -> int:
        if not 0 <= stage_id < self.num_stages:
            last = self.num_stages - 1
            raise ScheduleError(f"no stage {stage_id}: the schedule has stages 0 to {last}; give one of them")
        return stage_id

    def _marked_grid(self, stage_id: int, index: int) -> str:
        """Return the orders around a place, one line per stage, with a marker under the place."""
        longest = max(len(order) for order in self.orders)
        top, bottom = max(stage_id - _WINDOW_STAGES, 0), min(stage_id + _WINDOW_STAGES + 1, len(self.orders))
        left, right = max(index - _WINDOW_ENTRIES, 0), min(index + _WINDOW_ENTRIES + 1, longest)
        rows = [self.compute_order(row)[left:right] for row in range(top, bottom)]
        cell_width = max([4, *(len(cell) for row in rows for cell in row)])
        label_width = len(f"stage {bottom - 1}")
        lines = [f"  ... stages 0 to {top - 1}"] if top else []
        for row, cells in enumerate(rows, start=top):
            head = f"{f'stage {row}':<{label_width}} | {'... ' if left else ''}"
            tail = " ..." if len(self.orders[row]) > right else ""
            lines.append(head + " ".join(f"{cell:<{cell_width}}" for cell in cells).rstrip() + tail)
            if row == stage_id:
                indent = len(head) + (index - left) * (cell_width + 1)
                cell = cells[index - left] if index - left < len(cells) else ""
                marker = "^" * max(len(cell), 1)
                lines.append(" " * indent + f"{marker} <-- ERROR HERE{f' ({cell})' if cell else ''}")
        if bottom < len(self.orders):
            lines.append(f"  ... stages {bottom} to {len(self.orders) - 1}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StageSchedule:
    """Hold the actions of one stage in one batch."""

    stage_id: int
    actions: tuple[Action, ...]
    peak_live_slices: int


def lower_stage(nodes: Nodes, stage_id: int, order: Sequence[Action], forward_only: bool) -> StageSchedule:
    """Return the actions of a stage's engine, from its computations `order`.

    The receive of a computation is posted before the one `RECEIVE_AHEAD` places earlier. A link connects two parts;
    if both are on one stage, the engine hands the tensor over, without a send and a receive.
    Raises `ScheduleError` if the schedule lacks the neighbour of a computation.
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
    """Return the send of a computation's result, or the receive of its input; None if the peer is -1."""
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
