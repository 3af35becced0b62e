"""Generate the schedules with split backwards whose stages hold several chunks: on a loop, and on a V.

The tables show unit time slots (F, B and W take one each) of 2 stages with 2 chunks: the loop for one micro-batch of 2
slices, the V for 2 micro-batches of one slice.
"""

from __future__ import annotations

from terapipe_ds.messages import show_value
from terapipe_ds.schedule.action import PlacedUnit, ScheduleError
from terapipe_ds.schedule.chunked import loop_with_leads, peak_of
from terapipe_ds.schedule.greedy import SPLIT, list_schedule, room_at_places, room_on_stages
from terapipe_ds.schedule.one_f_one_b import seq1f1b, with_weights
from terapipe_ds.schedule.placement import Placement, loop, v_shape

TAKE_LIMITS = ("seq1f1b-interleaved-zb", "zbv")
"""The schedules with the option `max_live_slices`."""

DEFAULT = "default"
"""The `max_live_slices` of as many slices as unsliced 1F1B holds on its fullest stage: min(m, K) micro-batches."""


# stage 0  F0.0c0 F0.1c0 F0.0c1 F0.1c1 .      .      B0.1c1 W0.1c1 B0.0c1 W0.0c1 B0.1c0 W0.1c0 B0.0c0 W0.0c0
# stage 1  .      F0.0c0 F0.1c0 F0.0c1 F0.1c1 B0.1c1 W0.1c1 B0.0c1 W0.0c1 B0.1c0 W0.1c0 B0.0c0 W0.0c0 .
def seq1f1b_interleaved_zb(
    num_stages: int, num_slices: tuple[int, ...], num_chunks: int, max_live_slices: object = DEFAULT
) -> list[list[PlacedUnit]]:
    """Run `seq1f1b-interleaved` with W, as `seq1f1b-zb` runs `seq1f1b`, within `max_live_slices` (see `_most_live`).

    With enough units no group reaches over the end of a micro-batch. If the limit is less than the forwards and
    backwards themselves need, orders come from list scheduling.
    """
    placement = loop(num_stages, num_chunks)
    limit = _most_live(placement, num_slices, max_live_slices)
    if num_chunks == 1:
        orders = seq1f1b(num_stages, num_slices)
    else:
        orders = loop_with_leads(num_stages, num_slices, num_chunks, aligned=True)
    if any(peak_of(order) > limit for order in orders):
        return _listed(placement, num_slices, limit)
    return [with_weights(order, limit) for order in orders]


# stage 0  F0.0c0 F1.0c0 .      F0.0c1 B0.0c1 F1.0c1 B1.0c1 W0.0c1 B0.0c0 W0.0c0 W1.0c1 B1.0c0 W1.0c0
# stage 1  .      F0.0c0 F0.0c1 F1.0c0 F1.0c1 B0.0c1 B0.0c0 B1.0c1 B1.0c0 W0.0c0 W0.0c1 W1.0c0 W1.0c1
def zbv(num_stages: int, num_slices: tuple[int, ...], max_live_slices: object = DEFAULT) -> list[list[PlacedUnit]]:
    """Run zero bubble on a V, by slices (ZB-V of Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362).

    Orders come from list scheduling within `max_live_slices`, see `_most_live`. They are short whether W is a half or a
    fifth of a backward, and whether or not slices take longer along the sequence.
    """
    placement = v_shape(num_stages)
    return _listed(placement, num_slices, _most_live(placement, num_slices, max_live_slices))


def _most_live(placement: Placement, num_slices: tuple[int, ...], max_live_slices: object) -> int:
    """Return how many slices a stage may hold between their F and their W, over all its chunks.

    `max_live_slices` is such a number; None: all of them; `DEFAULT`: v s min(m, K), where a micro-batch has at most s.
    Raises `ScheduleError` on anything else, and where a stage could not hold a whole micro-batch.
    """
    _, chunks, least, usual = _sizes(placement, num_slices)
    if max_live_slices is None:
        return chunks * sum(num_slices)
    if max_live_slices == DEFAULT:
        return usual
    if type(max_live_slices) is not int:
        problem = f"max_live_slices is {show_value(max_live_slices)}"
        raise ScheduleError(f"{problem}: give a number of slices, None for no limit, or {DEFAULT!r}")
    if max_live_slices < least:
        holds = f"a stage holds a whole micro-batch at once, {chunks} x {max(num_slices)} slices"
        raise ScheduleError(f"max_live_slices is {max_live_slices}: {holds}; give {least} or more")
    return max_live_slices


def _sizes(placement: Placement, num_slices: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return K, v, the most slices of a micro-batch on a stage, and the `DEFAULT` limit."""
    num_stages = 1 + max(stage_id for stage_id, _ in placement)
    chunks = len(placement) // num_stages
    of_one = chunks * max(num_slices)
    return num_stages, chunks, of_one, of_one * min(len(num_slices), num_stages)


def _listed(placement: Placement, num_slices: tuple[int, ...], limit: int) -> list[list[PlacedUnit]]:
    """Return orders of list scheduling in which no stage holds more than `limit` slices.

    If the limit is short, stages share it out among their chunks as work goes on, or beforehand by the number of
    parts that follow: either may be shorter. Otherwise orders without a wait exist if all times are equal.
    """
    num_stages, chunks, of_one, usual = _sizes(placement, num_slices)
    rooms = [room_on_stages(limit, num_slices, chunks)]
    weights = (4, 1, 1) if limit >= usual else (1, 1, 1)
    if limit < chunks * sum(num_slices):
        shares = {}
        for stage_id in range(num_stages):
            follow = [len(placement) - 1 - placement[stage_id, chunk] for chunk in range(chunks)]
            later = [round((limit - of_one) * parts / max(sum(follow), 1)) for parts in follow[1:]]
            for chunk, share in enumerate((limit - of_one - sum(later), *later)):
                shares[stage_id, chunk] = max(num_slices) + share
        rooms.append(room_at_places(shares))
    return list_schedule(placement, num_slices, rooms, times=SPLIT, weights=weights)
