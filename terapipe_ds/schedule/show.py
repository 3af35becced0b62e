"""A schedule as text: a grid for people, CSV for hand-written schedules, a dict for programs."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from .action import Action, Kind, Schedule, ScheduleError
from .validate import replay, validate

WIDTH, MAX_SLOTS = 110, 512


@dataclass(frozen=True)
class SlotCount:
    """A schedule's length when every computation takes one slot."""

    num_stages: int
    num_slots: int
    num_idle: int

    @property
    def bubble_fraction(self) -> float:
        """Idle slots over all slots of all stages."""
        return self.num_idle / max(self.num_stages * self.num_slots, 1)


def count_slots(schedule: Schedule) -> SlotCount:
    """How many unit slots the schedule takes, and how many of them the stages idle. Raises on a deadlock."""
    num_slots = max((starts[-1] + 1 for starts in replay(schedule) if starts), default=0)
    busy = sum(len(order) for order in schedule.orders)
    return SlotCount(schedule.num_stages, num_slots, schedule.num_stages * num_slots - busy)


def render(schedule: Schedule, width: int = WIDTH, max_slots: int = MAX_SLOTS) -> str:
    """The grid: one row per stage, one column per unit time slot (F, B and W take one each), "." where a
    stage waits.

    Lines longer than ``width`` characters go on in further blocks; beyond ``max_slots`` columns a note takes
    the rest.
    """
    count = count_slots(schedule)
    shown = min(count.num_slots, max_slots)
    cells = _cells(schedule, shown)
    lines = [_headline(schedule, count), ""]
    label_width = len(f"stage {schedule.num_stages - 1}")
    cell_width = max([len(str(max(shown - 1, 0))), *(len(cell) for row in cells for cell in row)])
    per_block = max((width - label_width - 1) // (cell_width + 1), 1)
    for left in range(0, shown, per_block):
        slots = range(left, min(left + per_block, shown))
        rows = [("slot", [str(slot) for slot in slots])]
        rows += [(f"stage {stage_id}", [row[slot] for slot in slots]) for stage_id, row in enumerate(cells)]
        for label, row in rows:
            padded = (f"{cell:<{cell_width}}" for cell in row)
            lines.append(f"{label:<{label_width}}  {' '.join(padded)}".rstrip())
        lines.append("")
    if shown < count.num_slots:
        lines += [f"({count.num_slots - shown} more slots are not shown; the CSV form has every entry)", ""]
    return "\n".join([*lines, *_footer(schedule, count)])


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """The schedule and what it costs in unit slots, ready for ``json.dumps``."""
    count = count_slots(schedule)
    return {
        "name": schedule.name,
        "num_stages": schedule.num_stages,
        "num_micro_batches": schedule.num_micro_batches,
        "num_slices": list(schedule.num_slices),
        "chunks_per_stage": schedule.chunks_per_stage,
        "forward_only": schedule.forward_only,
        "orders": [schedule.compute_order(stage_id) for stage_id in range(schedule.num_stages)],
        "peak_live_slices": list(schedule.peak_live_slices()),
        "num_slots": count.num_slots,
        "bubble_fraction": count.bubble_fraction,
    }


def to_csv(schedule: Schedule) -> str:
    """One row per stage; the cells are its computations in order.

    A schedule whose stages hold several parts fits only in the looped placement (part = chunk * stages +
    stage), which is what ``from_csv`` assumes: another one raises ``ScheduleError``.
    """
    if schedule.placement != _looped_placement(schedule.num_stages, schedule.chunks_per_stage):
        raise ScheduleError(f"schedule {schedule.name!r} has a placement of its own, which CSV cannot hold")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(schedule.compute_order(stage_id) for stage_id in range(schedule.num_stages))
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule that a CSV text describes, validated.

    The counts follow from the cells: stages from the rows, micro-batches, slices and chunks from the highest
    ids, and forward-only where no cell is a B or W. Blank cells at the end of a row and blank rows at the end
    of the text are ignored. Raises ``ScheduleError``: naming row and cell (from 1) of what cannot be read, or
    as ``validate``.
    """
    rows = _read_rows(text)
    actions = [
        [_read_cell(cell, row_number, number) for number, cell in enumerate(row, start=1)]
        for row_number, row in enumerate(rows, start=1)
    ]
    everything = [action for row in actions for action in row]
    num_slices = _count_slices(everything)
    num_chunks = _count_up({action.chunk_id for action in everything}, "chunk")
    placement = _looped_placement(len(rows), num_chunks)
    orders = tuple(
        tuple(Action(a.kind, *a.unit, placement[stage_id, a.chunk_id], a.chunk_id) for a in row)
        for stage_id, row in enumerate(actions)
    )
    forward_only = all(action.kind is Kind.FORWARD for action in everything)
    schedule = Schedule(
        name, len(rows), len(num_slices), num_slices, num_chunks, forward_only, orders, placement
    )
    validate(schedule)
    return schedule


def _cells(schedule: Schedule, num_slots: int) -> list[list[str]]:
    """The first ``num_slots`` columns of the grid."""
    grid = [["."] * num_slots for _ in schedule.orders]
    for stage_id, starts in enumerate(replay(schedule)):
        for slot, cell in zip(starts, schedule.compute_order(stage_id), strict=True):
            if slot >= num_slots:
                break
            grid[stage_id][slot] = cell
    return grid


def _headline(schedule: Schedule, count: SlotCount) -> str:
    slices = schedule.num_slices
    same = len(set(slices)) == 1
    some = (
        f"{slices[0]} each"
        if same
        else " + ".join(map(str, slices[:8])) + (" + ..." if len(slices) > 8 else "")
    )
    mode = ", forward only" if schedule.forward_only else ""
    return (
        f"{schedule.name}{mode}: {_many(schedule.num_stages, 'stage')}, "
        f"{_many(schedule.num_micro_batches, 'micro-batch')}, {_many(sum(slices), 'slice')} ({some}), "
        f"{_many(count.num_slots, 'slot')}"
    )


def _many(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def _footer(schedule: Schedule, count: SlotCount) -> list[str]:
    peaks = " ".join(map(str, schedule.peak_live_slices()))
    total = count.num_stages * count.num_slots
    bubble = f"bubble            {count.num_idle} of {total} slots idle ({100 * count.bubble_fraction:.1f} %)"
    # Without a backward nothing is kept for one, and the count of forwards would be mistaken for memory.
    return [bubble] if schedule.forward_only else [f"peak live slices  {peaks}", bubble]


def _looped_placement(num_stages: int, num_chunks: int) -> dict[tuple[int, int], int]:
    return {
        (stage, chunk): chunk * num_stages + stage
        for chunk in range(num_chunks)
        for stage in range(num_stages)
    }


def _read_rows(text: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(
            f"the CSV cannot be read: {error}; give one row per stage, with cells such as F0.0 between commas"
        ) from error
    rows = [[cell.strip() for cell in row] for row in rows]
    for row in rows:
        while row and not row[-1]:
            row.pop()
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError("the CSV is empty: give one row per stage, with cells such as F0.0")
    empty = next((number for number, row in enumerate(rows, start=1) if not row), None)
    if empty is not None:
        raise ScheduleError(
            f"CSV row {empty} is empty: every stage computes something, give its computations"
        )
    return rows


def _read_cell(cell: str, row_number: int, cell_number: int) -> Action:
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        hint = ", and separate cells by commas" if ";" in cell or "\t" in cell else ""
        raise ScheduleError(f"CSV row {row_number}, cell {cell_number}: {error.reason}{hint}") from None


def _count_slices(actions: list[Action]) -> tuple[int, ...]:
    slices: dict[int, set[int]] = {}
    for action in actions:
        slices.setdefault(action.micro_batch_id, set()).add(action.slice_id)
    return tuple(
        _count_up(slices[m], f"micro-batch {m} slice") for m in range(_count_up(set(slices), "micro-batch"))
    )


def _count_up(ids: set[int], what: str) -> int:
    """How many ids there are; they must be 0, 1, 2, ... (and a huge one must not make a huge table)."""
    missing = next((number for number in range(len(ids)) if number not in ids), None)
    if missing is not None:
        raise ScheduleError(
            f"the CSV has {what} {max(ids)} but no {what} {missing}: number them from 0 without a gap"
        )
    return len(ids)
