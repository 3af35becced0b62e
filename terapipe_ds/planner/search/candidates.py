"""Plans worth trying, as tuples of slice lengths in granules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

Lengths = tuple[int, ...]


def slice_counts(most: int) -> list[int]:
    """Return 1 to 4 and from there on in steps of a third to a half: 1, 2, 3, 4, 6, 8, 12, ..., and `most`."""
    powers = (2**exponent for exponent in range(most.bit_length()))
    return sorted({count for power in powers for count in (power, 3 * power // 2) if 1 <= count <= most} | {most})


def compositions(num_granules: int, max_slices: int) -> Iterator[Lengths]:
    """Yield all ways to cut `num_granules` in at most `max_slices` slices, 2^(n-1) without that limit."""
    for count in range(1, max_slices + 1):
        for cuts in itertools.combinations(range(1, num_granules), count - 1):
            yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_granules)))


def moved(lengths: Lengths, step: int) -> Iterator[Lengths]:
    """Yield plans with `step` granules moved from one slice to another: neighbours first, then any two."""
    count = len(lengths)
    for distance in range(1, count):
        for first in range(count - distance):
            for giver, taker in ((first, first + distance), (first + distance, first)):
                if lengths[giver] > step:
                    changed = list(lengths)
                    changed[giver] -= step
                    changed[taker] += step
                    yield tuple(changed)


def merged_or_split(lengths: Lengths, max_slices: int) -> Iterator[Lengths]:
    """Yield plans with two neighbours merged, or one slice split: in halves, or a granule off either end."""
    for i in range(len(lengths) - 1):
        yield (*lengths[:i], lengths[i] + lengths[i + 1], *lengths[i + 2 :])
    if len(lengths) < max_slices:
        for i, length in enumerate(lengths):
            for left in sorted({length // 2, 1, length - 1} & set(range(1, length))):
                yield (*lengths[:i], left, length - left, *lengths[i + 1 :])
