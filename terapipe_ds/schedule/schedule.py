"""Define the `Schedule`: the computations of every stage, in their order.

It is a plain value: frozen, compared by content. The object that is printed and validated is therefore the very object
that the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from terapipe_ds.schedule.action import Action, ScheduleError
from terapipe_ds.schedule.lower import StageSchedule, lower_stage

if TYPE_CHECKING:
    from terapipe_ds.schedule.nodes import Nodes

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
        """Return the number of parts into which the layers are cut."""
        return len(set(self.placement.values()))

    @property
    def part_share(self) -> float:
        """Return the share of a stage's layers that a part holds: all of them where every part has two places."""
        return self.num_stages / self.num_parts

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
        """Return the computations of all stages as arrays."""
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
