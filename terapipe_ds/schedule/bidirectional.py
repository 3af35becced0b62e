"""Bidirectional pipelines: half of the micro-batches go down the stages, half of them up, in each other's gaps.

Chunk 0 of a stage belongs to the pipeline down (part = stage), chunk 1 to the one up (part = K - 1 - stage). The table
shows unit time slots (a forward and a backward take one each) of 2 stages, 2 micro-batches, 2 slices.
"""

from __future__ import annotations

from itertools import accumulate

from .action import Kind
from .interleaved import PlacedUnit
from .list_schedule import UNSPLIT, list_schedule, num_slots
from .one_f_one_b import slices_of
from .placement import bidirectional


def directions(num_stages: int, num_micro_batches: int) -> list[int]:
    """Return, per micro-batch, its chunk: 0 where it goes down, 1 where it goes up.

    Each basic unit of K micro-batches has K / 2 of each, those down first; a smaller last unit splits likewise, with
    one more down where it is odd.
    """
    chunks: list[int] = []
    while (left := min(num_stages, num_micro_batches - len(chunks))) > 0:
        chunks += [0] * (left - left // 2) + [1] * (left // 2)
    return chunks


# stage 0  F0.0c0 F0.1c0 F1.0c1 F1.1c1 B1.1c1 B1.0c1 B0.1c0 B0.0c0
# stage 1  F1.0c1 F1.1c1 F0.0c0 F0.1c0 B0.1c0 B0.0c0 B1.1c1 B1.0c1
def chimera(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Chimera (Li and Hoefler, SC'21, arXiv 2107.06925), each F and B expanded to its slices.

    The j-th micro-batch of a direction in its basic unit runs F at slot k + 2j and B at slot 2K - 1 - k + 2j of that
    direction's stage k, unit u 2K * u slots later. K is even, so that the two directions never meet in a slot.
    """
    placement = bidirectional(num_stages)
    slots: list[dict[int, tuple[Kind, int, int]]] = [{} for _ in range(num_stages)]
    chunks = directions(num_stages, len(num_slices))
    for m, chunk in enumerate(chunks):
        start = m - m % num_stages  # of its basic unit
        late = 2 * start + 2 * chunks[start:m].count(chunk)
        for stage_id in range(num_stages):
            part_id = placement[stage_id, chunk]
            slots[stage_id][part_id + late] = Kind.FORWARD, m, chunk
            slots[stage_id][2 * num_stages - 1 - part_id + late] = Kind.BACKWARD, m, chunk
    return [
        [(kind, m, s, chunk) for _, (kind, m, chunk) in sorted(mine.items()) for s in slices_of(kind, num_slices[m])]
        for mine in slots
    ]


# stage 0  F0.0c0 F1.0c1 F0.1c0 F1.1c1 B1.1c1 B1.0c1 B0.1c0 B0.0c0
# stage 1  F1.0c1 F0.0c0 F1.1c1 F0.1c0 B0.1c0 B0.0c0 B1.1c1 B1.0c1
def chimera_seq(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """`chimera` by slices: the same two pipelines and the same micro-batches in each, one F one B by slices.

    Orders come from list scheduling at B = 2F, where the k-th stage of a direction holds at most 2(K - k) + s - 1 live
    slices of that direction, s of the micro-batch that has most: 2(K + s) on each stage, not K * s. Where `chimera`
    itself stays within these limits and is shorter, it is taken; with one slice per micro-batch always.
    """
    most = max(num_slices)
    if most == 1:
        return chimera(num_stages, num_slices)
    placement = bidirectional(num_stages)
    limits = {place: 2 * (num_stages - part_id) + most - 1 for place, part_id in placement.items()}
    ways = directions(num_stages, len(num_slices))
    found = list_schedule(placement, num_slices, limits, times=UNSPLIT, directions=ways)
    whole = chimera(num_stages, num_slices)
    fits = all(
        _peak(order, chunk) <= limits[stage_id, chunk] for stage_id, order in enumerate(whole) for chunk in range(2)
    )
    (times,) = UNSPLIT
    return whole if fits and num_slots(whole, placement, times) < num_slots(found, placement, times) else found


def _peak(order: list[PlacedUnit], chunk_id: int) -> int:
    """Return the most live slices of one chunk."""
    live = (1 if kind is Kind.FORWARD else -1 for kind, _, _, chunk in order if chunk == chunk_id)
    return max(accumulate(live, initial=0))
