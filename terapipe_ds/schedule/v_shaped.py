"""V placement: the parts go down the stages and back up, so that stage k holds parts k and 2K - 1 - k."""

from __future__ import annotations

from .action import Kind
from .interleaved import PlacedUnit
from .one_for_one import forwards


def v_forwards(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Every forward: the n-th unit at slot p + 2n of part p.

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
