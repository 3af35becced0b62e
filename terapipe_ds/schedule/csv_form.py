"""Read and write a schedule as CSV, to write by hand, to keep in a file and to run from there.

placement,0/3,1/2        only where the parts are not in a loop: per stage, the parts of its chunks 0, 1, ...
F0.0c0,F0.0c1,B0.0c1,B0.0c0
F0.0c0,F0.0c1,B0.0c1,B0.0c0
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.schedule.action import Action, Kind, ScheduleError
from terapipe_ds.schedule.placement import Placement, loop
from terapipe_ds.schedule.schedule import Schedule
from terapipe_ds.schedule.validate import validate

Entry = TypeVar("Entry")
Place = tuple[int, int]  # row and cell, from 1

_PLACEMENT = "placement"
_MAX_CELLS = 1_000_000
_PARTS = re.compile(r"(0|[1-9][0-9]{0,8})(/(0|[1-9][0-9]{0,8}))*")


def to_csv(schedule: Schedule) -> str:
    """Return one row per stage; the cells are its computations in order.

    A first row has the placement where the parts are not in the loop (part = chunk * stages + stage) that `from_csv`
    assumes, or a chunk computes nothing.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    chunks = range(schedule.chunks_per_stage)
    used = {action.chunk_id for order in schedule.orders for action in order}
    if schedule.placement != loop(schedule.num_stages, len(chunks)) or len(used) < len(chunks):
        parts = ([str(schedule.placement[stage, chunk]) for chunk in chunks] for stage in range(schedule.num_stages))
        writer.writerow([_PLACEMENT, *map("/".join, parts)])
    writer.writerows(schedule.compute_order(stage_id) for stage_id in range(schedule.num_stages))
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Return the schedule that a CSV text describes, validated.

    The counts follow from the cells: stages from the rows, micro-batches, slices and chunks from the highest
    ids, and forward-only where no cell is a B or W. Blank cells at the end of a row and blank rows at the end of the
    text are ignored. Raises `ScheduleError`, naming row and cell (from 1) of an unreadable text, or as `validate`.
    """
    rows = _read_rows(text)
    placement_row = rows.pop(0) if rows[0][0] == _PLACEMENT else None
    first_row = 1 if placement_row is None else 2
    if not rows:
        raise ScheduleError("the CSV has a placement but no stage: give one row per stage, with cells such as F0.0")
    actions = [
        [_read_cell(cell, row_number, number) for number, cell in enumerate(row, start=1)]
        for row_number, row in enumerate(rows, start=first_row)
    ]
    cells = [(a, (row, cell)) for row, of in enumerate(actions, start=first_row) for cell, a in enumerate(of, start=1)]
    num_slices = _count_slices(cells)
    chunk_ids = {action.chunk_id: place for action, place in reversed(cells)}
    placement = (
        loop(len(rows), _count_up(chunk_ids, "chunk"))
        if placement_row is None
        else _read_placement(placement_row, len(rows))
    )
    num_chunks = len(placement) // len(rows)
    if max(chunk_ids) >= num_chunks:
        problem = f"the CSV has chunk {max(chunk_ids)} but its placement {num_chunks} parts per stage"
        raise ScheduleError(f"{problem}: give one more to each")
    orders = tuple(
        tuple(action._replace(part_id=placement[stage_id, action.chunk_id]) for action in row)
        for stage_id, row in enumerate(actions)
    )
    forward_only = all(action.kind is Kind.FORWARD for action, _ in cells)
    schedule = Schedule(name, len(rows), len(num_slices), num_slices, num_chunks, forward_only, orders, placement)
    validate(schedule)
    return schedule


def load(path: str | Path) -> Schedule:
    """Return the schedule of a CSV file, validated; its name is the file's, without `.csv`.

    Raises `ScheduleError`, with the path, where the file cannot be read or holds no schedule that can run.
    """
    path = Path(path)
    shown = str(path) if str(path).isprintable() else repr(str(path))
    try:
        return from_csv(read_bytes(path).decode(), name=path.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{shown}: {error.reason}", error.picture) from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path with a null character
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(f"{shown}: {reason}; give the path of a CSV file in UTF-8") from error


def fits(schedule: Schedule, num_stages: int, num_slices: Iterable[int]) -> str | None:
    """Return the reason why a schedule cannot run a batch of such counts, with the fix; None where it fits."""
    counts, has, number = tuple(num_slices), f"schedule {schedule.name!r} has", schedule.num_micro_batches
    if schedule.num_stages != num_stages:
        return f"{has} {schedule.num_stages} stages (rows), the pipeline {num_stages}"
    if number != len(counts):
        fix = f"set gradient_accumulation_steps to {number}, or write a schedule for {len(counts)}"
        return f"{has} {number} micro-batches, a batch {len(counts)}: {fix}"
    for micro_batch_id, (number, wanted) in enumerate(zip(schedule.num_slices, counts, strict=True)):
        if number != wanted:
            fix = f"cut it into {number}, or write a schedule for {wanted}"
            return f"{has} {number} slices of micro-batch {micro_batch_id}, the plan {wanted}: {fix}"
    return None


def _read_placement(row: list[str], num_stages: int) -> Placement:
    cells = row[1:]
    if len(cells) != num_stages:
        problem = f"the placement has {len(cells)} stages, {num_stages} rows follow"
        raise ScheduleError(f"CSV row 1: {problem}; give one cell for each")
    for number, cell in enumerate(cells, start=2):
        if not _PARTS.fullmatch(cell) or cell.count("/") != cells[0].count("/"):
            problem = f"CSV row 1, cell {number}: cannot read {cell[:40]!r} as the parts of a stage"
            raise ScheduleError(f"{problem}: write one part per chunk, as many for each stage, as 0/7")
    return {
        (stage_id, chunk_id): int(part)
        for stage_id, cell in enumerate(cells)
        for chunk_id, part in enumerate(cell.split("/"))
    }


def _read_rows(text: str) -> list[list[str]]:
    cells = text.count(",") + text.count("\n")
    if cells > _MAX_CELLS:
        raise ScheduleError(f"the CSV has about {cells:,} cells, more than {_MAX_CELLS:,}: give a shorter schedule")
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        fix = "give one row per stage, with cells such as F0.0 between commas"
        raise ScheduleError(f"the CSV cannot be read: {error}; {fix}") from error
    rows = _without_end([_without_end([cell.strip() for cell in row]) for row in rows])
    if not rows:
        raise ScheduleError("the CSV is empty: give one row per stage, with cells such as F0.0")
    if [] in rows:
        fix = "every stage computes something, give its computations"
        raise ScheduleError(f"CSV row {rows.index([]) + 1} is empty: {fix}")
    return rows


def _without_end(entries: list[Entry]) -> list[Entry]:
    while entries and not entries[-1]:
        entries.pop()
    return entries


def _read_cell(cell: str, row_number: int, cell_number: int) -> Action:
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        hint = ", and separate cells by commas" if ";" in cell or "\t" in cell else ""
        raise ScheduleError(f"CSV row {row_number}, cell {cell_number}: {error.reason}{hint}") from None


def _count_slices(cells: list[tuple[Action, Place]]) -> tuple[int, ...]:
    slices: dict[int, dict[int, Place]] = {}
    for action, place in cells:
        slices.setdefault(action.micro_batch_id, {}).setdefault(action.slice_id, place)
    first = {m: next(iter(places.values())) for m, places in slices.items()}
    return tuple(_count_up(slices[m], f"micro-batch {m} slice") for m in range(_count_up(first, "micro-batch")))


def _count_up(places: Mapping[int, Place], what: str) -> int:
    """Return the number of ids; they must be 0, 1, 2, ... (and a huge one must not make a huge table)."""
    missing = next((number for number in range(len(places)) if number not in places), None)
    if missing is not None:
        highest = max(places)
        row, cell = places[highest]
        problem = f"the CSV has {what} {highest} but no {what} {missing}"
        raise ScheduleError(f"CSV row {row}, cell {cell}: {problem}; number them from 0 without a gap")
    return len(places)
