"""What the schedule tests share: the published orders, strategies, and hand-made schedules of other kinds."""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from terapipe_ds.schedule import SCHEDULE_NAMES, Action, Kind, Schedule, build

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "schedules.json").read_text(encoding="utf-8")
)


@st.composite
def schedules(draw: st.DrawFn, max_slices: int = 6, can_evaluate: bool = True) -> Schedule:
    """Any schedule by name, of a small shape; where it can, one of five is an evaluation."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    num_slices = draw(st.lists(st.integers(1, max_slices), min_size=1, max_size=6))
    num_stages = draw(st.integers(1, 3)) * 2 if name.startswith("chimera") else draw(st.integers(1, 7))
    chunks = draw(st.integers(1, 3)) if "interleaved" in name else 1
    forward_only = can_evaluate and draw(st.integers(0, 4)) == 0
    return build(name, num_stages, len(num_slices), num_slices, forward_only=forward_only, chunks_per_stage=chunks)


stage_counts = st.integers(1, 7)
even_shapes = st.tuples(stage_counts, st.integers(1, 6), st.integers(1, 6))
"""(stages, micro-batches, slices of each)."""
ragged_shapes = st.tuples(stage_counts, st.lists(st.integers(1, 6), min_size=1, max_size=6))
"""(stages, slices of every micro-batch)."""


def golden_order(name: str, stages: str = "stages") -> list[list[str]]:
    orders = GOLDEN[name][stages]
    return [orders[str(stage_id)] for stage_id in range(len(orders))]


def torch_order(num_stages: int, m: int, rank: int, warm_up: int, chunks: int = 1, **more: Any) -> list[str]:
    """The order of torch's own schedules: one part per rank, or a loop of several chunks."""
    from torch.distributed.pipelining import schedules

    actions: Any = schedules._get_1f1b_rank_ops(
        chunks, num_stages, warm_up, m * chunks - warm_up, warm_up, rank,
        lambda step: (step // num_stages) % chunks * num_stages + rank,
        lambda step: (chunks - 1 - (step - warm_up) // num_stages % chunks) * num_stages + rank,
        **more,
    )  # fmt: skip
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    texts = [(a, f"{letters[a.computation_type.name]}{a.microbatch_index}.0") for a in actions if a is not None]
    return [text + f"c{a.stage_index // num_stages}" * (chunks > 1) for a, text in texts]


def by_hand(
    orders: list[list[str]], placement: dict[tuple[int, int], int] | None = None, forward_only: bool = False
) -> Schedule:
    """A schedule of orders written as text; without a placement, part and stage are the same."""
    places = placement or {(stage_id, 0): stage_id for stage_id in range(len(orders))}
    rows = []
    for stage_id, row in enumerate(orders):
        parsed = [Action.parse(cell) for cell in row]
        rows.append(tuple(a._replace(part_id=places[stage_id, a.chunk_id]) for a in parsed))
    units = {action.unit for row in rows for action in row}
    num_slices = tuple(
        1 + max(s for m, s in units if m == micro_batch_id) for micro_batch_id in sorted({m for m, _ in units})
    )
    chunks = 1 + max(chunk for _, chunk in places)
    return Schedule("by hand", len(rows), len(num_slices), num_slices, chunks, forward_only, tuple(rows), places)


def zero_bubble() -> Schedule:
    """Seq1F1B with separate weight gradients, as published."""
    return by_hand(golden_order("seq1f1b_zb_p4_m2_s4"))


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


OTHER_KINDS = {"zero_bubble": zero_bubble, "bidirectional": bidirectional, "v_shaped": v_shaped}


def with_orders(schedule: Schedule, orders: list[list[Action]]) -> Schedule:
    return dataclasses.replace(schedule, orders=tuple(map(tuple, orders)))


def obeys_the_rules(schedule: Schedule) -> bool:
    """The rules once more, by brute force: something can always run, and links keep their order."""
    queues = [list(order) for order in schedule.orders]
    done: set[tuple[Kind, int, int, int]] = set()
    while ready := [queue for queue in queues if queue and done.issuperset(_needs(queue[0], schedule))]:
        done |= {queue.pop(0).key for queue in ready}
    homes = {a.key: k for k, order in enumerate(schedule.orders) for a in order}
    sent, taken = defaultdict(list), defaultdict(list)
    for k, order in enumerate(schedule.orders):
        for a in order:
            step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 99}[a.kind]
            to, source = (homes.get((a.kind, a.part_id + d, *a.unit), k) for d in (step, -step))
            if to != k:
                sent[a.kind, a.part_id, k, to].append(a.unit)
            if source != k:
                taken[a.kind, a.part_id - step, source, k].append(a.unit)
    return sent == taken and not any(queues)


def _needs(action: Action, schedule: Schedule) -> list[tuple[Kind, int, int, int]]:
    """Return what runs before: the slice before or after it, its neighbour part, the F of a B, the B of a W."""
    part, (m, s) = action.part_id, action.unit
    if action.kind is Kind.WEIGHT:
        return [(Kind.BACKWARD, part, m, s)]
    step = 1 if action.kind is Kind.FORWARD else -1
    others = [(action.kind, part - step, m, s), (action.kind, part, m, s - step)]
    others = [key for key in others if 0 <= key[1] < schedule.num_parts and 0 <= key[3] < schedule.num_slices[m]]
    return [*others, *([(Kind.FORWARD, part, m, s)] if action.kind is Kind.BACKWARD else [])]
