"""The words of a schedule: an ``Action``, one stage's list of them, and the ``Schedule`` of all stages.

Everything here is a plain value: frozen, compared by content, with no tensor and no process group inside. The
object that is printed and validated is therefore the very object that the engine runs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run.

    ``reason`` says in one line what is wrong and what to do; ``picture`` is the grid with the place marked,
    or "".
    """

    def __init__(self, reason: str, picture: str = "") -> None:
        super().__init__(f"{reason}\n{picture}" if picture else reason)
        self.reason = reason
        self.picture = picture

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[str, str]]:
        return type(self), (self.reason, self.picture)


class Kind(enum.Enum):
    """What an action does; the value is the code it prints as."""

    LOAD = "L"
    RECV_ACTIVATION = "RA"
    FORWARD = "F"
    SEND_ACTIVATION = "SA"
    RECV_GRAD = "RG"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_GRAD = "SG"
    REDUCE_TIED_GRADS = "RT"
    REDUCE_GRADS = "RD"
    OPTIMIZER_STEP = "ST"

    __hash__ = object.__hash__  # Enum's own goes through Python, and kinds are in every key of every table


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT})
SEND_KINDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRAD})
RECV_KINDS = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRAD})

_COMPUTE_FORM = re.compile(r"([FBW])(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})(?:c(0|[1-9][0-9]{0,8}))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does, at the place (stage, ``chunk_id``) of ``part_id``.

    Ids that mean nothing for the kind are -1: ``slice_id`` of a load, both ids of the actions that close a
    batch, and the peer of everything but sends and receives. A receive *posts* a non-blocking receive, and
    the forward or backward of the same unit and part waits for it; a send never blocks.
    """

    kind: Kind
    micro_batch_id: int = -1
    slice_id: int = -1
    part_id: int = 0
    chunk_id: int = 0
    peer_stage_id: int = -1
    peer_part_id: int = -1

    @property
    def kwargs(self) -> dict[str, Action]:
        """What DeepSpeed's ``_exec_schedule`` passes to the method that executes an instruction."""
        return {"action": self}

    @property
    def unit(self) -> tuple[int, int]:
        """``(micro_batch_id, slice_id)``: under this key tensors in flight are kept."""
        return self.micro_batch_id, self.slice_id

    @property
    def key(self) -> tuple[Kind, int, int, int]:
        """``(kind, part_id, micro_batch_id, slice_id)``: of computations, unique in a schedule."""
        return self.kind, self.part_id, self.micro_batch_id, self.slice_id

    def text(self, with_chunk: bool) -> str:
        """The compute form, ``F0.3`` or, with the chunk, ``F0.3c0``."""
        chunk = f"c{self.chunk_id}" if with_chunk else ""
        return f"{self.kind.value}{self.micro_batch_id}.{self.slice_id}{chunk}"

    def __str__(self) -> str:
        if self.micro_batch_id < 0:
            return self.kind.value
        if self.kind is Kind.LOAD:
            return f"{self.kind.value}{self.micro_batch_id}"
        text = self.text(with_chunk=self.chunk_id > 0)
        if self.kind in SEND_KINDS:
            return f"{text}>{self.peer_stage_id}"
        if self.kind in RECV_KINDS:
            return f"{text}<{self.peer_stage_id}"
        return text

    @classmethod
    def parse(cls, text: str, part_id: int = 0) -> Action:
        """The computation that ``text`` names: ``F0.3``, ``B1.0c1``.

        The text does not name the part, so the caller gives it. Raises ``ScheduleError`` on any other text.
        """
        match = _COMPUTE_FORM.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"cannot read {text[:40]!r} as a computation: write F, B or W, then micro-batch.slice, and"
                " c<chunk> where stages hold several parts, for example F0.3 or B1.0c1"
            )
        kind, micro_batch_id, slice_id, chunk_id = match.groups()
        return cls(Kind(kind), int(micro_batch_id), int(slice_id), part_id, int(chunk_id or 0))


@dataclass(frozen=True)
class StageSchedule:
    """What one stage runs in one batch: an iterable of lists of instructions, as DeepSpeed wants it."""

    stage_id: int
    actions: tuple[Action, ...]
    peak_live_slices: int

    def __iter__(self) -> Iterator[list[Action]]:
        return ([action] for action in self.actions)

    def num_pipe_buffers(self) -> int:
        """0: tensors in flight are kept by unit, not in DeepSpeed's numbered buffers."""
        return 0


@dataclass(frozen=True)
class Schedule:
    """Who runs what, in which order.

    ``orders[stage_id]`` holds the computations of a stage in the order they run; ``placement[(stage_id,
    chunk_id)]`` is the part that stands at that place (one part may stand at several places); ``num_slices``
    has one entry per micro-batch. Sends, receives and the end of the batch are in ``for_stage``.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_slices: tuple[int, ...]
    chunks_per_stage: int
    forward_only: bool
    orders: tuple[tuple[Action, ...], ...]
    placement: dict[tuple[int, int], int] = field(hash=False)

    @property
    def num_parts(self) -> int:
        """Into how many parts the layers are cut."""
        return len(set(self.placement.values()))

    @property
    def part_share(self) -> float:
        """Of a stage's layers, what a part holds: all of them where every part stands at two places."""
        return self.num_stages / self.num_parts

    def compute_order(self, stage_id: int) -> list[str]:
        """The computations of a stage as text: ``["F0.0", "F0.1", ..., "B0.0"]``."""
        with_chunk = self.chunks_per_stage > 1
        return [action.text(with_chunk) for action in self.orders[self._checked(stage_id)]]

    def for_stage(self, stage_id: int) -> StageSchedule:
        """What the engine of this stage runs: the computations with loads, messages, reduces and the step."""
        return self._stage_schedules[self._checked(stage_id)]

    def peak_live_slices(self) -> tuple[int, ...]:
        """Per stage, the most slices at once whose F has run and whose last of B and W has not."""
        return tuple(peak_live_slices(order) for order in self.orders)

    @cached_property
    def _stage_schedules(self) -> tuple[StageSchedule, ...]:
        from .lower import lower  # lower builds on the values of this module

        return lower(self)

    def _checked(self, stage_id: int) -> int:
        if not 0 <= stage_id < self.num_stages:
            raise ScheduleError(
                f"no stage {stage_id}: the schedule has stages 0 to {self.num_stages - 1}; give one of them"
            )
        return stage_id


def peak_live_slices(order: tuple[Action, ...]) -> int:
    """The most live slices of one stage, over all its chunks.

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


_WINDOW_STAGES, _WINDOW_ENTRIES = 4, 8  # how much of a big schedule an error shows on each side of the place


def fail_at(schedule: Schedule, reason: str, stage_id: int, index: int) -> NoReturn:
    """Raise ``ScheduleError`` with an entry of an order marked; past the end stands what is missing."""
    place = f"stage {stage_id}, entry {index}"
    raise ScheduleError(
        f"schedule {schedule.name!r}, {place}: {reason}", _marked_grid(schedule, stage_id, index)
    )


def _marked_grid(schedule: Schedule, stage_id: int, index: int) -> str:
    """The orders around a place, one line per stage, with a marker under the place."""
    longest = max(len(order) for order in schedule.orders)
    top, bottom = max(stage_id - _WINDOW_STAGES, 0), min(stage_id + _WINDOW_STAGES + 1, len(schedule.orders))
    left, right = max(index - _WINDOW_ENTRIES, 0), min(index + _WINDOW_ENTRIES + 1, longest)
    rows = [schedule.compute_order(row)[left:right] for row in range(top, bottom)]
    cell_width = max([4, *(len(cell) for row in rows for cell in row)])
    label_width = len(f"stage {bottom - 1}")
    lines = [f"  ... stages 0 to {top - 1}"] if top else []
    for row, cells in enumerate(rows, start=top):
        head = f"{f'stage {row}':<{label_width}} | {'... ' if left else ''}"
        tail = " ..." if len(schedule.orders[row]) > right else ""
        lines.append(head + " ".join(f"{cell:<{cell_width}}" for cell in cells).rstrip() + tail)
        if row == stage_id:
            indent = len(head) + (index - left) * (cell_width + 1)
            cell = cells[index - left] if index - left < len(cells) else ""
            lines.append(
                " " * indent + "^" * max(len(cell), 1) + f" <-- ERROR HERE{f' ({cell})' if cell else ''}"
            )
    if bottom < len(schedule.orders):
        lines.append(f"  ... stages {bottom} to {len(schedule.orders) - 1}")
    return "\n".join(lines)
