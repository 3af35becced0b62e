"""Costs and memory of another cut of the layers, from those of the cut that was measured.

What was measured is parts; of each of their layers it is known which share it has of its part. A part of another cut
then takes, for every slice, the sum over the measured parts of

    share of the layers that the two have in common * seconds of the measured part

which is exact where the layers of a part grow alike with tokens and prefix, and off by little where an embedding or a
head is among decoder layers. What a stage pays for messages stays with the layers in whose part it was measured.
"""

from __future__ import annotations

import dataclasses
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

NOT_TIMED = "layers were not timed: parts are taken as even"


@dataclass(frozen=True)
class RecutCosts:
    """The costs of one part of another cut, with the interface that planner and simulator ask for.

    `send_s`, `weight_s` and `step_s` exist where the measured parts have them (`hasattr`).
    """

    pieces: tuple[tuple[Any, float, float], ...]  # costs of a measured part, share of its forward, of its backward
    link: Any = None  # costs whose `send_s` is that of this part

    @property
    def vectorized(self) -> bool:
        return all(getattr(costs, "vectorized", False) for costs, _, _ in self.pieces)

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(share * costs.forward_s(tokens, prefix) for costs, share, _ in self.pieces)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(share * costs.backward_s(tokens, prefix) for costs, _, share in self.pieces)

    @property
    def weight_s(self) -> Callable[[Any, Any], Any]:
        methods = [(costs.weight_s, share) for costs, _, share in self.pieces]
        return lambda tokens, prefix: sum(share * weight_s(tokens, prefix) for weight_s, share in methods)

    @property
    def send_s(self) -> Callable[[Any], Any]:
        return self.link.send_s  # type: ignore[no-any-return]

    @property
    def step_s(self) -> Callable[[], float]:
        methods = [(costs.step_s, share) for costs, _, share in self.pieces]
        return lambda: float(sum(share * step_s() for step_s, share in methods))


@dataclass(frozen=True)
class MeasuredParts:
    """Measured costs of the parts of one cut, and what of them another cut would have. None is what is not known."""

    costs: Sequence[Any]
    shares: PartShares | None = None  # without them parts can only be halved and so on, or joined
    link_bytes_per_s: float | None = None  # of the slowest link
    gradient_itemsize: int = 4
    most_parts: int | None = None  # as many as there are layers

    @classmethod
    def of_profile(cls, profile: Profile, models: Sequence[Any]) -> MeasuredParts:
        """`models`: of the parts of the profile, in their order."""
        shares = [part.layer_shares for part in profile.parts if part.layer_shares is not None]
        known = shares if len(shares) == len(profile.parts) else None
        itemsize, most = gradient_itemsize(profile.key.dtype), profile.key.num_layers
        return cls(list(models), known, link_bytes_per_s(profile.links), itemsize, most)

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
        """The costs of `num_parts` parts, those between `bounds`; None where the layers cannot be cut in so many."""
        cut = self._cut(num_parts, bounds)
        return None if cut is None else recut_costs(self.costs, *cut)

    def memory(self, memory: MemoryModel, num_parts: int, bounds: Sequence[int] | None = None) -> MemoryModel | None:
        """The same of what was measured of memory."""
        cut = self._cut(num_parts, bounds)
        return None if cut is None else recut_memory(memory, *cut)

    def both_ways_s(self, num_parts: int, bounds: Sequence[int] | None = None) -> float | None:
        """What a bidirectional pipeline of these parts takes besides its makespan; None where that is not known."""
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
        if num_parts % measured and measured % num_parts:
            return None
        layers, joined = max(1, num_parts // measured), max(1, measured // num_parts)
        alike = [[LayerShare(1 / layers, 1 / layers, 1)] * layers] * measured
        return alike, range(0, layers * measured + 1, joined)


def recut_costs(parts: Sequence[Any], shares: PartShares, bounds: Sequence[int]) -> list[Any]:
    """The costs of the parts between `bounds`, which are layer numbers: part p has the layers from `bounds[p]` on.

    A part that has the layers of a measured one is that one, the same object. PlannerError for bounds that are no cut.
    """
    linked = [part for part in parts if callable(getattr(part, "send_s", None))]
    made: dict[Any, RecutCosts] = {}
    recut: list[Any] = []
    for common, is_measured in _pieces(shares, bounds):
        last = parts[common[-1][0]]
        if is_measured:
            recut.append(last)
            continue
        pieces = tuple((parts[p], _sum("forward", layers), _sum("backward", layers)) for p, layers in common)
        link = last if last in linked or not linked else linked[0]
        key = tuple((id(part), f, b) for part, f, b in pieces), id(link)
        recut.append(made.setdefault(key, RecutCosts(pieces, link if linked else None)))
    return recut


def recut_memory(memory: MemoryModel, shares: PartShares, bounds: Sequence[int]) -> MemoryModel:
    """The memory of the parts between `bounds`: what slices keep goes with the layers' share of the forward."""
    recut = []
    for common, is_measured in _pieces(shares, bounds):
        own = memory.parts[common[-1][0]]
        recut.append(own if is_measured else _sum_of_memory(memory, shares, common))
    return MemoryModel(tuple(recut))


def balanced_bounds(weights: Sequence[float], num_parts: int) -> list[int] | None:
    """The contiguous cut whose heaviest part is lightest, as DeepSpeed's "parameters"; None for too few layers."""
    if len(weights) < num_parts:
        return None
    sums = list(itertools.accumulate(weights, initial=0.0))
    best = [0.0] + [math.inf] * len(weights)  # heaviest of the parts so far, by where they end
    starts: list[list[int]] = []
    for _ in range(num_parts):
        before, best, chosen = best, [math.inf] * len(best), [0] * len(best)
        for stop in range(1, len(best)):
            heaviest = [max(before[start], sums[stop] - sums[start]) for start in range(stop)]
            best[stop] = min(heaviest)
            chosen[stop] = heaviest.index(best[stop])
        starts.append(chosen)
    bounds = [len(weights)]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return bounds[::-1]


def _bounds_of(shares: PartShares) -> list[int]:
    return list(itertools.accumulate(map(len, shares), initial=0))


_Common = list[tuple[int, Sequence[LayerShare]]]  # measured parts that have layers in common with another, and these


def _pieces(shares: PartShares, bounds: Sequence[int]) -> Iterator[tuple[_Common, bool]]:
    """For each part between `bounds`: what it has in common with measured ones, and whether it is one of them."""
    edges = _bounds_of(shares)
    rising = all(start < stop for start, stop in itertools.pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != edges[-1] or not rising:
        raise PlannerError(f"bounds = {list(bounds)}: give rising layer numbers from 0 to {edges[-1]}")
    for start, stop in itertools.pairwise(bounds):
        common: _Common = []
        for part_id, layers in enumerate(shares):
            first, last = (min(max(edge - edges[part_id], 0), len(layers)) for edge in (start, stop))
            if first < last:
                common.append((part_id, layers[first:last]))
        yield common, len(common) == 1 and len(common[0][1]) == len(shares[common[0][0]])


def _sum(name: str, layers: Sequence[LayerShare]) -> float:
    return math.fsum(getattr(layer, name) for layer in layers)


def _sum_of_memory(memory: MemoryModel, shares: PartShares, common: _Common) -> PartMemory:
    by_parameters = [_parameter_share(layers, shares[part_id]) for part_id, layers in common]
    by_forward = [_sum("forward", layers) for _, layers in common]
    numbers: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(PartMemory)):
        values = [getattr(memory.parts[part_id], name) for part_id, _ in common]
        if name.startswith("working") or name == "window_tokens":
            numbers[name] = max(values)
        elif name in ("static_bytes", "gradient_bytes"):
            numbers[name] = math.ceil(_weighted(by_parameters, values))
        else:
            numbers[name] = None if None in values else _weighted(by_forward, values)
    return PartMemory(**numbers)


def _weighted(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))


def _parameter_share(layers: Sequence[LayerShare], every: Sequence[LayerShare]) -> float:
    total = sum(layer.parameters for layer in every)
    return sum(layer.parameters for layer in layers) / total if total else len(layers) / len(every)
