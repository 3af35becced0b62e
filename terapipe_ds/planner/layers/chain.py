"""Describe a model by measured or published numbers per layer, which a user gives by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from terapipe_ds.costs.interface import Costs
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.layer import Layer, costs_of_layers, memory_of_part
from terapipe_ds.planner.layers.parts import Floats, Layers, Setting, Span, WholeCosts, bytes_summed
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import ITEMSIZE


class LayerChain:
    """Describe a model by numbers per layer, of one sequence on one device.

    Args:
        forward_s: of a whole sequence, in seconds.
        backward_s: of a whole sequence, in seconds.
        output_bytes: a layer sends these to the next one.
        saved_bytes: a layer keeps these for its backward.
        parameter_bytes: of its parameters; gradients have as many, and Adam's states twice as many.
        costs: per layer an object with `forward_s(tokens, prefix)` and `backward_s(tokens, prefix)`; without them all
            plans are unsliced.

    Raises PlannerError for sequences of different lengths, or numbers that no layer has.
    """

    def __init__(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        output_bytes: Sequence[float],
        saved_bytes: Sequence[float],
        parameter_bytes: Sequence[float],
        costs: Sequence[Costs] | None = None,
    ) -> None:
        self.forward_s, self.backward_s = _checked("forward_s", forward_s), _checked("backward_s", backward_s)
        self.output_bytes = _checked("output_bytes", output_bytes)
        self.saved_bytes = _checked("saved_bytes", saved_bytes)
        self.parameter_bytes = _checked("parameter_bytes", parameter_bytes)
        self.costs = None if costs is None else tuple(costs)
        self.num_layers = len(self.forward_s)
        # a missing number would shift all later numbers to other layers
        for name in ("forward_s", "backward_s", "output_bytes", "saved_bytes", "parameter_bytes", "costs"):
            values = getattr(self, name)
            if values is not None and not 0 < len(values) == self.num_layers:
                has = f"{name} has {len(values)} entries, forward_s {self.num_layers}"
                raise PlannerError(f"{has}: give one per layer, and at least one")

    def of_length(self, sequence_length: int) -> Layers:
        """Return the planner's view of the chain, for sequences of that length."""
        return _ChainLayers(self, sequence_length)


class _ChainLayers(Layers):
    """Give a `LayerChain` to the planner, for sequences of one length."""

    dtype, whole_is_least = "float32", False

    def __init__(self, chain: LayerChain, sequence_length: int) -> None:
        self._chain, self._length = chain, sequence_length
        self.num_layers, self.is_sliceable = chain.num_layers, chain.costs is not None
        whole = zip(chain.forward_s.tolist(), chain.backward_s.tolist(), strict=True)
        shared: dict[tuple[float, float], Costs] = {}  # equal layers are one object
        unsliced = [shared.setdefault(times, WholeCosts(*times, sequence_length)) for times in whole]
        self._costs: Sequence[Costs] = unsliced if chain.costs is None else chain.costs

    def refuse_tensor(self, degree: int) -> str | None:
        return None if degree == 1 else "a LayerChain says nothing of how ranks share a layer"

    def layer_costs(self, setting: Setting, recompute: int) -> Sequence[Costs]:
        return costs_of_layers(self._layers(setting), setting.micro_batch, recompute)

    def output_bytes(self, setting: Setting) -> Floats:
        return setting.micro_batch / self._length * self._chain.output_bytes

    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        layers = self._layers(setting)
        return tuple(memory_of_part(layers[span.start : span.stop], span.recompute) for span in spans)

    def end_bytes(self, setting: Setting) -> tuple[Floats, Floats]:
        """Count seven numbers per parameter: Adam reads gradient, parameter, two states and writes the last three."""
        divided = setting.data if setting.zero_stage else 1
        summed = bytes_summed(self.dtype, setting.zero_stage) / ITEMSIZE[self.dtype]
        return summed * self._chain.parameter_bytes, 7 * self._chain.parameter_bytes / divided

    @functools.lru_cache(maxsize=64)  # noqa: B019 (it goes with the planner that made it)
    def _layers(self, setting: Setting) -> list[Layer]:
        """Count fp32 parameters, their gradients and two states; ZeRO-1 divides states and a copy over the replicas."""
        chain, sent = self._chain, self.output_bytes(setting).tolist()
        saved = (setting.micro_batch / self._length * chain.saved_bytes).tolist()
        layers = []
        for index, (costs, parameters) in enumerate(zip(self._costs, chain.parameter_bytes.tolist(), strict=True)):
            states = 3 * parameters / setting.data if setting.zero_stage else 2 * parameters
            gradients = 0.0 if setting.zero_stage else parameters
            static = 2 * parameters + states - gradients
            memory = PartMemory(static, saved[index], gradient_bytes=gradients)
            received = sent[index - 1] if index else 0.0
            layers.append(Layer(costs, memory=memory, input_bytes=received, output_bytes=sent[index]))
        return layers


def _checked(name: str, values: Sequence[float]) -> Floats:
    try:
        numbers = np.array(values, float)
    except (TypeError, ValueError):
        numbers = np.array([math.nan])
    if numbers.ndim != 1 or not np.all(np.isfinite(numbers) & (numbers >= 0)):
        raise PlannerError(f"{name}: give one finite number >= 0 per layer")
    return numbers
