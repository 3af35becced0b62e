"""List the subsets of a part's layers that are worth recomputing: no other takes less time and less memory.

A layer that recomputes costs its forward once more. For a live slice it keeps only its input, and in its own backward
it briefly has all its saved tensors. The backward of a part begins with its last layer, and each layer's saved tensors
go with its backward. So when layer i recomputes, the running slice has only the tensors that the layers before i keep:

    kept       sum over layers: their saved bytes, or their input where they recompute
    moment     the largest over recomputing layers i: bytes that the layers before i keep + bytes that i saves

Layers are taken one after the other, from the first to the last. Adding a layer changes (time, kept, moment) of two
subsets alike, so a subset that is no better than another in all three may be forgotten at once: the list stays exact,
and for n equal layers it has n + 1 entries, each of which recomputes the first layers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from terapipe_ds.planner.layers.layer import Layer

MOST_SUBSETS = 2000  # beyond this number some are left out; n equal layers have n + 1 subsets
_BYTES = 1 << 10  # numbers are compared as integers, so that sums in another order are equal
_SECONDS = 10**12


class Subset(NamedTuple):
    """Hold layers that recompute, with their time in 1e-12 s and their memory in 1/1024 bytes per token."""

    again: int
    kept: int
    moment: int
    layers: tuple[int, ...]  # indices

    @property
    def again_s(self) -> float:
        return self.again / _SECONDS


def frontier(layers: Sequence[Layer], again_s: Sequence[float], is_whole: bool) -> list[Subset]:
    """Return the subsets worth a look, by rising time.

    The first recomputes nothing, and the last recomputes every layer that keeps less then.

    Args:
        again_s: the seconds that recomputing each layer takes in a step.
        is_whole: a sequence is one slice, which keeps its keys and values itself.
    """
    subsets = [Subset(0, 0, 0, ())]
    for index, (layer, seconds) in enumerate(zip(layers, again_s, strict=True)):
        # a layer doubles the subsets, and most of them are no better than another one
        whole, own, again = layer.kept_bytes(is_whole), round(layer.again_bytes * _BYTES), round(seconds * _SECONDS)
        without = [one._replace(kept=one.kept + round(whole * _BYTES)) for one in subsets]
        if layer.again_bytes < whole:  # where it recomputes it keeps less
            without += [
                Subset(one.again + again, one.kept + own, max(one.moment, wider.kept), (*one.layers, index))
                for one, wider in zip(subsets, without, strict=True)
            ]
        subsets = _undominated(without)
        # both ends stay: nothing recomputed, and everything
        if len(subsets) > MOST_SUBSETS:  # evenly over the range, with both ends
            step = (len(subsets) - 1) / (MOST_SUBSETS - 1)
            subsets = [subsets[round(step * number)] for number in range(MOST_SUBSETS)]
    return subsets


def _undominated(subsets: Sequence[Subset]) -> list[Subset]:
    """Return the subsets that no other equals or betters in time, kept and moment; of equals the first."""
    better: list[Subset] = []
    stairs: list[tuple[int, int]] = []  # (kept, moment) of earlier subsets, kept rising and moment falling
    # by rising time, so that only earlier subsets can better a later one
    for one in sorted(subsets):
        place = bisect.bisect_right(stairs, (one.kept, one.moment))
        if place and stairs[place - 1][1] <= one.moment:
            continue
        better.append(one)
        last = place
        while last < len(stairs) and stairs[last][1] >= one.moment:
            last += 1
        stairs[place:last] = [(one.kept, one.moment)]
    return better
