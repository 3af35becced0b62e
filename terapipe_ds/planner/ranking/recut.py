"""Costs and memory of another cut of the layers, from those of the cut that was measured.

What was measured is parts; of each of their layers it is known which share it has of its part. A part of another cut
then takes, for every slice, the sum over the measured parts of

    share of the layers that the two have in common * seconds of the measured part

which is exact where the layers of a part grow alike with tokens and prefix, and off by little where an embedding or a
head stands among decoder layers: their share is that of the slice that shares were measured with. What a stage pays
for messages stays with the layers in whose part it was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.costs.profile import LayerShare, Profile
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.planner.ranking.bidirectional_cost import both_ways_s, gradient_itemsize, link_bytes_per_s, steps_of

PartShares = Sequence[Sequence[LayerShare]]
"""For each measured part, its layers."""


@dataclass(frozen=True)
class RecutCosts:
    """The costs of one part of another cut, with the interface that planner and simulator ask for.

    `pieces`: (costs of a measured part, share of its forward, share of its backward). `send_s`, `weight_s` and
    `step_s` exist where the measured parts have them (`hasattr`).
    """

    pieces: tuple[tuple[Any, float, float], ...]
    link: Any = None  # costs whose `send_s` is that of this part

    @property
    def vectorized(self) -> bool:
        """Whether all measured costs take arrays."""
        return all(getattr(costs, "vectorized", False) for costs, _, _ in self.pieces)

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of the forward of `tokens` tokens after `prefix` tokens."""
        return sum(share * costs.forward_s(tokens, prefix) for costs, share, _ in self.pieces)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of the backward, weight gradients included."""
        return sum(share * costs.backward_s(tokens, prefix) for costs, _, share in self.pieces)

    @property
    def weight_s(self) -> Callable[[Any, Any], Any]:
        """Of the backward, the seconds of W. Where a measured part does not know them: AttributeError."""
        methods = [(costs.weight_s, share) for costs, _, share in self.pieces]
        return lambda tokens, prefix: sum(share * weight_s(tokens, prefix) for weight_s, share in methods)

    @property
    def send_s(self) -> Callable[[Any], Any]:
        """Seconds of a message to the next part. Where no link was measured: AttributeError."""
        if self.link is None:
            raise AttributeError("send_s was not measured")
        return self.link.send_s  # type: ignore[no-any-return]

    @property
    def step_s(self) -> Callable[[], float]:
        """Seconds of reduction and optimizer. Where a measured part does not know them: AttributeError."""
        methods = [(costs.step_s, share) for costs, _, share in self.pieces]
        return lambda: float(sum(share * step_s() for step_s, share in methods))


def recut_costs(parts: Sequence[Any], shares: PartShares, bounds: Sequence[int]) -> list[Any]:
    """The costs of the parts between `bounds`, which are layer numbers: part p has the layers from `bounds[p]` on.

    A part that has the layers of a measured one is that one, the same object.

    Args:
        parts: costs of the measured parts; one object may stand for several.
        shares: of the layers of each measured part.

    Raises:
        PlannerError: bounds that are no cut of these layers.
    """
    measured = _bounds_of(shares)
    _check(bounds, measured[-1])
    linked = [part for part in parts if callable(getattr(part, "send_s", None))]
    made: dict[Any, RecutCosts] = {}
    found: list[Any] = []
    for start, stop in itertools.pairwise(bounds):
        common = list(_common(start, stop, shares))
        whole = next((p for p, layers in common if len(layers) == len(shares[p])), None)
        if len(common) == 1 and whole is not None:
            found.append(parts[whole])
            continue
        pieces = tuple((parts[p], _sum("forward", layers), _sum("backward", layers)) for p, layers in common)
        own = parts[common[-1][0]]
        link = own if own in linked or not linked else linked[0]
        key = tuple((id(part), f, b) for part, f, b in pieces), id(link)
        found.append(made.setdefault(key, RecutCosts(pieces, link if linked else None)))
    return found


def recut_memory(memory: MemoryModel, shares: PartShares, bounds: Sequence[int]) -> MemoryModel:
    """The memory of the parts between `bounds`: parameters, states and gradients go with the layers' parameters, what
    slices keep with their share of the forward, and what a computation needs for itself is the most of any part.

    Raises:
        PlannerError: bounds that are no cut of these layers.
    """
    _check(bounds, _bounds_of(shares)[-1])
    found = []
    for start, stop in itertools.pairwise(bounds):
        common = list(_common(start, stop, shares))
        if len(common) == 1 and len(common[0][1]) == len(shares[common[0][0]]):
            found.append(memory.parts[common[0][0]])
        else:
            found.append(_sum_of_memory([(memory.parts[p], layers, shares[p]) for p, layers in common]))
    return MemoryModel(tuple(found))


def balanced_bounds(weights: Sequence[float], num_parts: int) -> list[int] | None:
    """The contiguous cut whose heaviest part is lightest, of parts with a layer each; None for fewer layers than parts.

    What DeepSpeed's partition method "parameters" aims at, where `weights` are numbers of parameters.
    """
    if len(weights) < num_parts:
        return None
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best = [math.inf] * (len(weights) + 1)  # heaviest of the parts so far, by where they end
    best[0] = 0.0
    ends: list[list[int]] = []
    for _ in range(num_parts):
        before, best, chosen = best, [math.inf] * len(best), [0] * len(best)
        for stop in range(1, len(best)):
            for start in range(stop):
                heaviest = max(before[start], sums[stop] - sums[start])
                if heaviest < best[stop]:
                    best[stop], chosen[stop] = heaviest, start
        ends.append(chosen)
    bounds = [len(weights)]
    for chosen in reversed(ends):
        bounds.append(chosen[bounds[-1]])
    return bounds[::-1]


NOT_TIMED = "layers were not timed: parts are taken as even"


@dataclass(frozen=True)
class MeasuredParts:
    """Measured costs of the parts of one cut, and what of them another cut would have.

    `shares`: of the layers of each part; None: not known, so that parts can only be halved and so on, or joined.
    `link_bytes_per_s`: of the slowest link; None: not known. `gradient_itemsize`: bytes of one gradient.
    `most_parts`: without shares, no more parts than that, for there are as many layers; None: not known.
    """

    costs: Sequence[Any]
    shares: PartShares | None = None
    link_bytes_per_s: float | None = None
    gradient_itemsize: int = 4
    most_parts: int | None = None

    @classmethod
    def of_profile(cls, profile: Profile, models: Sequence[Any]) -> MeasuredParts:
        """`models`: of the parts of the profile, in their order."""
        shares = [part.layer_shares for part in profile.parts]
        known = [layers for layers in shares if layers is not None]
        found = known if len(known) == len(shares) else None
        itemsize, most = gradient_itemsize(profile.key.dtype), profile.key.num_layers
        return cls(list(models), found, link_bytes_per_s(profile.links), itemsize, most)

    def bounds(self, num_parts: int) -> list[int] | None:
        """Where to cut in so many parts: as measured, or by numbers of trained parameters; None where it cannot be."""
        if self.shares is None:
            return None
        if num_parts == len(self.shares):
            return _bounds_of(self.shares)
        layers = [layer for part in self.shares for layer in part]
        counts = [float(layer.trained) for layer in layers]
        return balanced_bounds(counts if any(counts) else [layer.forward for layer in layers], num_parts)

    def cut(self, num_parts: int, bounds: Sequence[int] | None = None) -> list[Any] | None:
        """The costs of `num_parts` parts, those between `bounds`; None where the layers cannot be cut in so many.

        Raises:
            PlannerError: bounds that are no cut of these layers.
        """
        cut = self._cut(num_parts, bounds)
        return None if cut is None else recut_costs(self.costs, *cut)

    def memory(self, memory: MemoryModel, num_parts: int, bounds: Sequence[int] | None = None) -> MemoryModel | None:
        """The same of what was measured of memory."""
        cut = self._cut(num_parts, bounds)
        return None if cut is None else recut_memory(memory, *cut)

    def both_ways_s(self, num_parts: int, bounds: Sequence[int] | None = None) -> float | None:
        """What a bidirectional pipeline of these parts takes besides its makespan (`bidirectional_cost`); None where it
        is not known how large parts are, or how fast links."""
        bounds = self.bounds(num_parts) if bounds is None else bounds
        costs = None if bounds is None else self.cut(num_parts, bounds)
        if self.shares is None or bounds is None or costs is None or self.link_bytes_per_s is None:
            return None
        counts = [layer.trained for part in self.shares for layer in part]
        sizes = [self.gradient_itemsize * sum(counts[start:stop]) for start, stop in itertools.pairwise(bounds)]
        return both_ways_s(sizes, self.link_bytes_per_s, steps_of(costs))

    def _cut(self, num_parts: int, bounds: Sequence[int] | None) -> tuple[PartShares, Sequence[int]] | None:
        if self.shares is not None:
            bounds = self.bounds(num_parts) if bounds is None else bounds
            return None if bounds is None else (self.shares, bounds)
        measured = len(self.costs)
        if self.most_parts is not None and num_parts > max(self.most_parts, measured):
            return None
        if num_parts % measured == 0:
            return alike([num_parts // measured] * measured), range(num_parts + 1)
        if measured % num_parts == 0:
            return alike([1] * measured), range(0, measured + 1, measured // num_parts)
        return None


def alike(counts: Sequence[int]) -> list[list[LayerShare]]:
    """Shares for parts of so many layers, of which nothing is known: they count alike."""
    return [[LayerShare(1 / count, 1 / count, 1)] * count for count in counts]


def _bounds_of(shares: PartShares) -> list[int]:
    return list(itertools.accumulate(map(len, shares), initial=0))


def _check(bounds: Sequence[int], num_layers: int) -> None:
    rising = all(start < stop for start, stop in itertools.pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_layers or not rising:
        raise PlannerError(f"bounds = {list(bounds)}: give rising layer numbers from 0 to {num_layers}")


def _common(start: int, stop: int, shares: PartShares) -> Iterator[tuple[int, Sequence[LayerShare]]]:
    """The measured parts that have layers from `start` to `stop`, and these layers."""
    measured = _bounds_of(shares)
    for part_id, layers in enumerate(shares):
        first, last = max(start, measured[part_id]), min(stop, measured[part_id + 1])
        if first < last:
            yield part_id, layers[first - measured[part_id] : last - measured[part_id]]


def _sum(name: str, layers: Sequence[LayerShare]) -> float:
    return math.fsum(getattr(layer, name) for layer in layers)


_Piece = tuple[PartMemory, Sequence[LayerShare], Sequence[LayerShare]]
"""The memory of a measured part, those of its layers that are meant, and all of them."""

_RATES = ("slice_bytes_per_token", "store_bytes_per_token", "store_grad_bytes_per_token")
_OPTIONAL_RATES = ("whole_bytes_per_token", "weight_bytes_per_token")
_WORKING = ("working_bytes", "working_bytes_per_token", "working_bytes_per_prefix_token")


def _sum_of_memory(pieces: Sequence[_Piece]) -> PartMemory:
    numbers: dict[str, Any] = {}
    for name in ("static_bytes", "gradient_bytes"):
        by_parameters = (_parameter_share(layers, every) * getattr(part, name) for part, layers, every in pieces)
        numbers[name] = math.ceil(math.fsum(by_parameters))
    for name in (*_RATES, *_OPTIONAL_RATES):
        rates = [(getattr(part, name), _sum("forward", layers)) for part, layers, _ in pieces]
        known = all(rate is not None for rate, _ in rates)
        numbers[name] = math.fsum(rate * share for rate, share in rates) if known else None
    for name in _WORKING:
        numbers[name] = max(getattr(part, name) for part, _, _ in pieces)
    return PartMemory(**numbers)


def _parameter_share(layers: Sequence[LayerShare], every: Sequence[LayerShare]) -> float:
    total = sum(layer.parameters for layer in every)
    return sum(layer.parameters for layer in layers) / total if total else len(layers) / len(every)
