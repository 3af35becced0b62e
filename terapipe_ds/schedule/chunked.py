"""Generate the schedules whose stages hold several chunks, by placement; `placement` draws the layout of the parts.

The tables show unit time slots (F, B and W take one each) of 2 stages: the looped ones with 2 chunks, for 2
micro-batches of one slice and for one of 3 slices; the bidirectional ones for 2 micro-batches of 2 slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, islice

from terapipe_ds.plan import split_evenly
from terapipe_ds.schedule.action import Kind, PlacedUnit
from terapipe_ds.schedule.greedy import UNSPLIT, list_schedule, room_at_places, shortest
from terapipe_ds.schedule.one_f_one_b import backwards, expanded, forwards, one_f_one_b, seq1f1b, with_leads
from terapipe_ds.schedule.placement import bidirectional

# -- a loop: a unit goes round the stages v times


# stage 0  F0.0c0 F1.0c0 F0.0c1 F1.0c1 .      B0.0c1 .      B1.0c1 B0.0c0 B1.0c0
# stage 1  .      F0.0c0 F1.0c0 F0.0c1 B0.0c1 F1.0c1 B1.0c1 B0.0c0 B1.0c0 .
def interleaved(num_stages: int, num_slices: tuple[int, ...], num_chunks: int) -> list[list[PlacedUnit]]:
    """Run 1F1B over v chunks by whole micro-batches, each cut to its slices (Narayanan et al., arXiv 2104.04473).

    It equals Megatron's order where that exists (m a multiple of K, one slice). `num_chunks` 1 is plain `1f1b`.
    """
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_slices)
    return expanded(loop_with_leads(num_stages, (1,) * len(num_slices), num_chunks), num_slices)


# stage 0  F0.0c0 F0.1c0 F0.2c0 F0.0c1 F0.1c1 F0.2c1 .      .      B0.2c1 B0.1c1 B0.0c1 B0.2c0 B0.1c0 B0.0c0
# stage 1  .      F0.0c0 F0.1c0 F0.2c0 F0.0c1 F0.1c1 F0.2c1 B0.2c1 B0.1c1 B0.0c1 B0.2c0 B0.1c0 B0.0c0 .
def seq1f1b_interleaved(num_stages: int, num_slices: tuple[int, ...], num_chunks: int) -> list[list[PlacedUnit]]:
    """Run 1F1B over v chunks by slices (Seq1F1B-I of arXiv 2406.03488). `num_chunks` 1 is plain `seq1f1b`.

    It equals its authors' order where that exists (m * s a multiple of K, s a divisor of K).
    """
    if num_chunks == 1:
        return seq1f1b(num_stages, num_slices)
    return loop_with_leads(num_stages, num_slices, num_chunks)


def _rounds(groups: list[list[PlacedUnit]], chunks: Sequence[int]) -> list[PlacedUnit]:
    return [(*unit[:3], chunk) for group in groups for chunk in chunks for unit in group]


def loop_with_leads(
    num_stages: int, num_slices: tuple[int, ...], num_chunks: int, aligned: bool = False
) -> list[list[PlacedUnit]]:
    """Return orders on a loop in which all stages run the forwards in one order and the backwards in one order.

    They differ in their lead: stage i stays 2(K - 1 - i) forwards ahead of the last stage, Megatron's warm-up, one for
    the way down and one for the way back. Groups of K units or more keep that lead from waiting for itself: the next
    chunk's forward on stage 0 comes K or more places after the one that it needs from the last stage. Where there are
    fewer than K units they are one group, whose forwards of all chunks but the last come before every backward.
    """
    grouped = _aligned_groups if aligned else in_groups
    ahead = _rounds(grouped(forwards(num_slices), num_stages), range(num_chunks))
    back = _rounds(grouped(backwards(num_slices), num_stages), range(num_chunks)[::-1])
    return with_leads(ahead, back, [2 * (num_stages - 1 - stage_id) for stage_id in range(num_stages)])


def _aligned_groups(units: list[PlacedUnit], num_stages: int) -> list[list[PlacedUnit]]:
    """Return `in_groups` of each micro-batch, or of as few together as have K units."""
    together: list[list[PlacedUnit]] = [[]]
    for _, slices in groupby(units, key=lambda unit: unit[1]):
        if len(together[-1]) >= num_stages:
            together.append([])
        together[-1] += slices
    if len(together) > 1 and len(together[-1]) < num_stages:
        rest = together.pop()
        together[-1] += rest
    return [group for several in together for group in in_groups(several, num_stages)]


def in_groups(units: list[PlacedUnit], num_stages: int) -> list[list[PlacedUnit]]:
    """Return units in as many groups of at least K as possible, nearly equal, larger first; one for fewer units."""
    rest = iter(units)
    return [list(islice(rest, size)) for size in split_evenly(len(units), max(len(units) // num_stages, 1))]


# -- bidirectional: half of the micro-batches go down the stages (chunk 0), half up (chunk 1), in each other's gaps


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
    """Run Chimera (Li and Hoefler, SC'21, arXiv 2107.06925), each F and B expanded to its slices.

    The j-th micro-batch of a direction in its basic unit runs F at slot k + 2j and B at slot 2K - 1 - k + 2j of that
    direction's stage k, unit u 2K * u slots later. K is even, so that the two directions never meet in a slot.
    """
    placement = bidirectional(num_stages)
    slots: list[dict[int, PlacedUnit]] = [{} for _ in range(num_stages)]
    chunks = directions(num_stages, len(num_slices))
    for m, chunk in enumerate(chunks):
        start = m - m % num_stages  # of its basic unit
        late = 2 * start + 2 * chunks[start:m].count(chunk)
        for stage_id in range(num_stages):
            part_id = placement[stage_id, chunk]
            slots[stage_id][part_id + late] = Kind.FORWARD, m, 0, chunk
            slots[stage_id][2 * num_stages - 1 - part_id + late] = Kind.BACKWARD, m, 0, chunk
    return expanded([[unit for _, unit in sorted(placed.items())] for placed in slots], num_slices)


# stage 0  F0.0c0 F1.0c1 F0.1c0 F1.1c1 B1.1c1 B1.0c1 B0.1c0 B0.0c0
# stage 1  F1.0c1 F0.0c0 F1.1c1 F0.1c0 B0.1c0 B0.0c0 B1.1c1 B1.0c1
def chimera_seq(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Run `chimera` by slices: the same two pipelines and the same micro-batches in each, one F one B by slices.

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
    by_slices = list_schedule(placement, num_slices, [room_at_places(limits)], times=UNSPLIT, directions=ways)
    whole = chimera(num_stages, num_slices)
    if any(
        peak_of(unit for unit in whole[stage] if unit[3] == chunk) > most for (stage, chunk), most in limits.items()
    ):
        return by_slices
    return shortest([by_slices, whole], placement, num_slices, UNSPLIT)


def peak_of(order: Iterable[PlacedUnit]) -> int:
    """Return the peak number of live slices of an order without W."""
    return max(accumulate((1 if unit[0] is Kind.FORWARD else -1 for unit in order), initial=0))
