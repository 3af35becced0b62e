"""Run dynamic programs over a table of slices: least sums of costs, with limits on each slice's forward and backward.

With `least[j]` the least sum over all cuts of the granules from j on, in slices that keep within the limits,

    least[n] = 0,    least[j] = min over lengths k of  total[j, k] + least[j + k]

This is the recursion of TeraPipe (Li et al., ICML 2021, section 3.3) read from the other end: there, S*(i; t_max) is
the least total of the first i tokens when no slice takes longer than t_max. One numpy call per granule serves many
pairs of limits at once: the calls cost time, not the additions.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

BLOCK_ELEMENTS = 1 << 16  # of masked costs: half a MiB stays in the cache between the mask and its use


@dataclasses.dataclass(frozen=True, eq=False)
class Band:
    """Hold the slices that may be used, [n, w]: row = granules before, column c = slices of `shortest + c` granules."""

    total: Floats  # seconds that a slice adds to the sum; inf where it would pass the end or is ruled out
    forward: Floats  # the limits are on these
    backward: Floats
    shortest: int = 1

    @property
    def num_granules(self) -> int:
        return len(self.total)

    @property
    def width(self) -> int:
        return int(self.total.shape[1])

    def keep(self, allowed: Bools) -> Band:
        """Return a copy with only the `allowed` [n, w] slices, and no more columns than they need."""
        columns = np.flatnonzero(allowed.any(axis=0))
        first, stop = (int(columns[0]), int(columns[-1]) + 1) if columns.size else (0, 1)
        total = np.where(allowed[:, first:stop], self.total[:, first:stop], np.inf)
        forward, backward = (np.ascontiguousarray(x[:, first:stop]) for x in (self.forward, self.backward))
        return Band(total, forward, backward, self.shortest + first)

    def through(self, heads: Floats, tails: Floats) -> Floats:
        """Return the least sum of a plan that uses each slice, [n, w], of sums to and from each granule [n + 1]."""
        n = self.num_granules
        padded = np.full(n + self.shortest + self.width, np.inf)
        padded[: n + 1] = tails
        sums: Floats = heads[:-1, None] + self.total
        sums += np.lib.stride_tricks.sliding_window_view(padded[self.shortest :], self.width)[:n]
        return sums

    def masked(self, rows: slice, width: int, limits: Floats) -> Floats:
        """Return `total` [P, rows, width] under each of the P pairs of `limits` [P, 2]; inf where one is passed."""
        total = self.total[rows, :width]
        if np.isinf(limits).all():
            return np.broadcast_to(total, (len(limits), *total.shape))
        allowed = self.forward[rows, :width] <= limits[:, 0, None, None]
        allowed &= self.backward[rows, :width] <= limits[:, 1, None, None]
        return np.where(allowed, total, np.inf)


NO_LIMITS: Floats = np.full((1, 2), np.inf)


def least_tails(
    band: Band, limits: Floats = NO_LIMITS, num_slices: int | None = None, exactly: bool = False, largest: bool = False
) -> Floats:
    """Return least sums from each granule to the end, [P, C, n + 1], under each pair of `limits` [P, 2].

    C = 1 with any number of slices; with `num_slices`, row c = 0..num_slices is for at most c slices, or `exactly`
    c. With `largest` it minimises the largest `total` of a slice instead of the sum. inf: there is no such cut.
    """
    n, shortest, num_pairs = band.num_granules, band.shortest, len(limits)
    least = np.full((num_pairs, 1 if num_slices is None else num_slices + 1, n + shortest + band.width), np.inf)
    least[:, : 1 if exactly else None, n] = 0.0
    # a row per number of slices reads the row with one slice less
    target, source = (least, least) if num_slices is None else (least[:, 1:], least[:, :-1])
    combine = np.maximum if largest else np.add
    buffer = np.empty((*source.shape[:2], band.width))
    stop = n
    while stop > 0:
        # Rows near the end of the sequence have no long slices.
        start = max(0, stop - max(1, BLOCK_ELEMENTS // (num_pairs * band.width)))
        width = min(band.width, max(1, n - start - shortest + 1))
        block = band.masked(slice(start, stop), width, limits)
        sums = buffer[:, :, :width]
        for j in range(stop - 1, start - 1, -1):
            combine(block[:, None, j - start], source[:, :, j + shortest : j + shortest + width], out=sums)
            np.minimum.reduce(sums, axis=2, out=target[:, :, j])
        stop = start
    return least[:, :, : n + 1]


def least_heads(band: Band, limits: Floats = NO_LIMITS) -> Floats:
    """Return least sums from the beginning to each granule, [n + 1], under one pair of `limits` [1, 2]."""
    n, shortest = band.num_granules, band.shortest
    least = np.full(n + shortest + band.width, np.inf)
    least[0] = 0.0
    rows = max(1, BLOCK_ELEMENTS // band.width)
    for start in range(0, n, rows):
        block = band.masked(slice(start, min(n, start + rows)), band.width, limits)[0]
        for j, row in enumerate(block, start):
            reached = least[j + shortest : j + shortest + band.width]
            np.minimum(reached, row + least[j], out=reached)
    return least[: n + 1]


def trace(band: Band, least: Floats, limits: Floats) -> tuple[int, ...]:
    """Return slice lengths, in granules, that reach `least[-1, 0]` of the sums [C, n + 1] under one pair of limits.

    Where sums tie it takes the longest slice. `limits` [2] belong to the sums. The sum must be finite.
    """
    n, shortest, width = band.num_granules, band.shortest, band.width
    longest = shortest + width - 1
    padded = np.full((len(least), n + shortest + width), np.inf)
    padded[:, : n + 1] = least
    lengths: list[int] = []
    j, count = 0, len(least) - 1
    while j < n:
        count = max(0, count - 1)
        # the sums were made under these limits, so the way back keeps them too
        allowed = (band.forward[j] <= limits[0]) & (band.backward[j] <= limits[1])
        row = np.where(allowed, band.total[j], np.inf)
        sums = row + padded[count, j + shortest : j + shortest + width]
        lengths.append(longest - int(sums[::-1].argmin()))
        j += lengths[-1]
    return tuple(lengths)
