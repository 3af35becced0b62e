"""What the schedule tests share: the published orders, strategies, and hand-made schedules of other kinds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES, Action, Kind, Schedule, build

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "schedules.json").read_text(encoding="utf-8")
)

names = st.sampled_from([name for name in SCHEDULE_NAMES if name not in CHUNKED_SCHEDULES])
"""The schedules with one part per stage."""
stage_counts = st.integers(1, 7)


@st.composite
def chunked_schedules(draw: st.DrawFn, max_slices: int = 4) -> Schedule:
    """Any of those whose stages hold several chunks, of a small shape."""
    name = draw(st.sampled_from([name for name in SCHEDULE_NAMES if name in CHUNKED_SCHEDULES]))
    num_slices = draw(st.lists(st.integers(1, max_slices), min_size=1, max_size=5))
    num_stages = draw(st.integers(1, 2)) * 2 if name.startswith("chimera") else draw(st.integers(1, 4))
    chunks = draw(st.integers(2, 3)) if "interleaved" in name else 2
    forward_only = draw(st.integers(0, 4)) == 0
    return build(name, num_stages, len(num_slices), num_slices, forward_only=forward_only, chunks_per_stage=chunks)


even_shapes = st.tuples(stage_counts, st.integers(1, 6), st.integers(1, 6))
"""(stages, micro-batches, slices of each)."""
ragged_shapes = st.tuples(stage_counts, st.lists(st.integers(1, 6), min_size=1, max_size=6))
"""(stages, slices of every micro-batch)."""


def golden_order(name: str, stages: str = "stages") -> list[list[str]]:
    orders = GOLDEN[name][stages]
    return [orders[str(stage_id)] for stage_id in range(len(orders))]


def by_hand(
    orders: list[list[str]], placement: dict[tuple[int, int], int] | None = None, forward_only: bool = False
) -> Schedule:
    """A schedule of orders written as text; without a placement, part and stage are the same."""
    places = placement or {(stage_id, 0): stage_id for stage_id in range(len(orders))}
    rows = []
    for stage_id, row in enumerate(orders):
        parsed = [Action.parse(cell) for cell in row]
        rows.append(tuple(dataclasses.replace(a, part_id=places[stage_id, a.chunk_id]) for a in parsed))
    units = {action.unit for row in rows for action in row}
    num_slices = tuple(
        1 + max(s for m, s in units if m == micro_batch_id) for micro_batch_id in sorted({m for m, _ in units})
    )
    chunks = 1 + max(chunk for _, chunk in places)
    return Schedule("by hand", len(rows), len(num_slices), num_slices, chunks, forward_only, tuple(rows), places)


def zero_bubble() -> Schedule:
    """Seq1F1B with separate weight gradients, as published."""
    return by_hand(golden_order("seq1f1b_zb_p4_m2_s4"))


def interleaved() -> Schedule:
    """Seq1F1B with two parts per stage, as published."""
    placement = {(stage, chunk): chunk * 2 + stage for stage in range(2) for chunk in range(2)}
    return by_hand(golden_order("seq1f1b_i_p2_m4_s2_v2"), placement)


def bidirectional() -> Schedule:
    """Chimera as published: every part stands at two places, each micro-batch goes through one of them."""
    orders = []
    for row in golden_order("chimera_D4N4", "devices"):
        cells = [cell.split(":")[1] for cell in row]
        orders.append([f"{cell[:-1]}.0c{'du'.index(cell[-1])}" for cell in cells])
    placement = {(stage, chunk): (stage, 3 - stage)[chunk] for stage in range(4) for chunk in range(2)}
    return by_hand(orders, placement)


def v_shaped() -> Schedule:
    """Two stages, four parts laid out as a V: stage 1 hands part 1 over to part 2 without a wire."""
    placement = {(0, 0): 0, (1, 0): 1, (1, 1): 2, (0, 1): 3}
    first = ["F0.0c0", "F0.1c0", "F0.0c1", "F0.1c1", "B0.1c1", "B0.0c1", "B0.1c0", "B0.0c0"]
    second = ["F0.0c0", "F0.0c1", "F0.1c0", "F0.1c1", "B0.1c1", "B0.1c0", "B0.0c1", "B0.0c0"]
    return by_hand([first, second], placement)


OTHER_KINDS = {
    "zero_bubble": zero_bubble,
    "interleaved": interleaved,
    "bidirectional": bidirectional,
    "v_shaped": v_shaped,
}


def with_orders(schedule: Schedule, orders: list[list[Action]]) -> Schedule:
    return dataclasses.replace(schedule, orders=tuple(map(tuple, orders)))


def computations(schedule: Schedule, stage_id: int, kind: Kind) -> list[Action]:
    return [action for action in schedule.orders[stage_id] if action.kind is kind]
