"""What no plan can beat, whichever of the schedules runs it.

In ``gpipe``, ``1f1b``, ``terapipe`` and ``seq1f1b`` every stage begins with the forwards of micro-batch 0 and ends with
the backward of one micro-batch after all else, both slice by slice. So a batch takes at least, for any plan,

- on every stage k: all of its work, after the first slice has come down to it and before that slice's gradient has
  gone up from it;
- on n of the stages, each at least as slow for every slice as one cost c: the time of n stages that all cost c (the
  others let everything pass at once). Until the last of them has run micro-batch 0's forwards, sum(f) + (n - 1) max(f);
  from where it begins the last backward, sum(b) + (n - 1) max(b); in between, (m - 1) sum(f + b) of its own work. That
  is the objective of the slice program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from terapipe_ds.planner.asked import AskedCosts

Floats = npt.NDArray[np.float64]


def stage_bound_s(parts: Sequence[AskedCosts], num_micro_batches: int) -> float:
    """The first bound, least over all first slices and all ways to cut the rest."""
    num_granules = parts[0].num_granules
    way_s = np.zeros(num_granules)  # down to the stage and up from it, by the granules of the first slice
    slowest_s = np.zeros(num_granules)
    work: dict[int, Floats] = {}
    for part_id, part in enumerate(parts):
        if id(part) not in work:
            work[id(part)] = _least_work(part)
        if part_id:
            way_s = way_s + _first_slice(parts[part_id - 1], part)
        slowest_s = np.maximum(slowest_s, num_micro_batches * work[id(part)] + way_s)
    return float(slowest_s.min())


def alike_bound_s(parts: Sequence[AskedCosts], solve_bound_s: Callable[[AskedCosts, int], float]) -> float:
    """The second bound; ``solve_bound_s(c, n)`` is that of the slice program for n stages that all cost c."""
    kinds = {id(part): part for part in parts}
    tables = {key: [part.whole_table(name) for name in ("forward_s", "backward_s")] for key, part in kinds.items()}
    best_s = 0.0
    for key, part in kinds.items():
        slow = {
            other
            for other, theirs in tables.items()
            if all((a >= b).all() for a, b in zip(theirs, tables[key], strict=True))
        }
        has_links = hasattr(part, "send_s")
        count = sum(id(other) in slow for other in parts)
        links_too = not has_links or len(kinds) == 1
        best_s = max(best_s, solve_bound_s(part if links_too else _WithoutLinks(part), count))
    return best_s


def _least_work(part: AskedCosts) -> Floats:
    """[n]: the least sum(f + b) over all plans whose first slice has ``index + 1`` granules."""
    both = part.whole_table("forward_s") + part.whole_table("backward_s")
    num_granules = len(both)
    least = np.zeros(num_granules + 1)  # from a granule on
    for start in range(num_granules - 1, 0, -1):
        least[start] = (both[start, : num_granules - start] + least[start + 1 :]).min()
    first: Floats = both[0] + least[1:]
    return first


def _first_slice(sender: AskedCosts, receiver: AskedCosts) -> Floats:
    """[n]: forward and backward of a first slice on a stage, and its messages to the next stage and back."""
    seconds: Floats = sender.whole_table("forward_s")[0] + sender.whole_table("backward_s")[0]
    tokens = sender.first_slice_tokens()
    for part in (sender, receiver):
        if hasattr(part, "send_s"):
            seconds = seconds + part.send_s(tokens)
    return seconds


class _WithoutLinks(AskedCosts):
    """The same tables, links at no cost."""

    def __init__(self, costs: AskedCosts) -> None:
        self.__dict__.update(costs.__dict__)
        self.__dict__.pop("send_s", None)
