"""Show a schedule as text: a grid for people, a dict for programs. (CSV: `csv_form`.)"""

from __future__ import annotations

from typing import Any, NamedTuple

from terapipe_ds.schedule.schedule import Schedule
from terapipe_ds.schedule.validate import replay


class SlotCount(NamedTuple):
    """Hold a schedule's length when every computation takes one slot."""

    num_slots: int
    num_idle: int  # of all stages
    bubble_fraction: float  # idle slots over all slots of all stages


def count_slots(schedule: Schedule) -> SlotCount:
    """Return the unit slots that the schedule takes, and the idle slots of the stages. Raises on a deadlock."""
    num_slots = max((starts[-1] + 1 for starts in replay(schedule) if starts), default=0)
    num_idle = schedule.num_stages * num_slots - sum(map(len, schedule.orders))
    return SlotCount(num_slots, num_idle, num_idle / max(schedule.num_stages * num_slots, 1))


def render(schedule: Schedule, width: int = 110, max_slots: int = 512) -> str:
    """Return the grid: one row per stage, one column per unit time slot (F, B and W take one each), "." where a stage
    waits.

    Lines longer than `width` characters go on in further blocks; a note replaces the columns beyond `max_slots`.
    """
    count = count_slots(schedule)
    shown = min(count.num_slots, max_slots)
    rows = {"slot": list(map(str, range(shown)))}
    rows |= {f"stage {stage_id}": row for stage_id, row in enumerate(_cells(schedule, shown))}
    lines = [_headline(schedule, count), ""]
    label_width = len(f"stage {schedule.num_stages - 1}")
    cell_width = max((len(cell) for row in rows.values() for cell in row), default=1)
    per_block = max((width - label_width - 1) // (cell_width + 1), 1)
    for left in range(0, shown, per_block):
        for label, row in rows.items():
            padded = (f"{cell:<{cell_width}}" for cell in row[left : left + per_block])
            lines.append(f"{label:<{label_width}}  {' '.join(padded)}".rstrip())
        lines.append("")
    if shown < count.num_slots:
        lines += [f"({count.num_slots - shown} more slots are not shown; the CSV form has every entry)", ""]
    if not schedule.forward_only:  # without a backward nothing is kept for one, and this would be mistaken for memory
        lines.append(f"peak live slices  {' '.join(map(str, schedule.peak_live_slices()))}")
    idle = f"{count.num_idle} of {schedule.num_stages * count.num_slots} slots idle"
    return "\n".join([*lines, f"bubble            {idle} ({100 * count.bubble_fraction:.1f} %)"])


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return the schedule and its cost in unit slots, ready for `json.dumps`."""
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


def _cells(schedule: Schedule, num_slots: int) -> list[list[str]]:
    """Return the first `num_slots` columns of the grid."""
    grid = [["."] * num_slots for _ in schedule.orders]
    for stage_id, starts in enumerate(replay(schedule)):
        for slot, cell in zip(starts, schedule.compute_order(stage_id), strict=True):
            if slot >= num_slots:
                break
            grid[stage_id][slot] = cell
    return grid


def _headline(schedule: Schedule, count: SlotCount) -> str:
    slices = schedule.num_slices
    listed = " + ".join([*map(str, slices[:8]), *["..."] * (len(slices) > 8)])
    counts = {"stage": schedule.num_stages, "micro-batch": schedule.num_micro_batches, "slice": sum(slices)}
    words = [many(number, noun) for noun, number in counts.items()]
    words[-1] += f" ({slices[0]} each)" if len(set(slices)) == 1 else f" ({listed})"
    mode = ", forward only" if schedule.forward_only else ""
    return f"{schedule.name}{mode}: {', '.join(words)}, {many(count.num_slots, 'slot')}"


def many(count: int, noun: str) -> str:
    """Return `1 stage`, `2 stages`, `2 micro-batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"
