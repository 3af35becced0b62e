"""Hold the costs of one layer, the record behind plans of slices, strategies and recomputation.

A part is a run of layers. Equal layers share one cost object, so that the sums of parts count them together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terapipe_ds.costs.fitted import CostModel, window_of
from terapipe_ds.costs.interface import Costs, method_of
from terapipe_ds.costs.profile import LayerProfile, Overhead, Profile
from terapipe_ds.planner.layers.part_costs import PartCosts
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import LARGEST


@dataclass(frozen=True)
class Layer:
    """Hold a layer on one rank, or a part whose layers were not timed. None or 0: nobody measured it.

    Its memory is in bytes per token of a slice with all rows, as the memory of a part.
    """

    costs: Costs
    parameters: int = 0
    trained: int = 0  # of the parameters, those with gradients
    memory: PartMemory | None = None
    input_bytes: float = 0.0  # per token, from the layer before
    output_bytes: float = 0.0  # per token, to the next layer
    layer_id: int = 0  # in the model
    overhead: OverheadCosts | None = None  # of every part, beyond its layers
    send_s: Callable[[Any], Any] | None = None  # of a message of that part
    step_s: float | None = None  # its share of the optimizer's step, by trained parameters
    attention_bytes: float = 0.0  # per token, of results that it keeps where it recomputes
    again_costs: Costs | None = None  # whose forward is the second one, where that takes these results

    @property
    def again_bytes(self) -> float:
        """Return the bytes per token that a live slice keeps where the layer recomputes."""
        return self.input_bytes + self.attention_bytes

    @property
    def again(self) -> Costs:
        """Return costs whose forward is what recomputation adds."""
        return self.costs if self.again_costs is None else self.again_costs

    def kept_bytes(self, is_whole: bool) -> float:
        """Return the bytes per token of a live slice; a slice that `is_whole` keeps its keys and values itself."""
        if self.memory is None:
            return 0.0
        return self.memory.slice_bytes_per_token + (self.whole_bytes if is_whole else 0.0)

    @property
    def whole_bytes(self) -> float:
        """Return the bytes per token that it keeps in addition where a sequence is one slice."""
        return (self.memory.whole_bytes_per_token or 0.0) if self.memory is not None else 0.0


class OverheadCosts:
    """Give the seconds of every F and B beyond its layers, with the methods of a layer; W has none."""

    vectorized = True

    def __init__(self, points: Sequence[Overhead]) -> None:
        self._points = sorted(points, key=lambda point: point.tokens)

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return seconds, linear between the measured points and constant beyond them."""
        return self._between([point.forward_s for point in self._points], tokens) + 0.0 * prefix

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return self._between([point.backward_s for point in self._points], tokens) + 0.0 * prefix

    def weight_s(self, tokens: Any, prefix: Any) -> Any:
        return 0.0 * tokens + 0.0 * prefix

    def _between(self, seconds: Sequence[float], tokens: Any) -> Any:
        return np.interp(tokens, [float(point.tokens) for point in self._points], seconds)


def layers_of_profile(profile: Profile) -> list[Layer]:
    """Return the layers of a profile in the order of the model, or its parts where layers were not timed."""
    # a link belongs to the part that sends over it, whichever layers a cut puts in that part
    models, timed = CostModel.from_profile(profile), profile.layers
    sends = [method_of(model, "send_s") for model in models]
    # only the parts are known, and each is a layer that nothing can divide
    if timed is None:
        return [
            Layer(model, memory=PartMemory.of(part.memory), send_s=send_s, step_s=part.step_s)
            for part, model, send_s in zip(profile.parts, models, sends, strict=True)
        ]
    # one fit per kind, so that equal layers share one object
    costs = [
        CostModel(kind.samples, part_id=index, window=window_of(kind.memory)) for index, kind in enumerate(timed.kinds)
    ]
    again = [_without_attention(kind, index) for index, kind in enumerate(timed.kinds)]
    layers: list[Layer] = []
    for part, send_s, (start, stop) in zip(profile.parts, sends, itertools.pairwise(timed.bounds), strict=True):
        overhead = OverheadCosts(part.overheads) if part.overheads else None
        # the optimizer's step of the part is divided by trained parameters, which it moves
        trained = sum(timed.kinds[index].trained_parameters for index in timed.kind_of[start:stop])
        for index in timed.kind_of[start:stop]:
            kind = timed.kinds[index]
            share = kind.trained_parameters / trained if trained else 0.0
            layers.append(
                Layer(
                    costs[index],
                    kind.parameters,
                    kind.trained_parameters,
                    PartMemory.of(kind.memory),
                    layers[-1].output_bytes if layers else 0.0,
                    kind.output_bytes_per_token,
                    len(layers),
                    overhead,
                    send_s,
                    None if part.step_s is None else share * part.step_s,
                    kind.attention_bytes_per_token,
                    again[index],
                )
            )
    return layers


def _without_attention(kind: LayerProfile, index: int) -> Costs | None:
    """Return the costs of a kind of layer whose forward leaves attention out; None where that was not measured."""
    samples = [
        dataclasses.replace(one, forward_s=one.forward_s - one.attention_s, attention_s=None)
        for one in kind.samples
        if one.attention_s is not None
    ]
    return CostModel(samples, part_id=index, window=window_of(kind.memory)) if samples else None


def memory_of_layers(layers: Sequence[Layer], recompute: int = False) -> dict[str, Any]:
    """Return the fields of a part's memory as floats: sums over its layers, but maxima of the working bytes.

    Where all layers `recompute`, a live slice keeps their inputs, and in its backward one layer at a time is whole.
    """
    known = [layer.memory for layer in layers if layer.memory is not None]
    numbers: dict[str, Any] = {}
    # one layer works at a time, so working bytes are the maximum over layers; everything else adds up
    for name in (field.name for field in dataclasses.fields(PartMemory)):
        values = [getattr(memory, name) for memory in known]
        is_largest = name.startswith(LARGEST)
        numbers[name] = None if None in values else (max if is_largest else math.fsum)(values)
    # the input of every layer stays, and the one that runs again is whole for a moment
    if recompute:
        numbers["joined_bytes_per_token"] = 0.0  # `WeightGradients.joins_unsplit`
        numbers["slice_bytes_per_token"] = sum(layer.input_bytes for layer in layers)
        numbers["working_bytes_per_token"] += max(layer.kept_bytes(is_whole=False) for layer in layers)
        if numbers["whole_bytes_per_token"] is not None:
            numbers["whole_bytes_per_token"] = 0.0
            numbers["working_whole_bytes_per_token"] = max(layer.whole_bytes for layer in layers)
    return numbers


def memory_of_part(layers: Sequence[Layer], recompute: int = False) -> PartMemory:
    """Return a part's memory, in whole bytes; shares of whole bytes may add up to slightly more than the whole."""
    numbers = memory_of_layers(layers, recompute)
    lasting = {name: math.ceil(numbers[name] - 1e-3) for name in ("static_bytes", "gradient_bytes")}
    return PartMemory(**numbers | lasting)


def costs_of_layers(layers: Sequence[Layer], rows: int = 1, recompute: int = False) -> list[Costs]:
    """Return the costs of every layer for `rows` sequences, without the overhead of its part; equal ones are shared."""
    distinct = {id(layer.costs): [layer.costs] * rows for layer in layers}
    made = {key: PartCosts(own, own if recompute else ()) for key, own in distinct.items()}
    return [made[id(layer.costs)] for layer in layers]
