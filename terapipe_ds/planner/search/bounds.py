"""Bound the time of every plan from below, whichever of these schedules runs it, and meet plans close to the bound.

In `gpipe`, `1f1b`, `terapipe` and `seq1f1b` every stage begins with the forwards of micro-batch 0, slice by
slice, and ends with the backward of one micro-batch, slice by slice in reverse, after all of its other work. Take
stages a <= k and two slices i, i'. In any of these schedules

- the first slice comes down to stage a; there run the slices before i; slice i goes on to k;
- stage k works: slices from i on, all that lies between, the last backward down to slice i';
- slice i' goes back to a; there run the backwards of the slices before i'; the first slice's goes up to stage 0.

Each step waits for the one before. So a batch takes at least, with h = min over a and k, and for every i and i'

    (m - 1) sum_j (f_k + b_k)(j) + sum_j (h_f + h_b)(j) + way of the first slice
        + [sum of f(i) over a..k and its links - h_f(i)] + [sum of b(i') over k..a and its links - h_b(i')]

which has the form of the slice program. On equal stages with a = 0 and k = K - 1 it is the exact time of `terapipe`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from terapipe_ds.planner.search.pipeline import CachedCosts
from terapipe_ds.planner.slice_program.branch_and_bound import Objective, Search, search_plans
from terapipe_ds.planner.slice_program.least_sums import Band, Floats

MANY_GRANULES = 512  # above, one bound, and a limit on its work
MAX_WORK = 400_000_000  # of one search, in array elements; about a second


def searches(
    parts: Sequence[CachedCosts], num_micro_batches: int, max_slices: int | None
) -> tuple[list[Search], float]:
    """Return a search per pair of stages, and their largest bound in seconds; parts without a table cost nothing."""
    bands = [_band(parts, first, last, num_micro_batches) for first, last in _pairs(parts)]
    work = None if bands[0].num_granules <= 64 else MAX_WORK
    finished = [search_plans(band, Objective(1, 1.0), max_slices, work) for band in bands]
    return finished, max(search.lower_bound_s for search in finished)


def least_works_s(parts: Sequence[CachedCosts], num_micro_batches: int, max_slices: int | None) -> list[float]:
    """Return, per part, the least work of any plan: m times its forwards and backwards; 0 where it has no table."""
    work = Objective(num_micro_batches, 0.0)
    least_s = {
        part: 0.0 if part.table is None else search_plans(part.table.band, work, max_slices, MAX_WORK).lower_bound_s
        for part in set(parts)
    }
    return [least_s[part] for part in parts]


def _pairs(parts: Sequence[CachedCosts]) -> list[tuple[int, int]]:
    """Return stages (a, k): k the last of each kind, a the first of all, of that kind and of the most common one."""
    common = max(parts, key=parts.count)
    last_of = {part: part_id for part_id, part in enumerate(parts)}
    lasts = {last_of[part] for part in (parts[-1], common, max(parts, key=_work_s))}
    firsts = {k: (0, parts.index(common), parts.index(parts[k]), k) for k in lasts if parts[k].table}
    pairs = {(a, k) for k, starts in firsts.items() for a in starts if a <= k}
    if max(part.table.num_granules for part in parts if part.table) > MANY_GRANULES:
        most = max(lasts, key=lambda k: (_work_s(parts[k]), k))
        pairs = {(0, most)}
    return sorted(pairs)


def _work_s(part: CachedCosts) -> float:
    return 0.0 if part.table is None else float(part.table.total_s[0, -1])


def _band(parts: Sequence[CachedCosts], first: int, last: int, num_micro_batches: int) -> Band:
    """Return the bound of stages `first` and `last` as a problem of the slice program."""
    end = parts[last].table
    assert end is not None
    valid = np.isfinite(end.forward_s)
    total = np.where(valid, (num_micro_batches - 1) * np.where(valid, end.total_s, 0.0), np.inf)
    # the way down of the first slice, and the way up of the last one, come on top of the work of `last`
    spare = []
    for name in ("forward_s", "backward_s"):
        least = np.minimum(_table(parts[first], name, valid), _table(parts[last], name, valid))
        through = np.zeros_like(total)
        for part, count in Counter(parts[first : last + 1]).items():
            through += count * _table(part, name, valid)
        senders = parts[first:last] if name == "forward_s" else parts[first + 1 : last + 1]
        sent = "send_s" if name == "forward_s" else "send_gradient_s"
        for part, count in Counter(senders).items():
            through += count * _table(part, sent, valid)
        spare.append(np.maximum(through - least, 0.0))
        total += least
        before = parts[: first + 1]
        for part in before[:-1]:
            total[0] += _table(part, name, valid)[0]
        for part in before[:-1] if name == "forward_s" else before[1:]:
            total[0] += _table(part, sent, valid)[0]
    return Band(total, spare[0], spare[1])


def _table(part: CachedCosts, name: str, valid: np.typing.NDArray[np.bool_]) -> Floats:
    table = None if part.table is None else getattr(part.table, name)
    return np.zeros(valid.shape) if table is None else np.where(valid, table, 0.0)
