"""Sum the costs and memory of any cut of a measured model over the layers of each part.

A profile whose layers were not timed has only its measured parts. They may be joined, but not divided.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.both_ways import both_ways_s, gradient_itemsize, link_bytes_per_s
from terapipe_ds.planner.layers.cuts import balanced_bounds
from terapipe_ds.planner.layers.layer import Layer, layers_of_profile, memory_of_part
from terapipe_ds.planner.layers.part_costs import PartCosts
from terapipe_ds.planner.memory import MemoryModel

NOT_TIMED = "layers were not timed: only the parts that were measured can be planned"


@dataclass(frozen=True)
class MeasuredParts:
    """Hold the layers of a model, and how they are cut; methods take a number of parts, or the bounds of a cut."""

    layers: Sequence[Layer]
    bounds_measured: tuple[int, ...]
    has_layers: bool = True  # False: `layers` are parts, which nothing can divide
    link_bytes_per_s: float | None = None  # of the slowest link
    gradient_itemsize: int = 4
    weights: Sequence[float] | None = None  # of layers; another cut evens them out; None: their trained parameters
    has_other_cuts: bool = True  # False: the number of parts cannot change
    offloads: bool = False  # the tensors that slices keep go to the host
    process_bytes: int = 0  # of each stage, outside of torch's allocator
    is_whole: bool = True  # False: one part that stands for each stage
    _made: dict[Any, PartCosts] = field(default_factory=dict, compare=False)

    @classmethod
    def of_profile(cls, profile: Profile, *, of_this_run: bool = True) -> MeasuredParts:
        """Return the layers of a profile, without the memory of another run, whose optimizer may differ."""
        layers, is_timed = layers_of_profile(profile), profile.layers is not None
        layers = layers if of_this_run else [dataclasses.replace(layer, memory=None) for layer in layers]
        bounds = tuple(range(len(layers) + 1)) if profile.layers is None else profile.layers.bounds
        is_whole = len(bounds) > 2 or (is_timed and profile.pipeline_stages == 1)
        itemsize = gradient_itemsize(profile.key.parameter_dtype)
        return cls(layers, bounds, is_timed, link_bytes_per_s(profile.links), itemsize, is_whole=is_whole)

    def running(
        self,
        bounds: Sequence[int],
        sequence_length: int,
        *,
        has_other_cuts: bool,
        offloads: bool,
        process_bytes: int = 0,
    ) -> MeasuredParts:
        """Return the same layers in the cut of a running module. Other cuts even out the times of whole sequences."""
        made, whole = dataclasses.replace(self, offloads=offloads, process_bytes=process_bytes), (sequence_length, 0)
        if not self.has_layers:  # parts that nothing can divide stay as measured
            return dataclasses.replace(made, has_other_cuts=False)
        weights = [float(one.costs.forward_s(*whole) + one.costs.backward_s(*whole)) for one in self.layers]
        cut = tuple(map(int, bounds))
        return dataclasses.replace(made, bounds_measured=cut, weights=weights, has_other_cuts=has_other_cuts)

    @property
    def has_memory(self) -> bool:
        return all(layer.memory is not None for layer in self.layers)

    def bounds(self, num_parts: int) -> list[int] | None:
        """Return the bounds of a cut in `num_parts` parts: as measured, or evened out; None where there is none."""
        measured = len(self.bounds_measured) - 1
        # the measured or running cut is better known than any other
        if num_parts == measured:
            return list(self.bounds_measured)
        if not self.has_other_cuts:
            return None
        if not self.has_layers:
            # neighbours may be joined, the same number for each part
            return None if measured % num_parts else list(range(0, measured + 1, measured // num_parts))
        return self.balanced(num_parts)

    def balanced(self, num_parts: int) -> list[int] | None:
        """Return the cut whose heaviest part is lightest; None for too few layers."""
        weights = self.weights or [float(layer.trained) for layer in self.layers]
        return balanced_bounds(weights if any(weights) else [1.0] * len(weights), num_parts)

    def cut(self, num_parts: int, bounds: Sequence[int] | None = None) -> list[PartCosts] | None:
        """Return the costs of `num_parts` parts, those between `bounds`; None where there are too few layers.

        Equal parts are one object. Raises PlannerError for bounds that are no cut.
        """
        bounds = self.bounds(num_parts) if bounds is None else bounds
        if bounds is None:
            return None
        parts = self.between(bounds)
        # a part without a link in the profile takes any other's
        any_send_s = next((layer.send_s for layer in self.layers if layer.send_s is not None), None)
        sends = [layers[-1].send_s or any_send_s for layers in parts]
        # a gradient goes back over the link on which the activations came
        ways = zip(parts, sends, [sends[0], *sends], strict=False)
        return [self._part(layers, send_s, back_s) for layers, send_s, back_s in ways]

    def memory(self, num_parts: int, bounds: Sequence[int] | None = None) -> MemoryModel | None:
        """Return the memory of the same parts; None where it is not known."""
        bounds = self.bounds(num_parts) if bounds is None else bounds
        if bounds is None or not self.has_memory:
            return None
        parts = tuple(map(memory_of_part, self.between(bounds)))
        return MemoryModel(parts, offloads=self.offloads, process_bytes=self.process_bytes)

    def both_ways_s(self, num_parts: int, bounds: Sequence[int] | None = None) -> float | None:
        """Return the seconds of a bidirectional pipeline of these parts on top of its makespan; None: not known."""
        bounds = self.bounds(num_parts) if bounds is None else bounds
        if not self.has_layers or bounds is None or self.link_bytes_per_s is None:
            return None
        parts = self.between(bounds)
        # both stages of a pair sum the gradients of trained parameters alone
        sizes = [self.gradient_itemsize * sum(layer.trained for layer in layers) for layers in parts]
        steps = [step_s for step_s in map(_step_s, parts) if step_s is not None]
        return both_ways_s(sizes, self.link_bytes_per_s, steps if len(steps) == len(parts) else [])

    def for_stages(self, num_stages: int) -> MeasuredParts:
        """Return the measurements for so many stages: copies of the part that stands for each, if one does."""
        if self.is_whole:
            return self
        last, copies = self.bounds_measured[-1], range(num_stages)
        layers = [dataclasses.replace(one, layer_id=last * k + i) for k in copies for i, one in enumerate(self.layers)]
        bounds = tuple(range(0, last * num_stages + 1, last))
        return dataclasses.replace(self, layers=layers, bounds_measured=bounds, _made={})

    def between(self, bounds: Sequence[int]) -> list[Sequence[Layer]]:
        """Return the layers of every part between `bounds`. Raises PlannerError for bounds that are no cut."""
        rising = all(start < stop for start, stop in itertools.pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(self.layers) or not rising:
            raise PlannerError(f"bounds = {list(bounds)}: give rising layer numbers from 0 to {len(self.layers)}")
        return [self.layers[start:stop] for start, stop in itertools.pairwise(bounds)]

    def _part(
        self, layers: Sequence[Layer], send_s: Callable[[Any], Any] | None, back_s: Callable[[Any], Any] | None
    ) -> PartCosts:
        last, step_s = layers[-1], _step_s(layers)
        # the overhead comes once per part, however many layers it has
        costs = [layer.costs for layer in layers] + ([] if last.overhead is None else [last.overhead])
        key = tuple(map(id, costs)), id(send_s), id(back_s), step_s
        # searches count equal parts together, so they must be one object
        if key not in self._made:
            step = None if step_s is None else functools.partial(float, step_s)
            self._made[key] = PartCosts(costs, send_s=send_s, send_gradient_s=back_s, step_s=step)
        return self._made[key]


def _step_s(layers: Sequence[Layer]) -> float | None:
    """Return the seconds of the optimizer's step of a part; None where nobody knows."""
    steps = [layer.step_s for layer in layers if layer.step_s is not None]
    return math.fsum(steps) if len(steps) == len(layers) else None
