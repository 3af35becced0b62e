"""V placement: the parts go down the stages and back up, so that stage k holds parts k and 2K - 1 - k.

The table shows unit time slots (F, B and W take one each) of 2 stages, 2 micro-batches, 1 slice.
"""

from __future__ import annotations

from collections.abc import Sequence

from .action import Kind, ScheduleError
from .interleaved import PlacedUnit
from .list_schedule import SPLIT, Slots, list_schedule
from .one_f_one_b import forwards
from .placement import v_shape


# stage 0  F0.0c0 F1.0c0 .      F0.0c1 B0.0c1 W0.0c1 F1.0c1 B1.0c1 B0.0c0 W0.0c0 W1.0c1 B1.0c0 W1.0c0
# stage 1  .      F0.0c0 F0.0c1 F1.0c0 F1.0c1 B0.0c1 B0.0c0 W0.0c0 B1.0c1 B1.0c0 W0.0c1 W1.0c0 W1.0c1
def zbv(num_stages: int, num_slices: tuple[int, ...], slots: object = None) -> list[list[PlacedUnit]]:
    """Zero bubble on a V, by slices (ZB-V of Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362).

    Stage k holds at most 2K - k + s - 2 slices of its chunk 0 and k + s of its chunk 1 between their F and their W, s
    of the micro-batch that has most: 2(K + s - 1) in all, where each is half as large as a slice of `seq1f1b`,
    which holds K + s - 1 of them. Orders come from list scheduling with these limits, and are short whether W is a
    half or three tenths of a backward; `slots`, what F, B and W take in whole numbers, as (4, 5, 3), asks for those
    that are short at these times.

    Raises `ScheduleError` where `slots` is anything else.
    """
    times: Sequence[Slots] = SPLIT
    if slots is not None:
        given = tuple(slots) if isinstance(slots, list | tuple) else ()
        if len(given) != 3 or not all(type(length) is int and length > 0 for length in given):
            raise ScheduleError(f"slots is {slots!r}: give what F, B and W take as three whole numbers, as (4, 5, 3)")
        times = [given]
    placement = v_shape(num_stages)
    most = max(num_slices)
    limits = {
        (stage_id, chunk): (2 * num_stages - 1 - part_id if chunk == 0 else 2 * num_stages - part_id) + most - 1
        for (stage_id, chunk), part_id in placement.items()
    }
    return list_schedule(placement, num_slices, limits, times=times)


def v_forwards(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Return every forward: the n-th unit at slot p + 2n of part p.

    The two parts of a stage differ by an odd number, so that they never meet in a slot, and no stage waits.
    """
    units = forwards(num_slices)
    orders = []
    for stage_id in range(num_stages):
        parts = (stage_id, 2 * num_stages - 1 - stage_id)
        slots = {
            part_id + 2 * n: (Kind.FORWARD, m, s, chunk)
            for chunk, part_id in enumerate(parts)
            for n, (_, m, s) in enumerate(units)
        }
        orders.append([unit for _, unit in sorted(slots.items())])
    return orders
