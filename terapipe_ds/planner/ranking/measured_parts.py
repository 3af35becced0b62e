"""Costs and memory of any cut of a measured model: sums over the layers of each part.

Of a profile whose layers were not timed only the parts are known that were measured, and these may be joined, but not
divided.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.measured_layers import MeasuredLayer, profile_layers
from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.parts import PartCosts, sum_of_memory
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.planner.ranking.bidirectional_cost import both_ways_s, gradient_itemsize, link_bytes_per_s, steps_of

NOT_TIMED = "layers were not timed: only the parts that were measured can be planned"


@dataclass(frozen=True)
class Unit:
    """What cannot be divided: a layer, or a part whose layers were not timed. None is what is not known."""

    costs: Any
    parameters: int | None = None
    trained: int | None = None
    overhead: Any = None  # of any part that ends with this unit
    send_s: Callable[[Any], Any] | None = None
    step_s: float | None = None
    memory: PartMemory | None = None
    sent_bytes: float | None = None  # per token, of what it hands on

    @classmethod
    def of_layer(cls, layer: MeasuredLayer) -> Unit:
        """Return a layer of a profile."""
        known, profile = layer.profile.memory, layer.profile
        memory = None if known is None else PartMemory(**known)  # type: ignore[arg-type]
        counts = profile.parameters, profile.trained_parameters
        sent_bytes = profile.output_bytes_per_token
        return cls(layer.costs, *counts, layer.overhead, layer.send_s, layer.step_s, memory, sent_bytes)


class MeasuredPart:
    """Costs of a part, as planner and simulator ask for them. `weight_s`, `send_s` and `step_s` exist where known."""

    send_s: Callable[[Any], Any]
    weight_s: Callable[[Any, Any], Any]
    step_s: Callable[[], float]

    def __init__(self, layers: Sequence[Any], send_s: Callable[[Any], Any] | None, step_s: float | None) -> None:
        total = PartCosts(layers)
        self.vectorized, self.forward_s, self.backward_s = total.vectorized, total.forward_s, total.backward_s
        if hasattr(total, "weight_s"):
            self.weight_s = total.weight_s
        if send_s is not None:
            self.send_s = send_s
        if step_s is not None:
            self.step_s = functools.partial(float, step_s)


@dataclass(frozen=True)
class MeasuredParts:
    """The units of a model, and how they were cut when they were measured."""

    units: Sequence[Unit]
    bounds_measured: tuple[int, ...]
    has_layers: bool = True  # each unit is a layer
    link_bytes_per_s: float | None = None  # of the slowest link
    gradient_itemsize: int = 4
    _made: dict[Any, MeasuredPart] = field(default_factory=dict, compare=False)

    @classmethod
    def of_profile(cls, profile: Profile) -> MeasuredParts:
        """Return what a profile tells."""
        link = link_bytes_per_s(profile.links), gradient_itemsize(profile.key.dtype)
        if profile.layers is not None:
            return cls([Unit.of_layer(layer) for layer in profile_layers(profile)], profile.layers.bounds, True, *link)
        units = []
        for part, model in zip(profile.parts, CostModel.from_profile(profile), strict=True):
            known: dict[str, Any] | None = part.memory
            memory = None if known is None else PartMemory(**known)
            units.append(Unit(model, send_s=getattr(model, "send_s", None), step_s=part.step_s, memory=memory))
        return cls(units, tuple(range(len(units) + 1)), False, *link)

    @property
    def has_memory(self) -> bool:
        """Return whether the memory of all units was measured."""
        return all(unit.memory is not None for unit in self.units)

    def bounds(self, num_parts: int) -> list[int] | None:
        """Return where to cut in so many parts: as measured, or by trained parameters; None where it cannot be."""
        measured = len(self.bounds_measured) - 1
        if num_parts == measured:
            return list(self.bounds_measured)
        if not self.has_layers:
            return None if measured % num_parts else list(range(0, measured + 1, measured // num_parts))
        counts = [float(unit.trained or 0) for unit in self.units]
        return balanced_bounds(counts if any(counts) else [1.0] * len(counts), num_parts)

    def cut(self, num_parts: int, bounds: Sequence[int] | None = None) -> list[MeasuredPart] | None:
        """Return the costs of `num_parts` parts, those between `bounds`; None where there are not so many units.

        Equal parts are one object. Raises PlannerError for bounds that are no cut.
        """
        bounds = self.bounds(num_parts) if bounds is None else bounds
        if bounds is None:
            return None
        linked = next((unit.send_s for unit in self.units if unit.send_s is not None), None)
        return [self._part(self.units[start:stop], linked) for start, stop in itertools.pairwise(self._checked(bounds))]

    def memory(self, num_parts: int, bounds: Sequence[int] | None = None) -> MemoryModel | None:
        """Return the memory of the same parts; None where it is not known."""
        bounds = self.bounds(num_parts) if bounds is None else bounds
        known = [unit.memory for unit in self.units if unit.memory is not None]
        if bounds is None or len(known) < len(self.units):
            return None
        parts = []
        for start, stop in itertools.pairwise(self._checked(bounds)):
            numbers = sum_of_memory(known[start:stop])
            lasting = {name: math.ceil(numbers[name] - 1e-3) for name in ("static_bytes", "gradient_bytes")}
            parts.append(PartMemory(**numbers | lasting))
        return MemoryModel(tuple(parts))

    def both_ways_s(self, num_parts: int, bounds: Sequence[int] | None = None) -> float | None:
        """Return what a bidirectional pipeline of these parts takes besides its makespan; None: not known."""
        bounds = self.bounds(num_parts) if bounds is None else bounds
        costs = None if bounds is None else self.cut(num_parts, bounds)
        if not self.has_layers or bounds is None or costs is None or self.link_bytes_per_s is None:
            return None
        counts = [unit.trained or 0 for unit in self.units]
        sizes = [self.gradient_itemsize * sum(counts[start:stop]) for start, stop in itertools.pairwise(bounds)]
        return both_ways_s(sizes, self.link_bytes_per_s, steps_of(costs))

    def copies(self, times: int) -> MeasuredParts:
        """Return what is measured of one part as that of so many equal ones."""
        last = self.bounds_measured[-1]
        bounds = [0, *(last * copy + stop for copy in range(times) for stop in self.bounds_measured[1:])]
        return dataclasses.replace(self, units=[*self.units] * times, bounds_measured=tuple(bounds), _made={})

    def _checked(self, bounds: Sequence[int]) -> Sequence[int]:
        rising = all(start < stop for start, stop in itertools.pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(self.units) or not rising:
            raise PlannerError(f"bounds = {list(bounds)}: give rising layer numbers from 0 to {len(self.units)}")
        return bounds

    def _part(self, units: Sequence[Unit], linked: Callable[[Any], Any] | None) -> MeasuredPart:
        last = units[-1]
        send_s = last.send_s or linked
        steps = [unit.step_s for unit in units if unit.step_s is not None]
        step_s = math.fsum(steps) if len(steps) == len(units) else None
        layers = [unit.costs for unit in units] + ([] if last.overhead is None else [last.overhead])
        key = tuple(map(id, layers)), id(send_s), step_s
        if key not in self._made:
            self._made[key] = MeasuredPart(layers, send_s, step_s)
        return self._made[key]


def balanced_bounds(weights: Sequence[float], num_parts: int) -> list[int] | None:
    """Return the contiguous cut whose heaviest part is lightest, as DeepSpeed's "parameters"; None for too few."""
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
