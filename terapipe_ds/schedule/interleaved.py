"""Looped placements: every stage holds v chunks, and a unit goes round the stages v times.

The tables show unit time slots (a forward and a backward take one each) of 2 stages with 2 chunks: 2 micro-batches of
one slice, and one of 3 slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from terapipe_ds.plan import split_evenly

from .action import Kind
from .one_f_one_b import Unit, backwards, forwards, one_f_one_b, seq1f1b, slices_of, with_leads

PlacedUnit = tuple[Kind, int, int, int]
"""(F or B or W, micro_batch_id, slice_id, chunk_id)."""


# stage 0  F0.0c0 F1.0c0 F0.0c1 F1.0c1 .      B0.0c1 .      B1.0c1 B0.0c0 B1.0c0
# stage 1  .      F0.0c0 F1.0c0 F0.0c1 B0.0c1 F1.0c1 B1.0c1 B0.0c0 B1.0c0 .
def interleaved(num_stages: int, num_slices: tuple[int, ...], num_chunks: int) -> list[list[PlacedUnit]]:
    """1F1B over v chunks by whole micro-batches, each expanded to its slices (Narayanan et al., arXiv 2104.04473).

    Equals Megatron's order where that exists (m a multiple of K, one slice). `num_chunks` 1 is plain `1f1b`.
    """
    if num_chunks == 1:
        return [place(order, 0) for order in one_f_one_b(num_stages, num_slices)]
    whole = _with_leads(num_stages, (1,) * len(num_slices), num_chunks)
    return [
        [(kind, m, s, chunk) for kind, m, _, chunk in order for s in slices_of(kind, num_slices[m])] for order in whole
    ]


# stage 0  F0.0c0 F0.1c0 F0.2c0 F0.0c1 F0.1c1 F0.2c1 .      .      B0.2c1 B0.1c1 B0.0c1 B0.2c0 B0.1c0 B0.0c0
# stage 1  .      F0.0c0 F0.1c0 F0.2c0 F0.0c1 F0.1c1 F0.2c1 B0.2c1 B0.1c1 B0.0c1 B0.2c0 B0.1c0 B0.0c0 .
def seq1f1b_interleaved(num_stages: int, num_slices: tuple[int, ...], num_chunks: int) -> list[list[PlacedUnit]]:
    """1F1B over v chunks by slices (Seq1F1B-I of arXiv 2406.03488). `num_chunks` 1 is plain `seq1f1b`.

    Equals its authors' order where that exists (m * s a multiple of K, s a divisor of K).
    """
    if num_chunks == 1:
        return [place(order, 0) for order in seq1f1b(num_stages, num_slices)]
    return _with_leads(num_stages, num_slices, num_chunks)


def looped_forwards(num_stages: int, num_slices: tuple[int, ...], num_chunks: int) -> list[PlacedUnit]:
    """Return every forward in the order in which each stage of a loop runs them: groups of units, chunk by chunk.

    A group has at least K units, so that its first unit is back from the last stage when stage 0 has run the last one;
    all orders are the same, so that stages cannot wait for one another.
    """
    groups = _groups(forwards(num_slices), num_stages)
    return [(*unit, chunk) for group in groups for chunk in range(num_chunks) for unit in group]


def _with_leads(num_stages: int, num_slices: tuple[int, ...], num_chunks: int) -> list[list[PlacedUnit]]:
    """Return orders in which all stages run the forwards in one order and the backwards in one order.

    What differs is the lead: stage i stays 2(K - 1 - i) forwards ahead of the last stage, Megatron's warm-up, one for
    the way down and one for the way back. Groups of K units or more keep that lead from waiting for itself: the next
    chunk's forward on stage 0 comes K or more places after the one that it needs from the last stage. Where there are
    fewer than K units they are one group, whose forwards of all chunks but the last come before every backward.
    """
    groups = _groups(backwards(num_slices), num_stages)
    back = [(*unit, chunk) for group in groups for chunk in reversed(range(num_chunks)) for unit in group]
    leads = [2 * (num_stages - 1 - stage_id) for stage_id in range(num_stages)]
    return with_leads(looped_forwards(num_stages, num_slices, num_chunks), back, leads)


def _groups(units: list[Unit], num_stages: int) -> list[list[Unit]]:
    """Return as many groups of at least K units as there are, equal or nearly, larger first; one for fewer units."""
    rest = iter(units)
    return [list(islice(rest, size)) for size in split_evenly(len(units), max(len(units) // num_stages, 1))]


def place(order: Iterable[Unit], chunk_id: int) -> list[PlacedUnit]:
    """Return the units of an order, all of one chunk."""
    return [(*unit, chunk_id) for unit in order]
