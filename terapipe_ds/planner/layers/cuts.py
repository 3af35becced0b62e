"""Cut the layers by dynamic programs over matrices; entry [j, i] belongs to the layers in [j, i).

With m micro-batches of s slices a pipeline takes about (m - 1/s) T + S / s, where T is the time of the slowest stage
and S the sum over all stages with their links. For each T that a stage can have, from the least on, a program finds the
least S. Larger values of T stop to matter once (m - 1/s) T alone is too much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from terapipe_ds.planner.layers.parts import Floats

Bounds = tuple[int, ...]
"""The first layer of each part, and the end."""

_MOST_LIMITS = 12  # times of the slowest stage to try


def spans_matrix(values: Floats) -> Floats:
    """Return the sums of `values` over every span; infinite where a span has no layer."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    matrix: Floats = sums[None, :] - sums[:, None]
    matrix[np.tril_indices(len(sums))] = np.inf
    return matrix


def all_cuts(num_layers: int, num_parts: int) -> Iterator[Bounds]:
    for inner in itertools.combinations(range(1, num_layers), num_parts - 1):
        yield (0, *inner, num_layers)


def least_maximum(costs: Sequence[Floats]) -> float:
    """Return the least possible largest cost of a part, over all cuts in `len(costs)` parts."""
    return _program(costs, np.maximum)[0]


def balanced_bounds(weights: Sequence[float], num_parts: int) -> list[int] | None:
    """Return the cut whose heaviest part is lightest, as DeepSpeed's "parameters"; None for too few layers."""
    if len(weights) < num_parts:
        return None
    return list(_program([spans_matrix(np.array(weights))] * num_parts, np.maximum)[1])


def best_cuts(
    times: Sequence[Floats], extras: Sequence[Floats], weight: float, share: float
) -> list[tuple[float, Bounds]]:
    """Return cuts with their value weight * (largest time) + share * (sum of times and extras), the least first.

    Args:
        times: per part, of every span; infinite where it does not fit in memory.
        extras: per part, of every span; links.
    """
    least = least_maximum(times)
    if not math.isfinite(least):
        return []
    # from the least time of the slowest stage on, the least sum with no stage above it; parts share matrices
    keys = [(id(time), id(extra)) for time, extra in zip(times, extras, strict=True)]
    shared = dict(zip(keys, zip(times, extras, strict=True), strict=True))
    pairs = {key: (time, time + extra) for key, (time, extra) in shared.items()}
    sums = [pairs[key][1] for key in keys]
    floor = _program(sums, np.add)[0]
    distinct = {id(matrix): matrix for matrix in times}.values()
    limits = np.unique(np.concatenate([matrix[np.isfinite(matrix) & (matrix >= least)] for matrix in distinct]))
    found: dict[Bounds, float] = {}
    for limit in _thinned(limits):
        if found and weight * limit + share * floor >= min(found.values()):
            break
        # of cuts with equal sums the more even one wins
        allowed = {
            key: np.where(time <= limit, total * (1 + 1e-7 * total / (limit or 1.0)), np.inf)
            for key, (time, total) in pairs.items()
        }
        balanced = [allowed[key] for key in keys]
        bounds = _program(balanced, np.add)[1]
        total = sum(sums[p][a, b] for p, (a, b) in enumerate(itertools.pairwise(bounds)))
        slowest = max(times[p][a, b] for p, (a, b) in enumerate(itertools.pairwise(bounds)))
        found.setdefault(bounds, float(weight * slowest + share * total))
    return sorted((value, bounds) for bounds, value in found.items())


def _thinned(limits: Floats) -> list[float]:
    """Return the limits to try: all where they are few, else the first ones and then ever fewer of the rest."""
    if len(limits) <= _MOST_LIMITS:
        return [float(limit) for limit in limits]
    indices = np.unique(np.geomspace(1, len(limits), _MOST_LIMITS).astype(int)) - 1
    return [float(limits[index]) for index in indices]


def _program(costs: Sequence[Floats], join: np.ufunc) -> tuple[float, Bounds]:
    """Return the least joined cost of a cut in `len(costs)` parts, and the cut."""
    best = costs[0][0]
    starts = []
    for cost in costs[1:]:
        candidates = join(best[:, None], cost)
        chosen = candidates.argmin(axis=0)
        starts.append(chosen)
        best = candidates[chosen, np.arange(len(chosen))]
    bounds = [len(best) - 1]
    for chosen in reversed(starts):
        bounds.append(int(chosen[bounds[-1]]))
    return float(best[-1]), (0, *bounds[::-1])


def moved_edges(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the cuts with one edge moved by one layer."""
    for i in range(1, len(bounds) - 1):
        for step in (-1, 1):
            moved = bounds[i] + step
            if bounds[i - 1] < moved < bounds[i + 1]:
                yield (*bounds[:i], moved, *bounds[i + 1 :])
