"""What each layer of a model costs: the one source for the time, the memory and the messages of any cut.

A part is a run of layers. Its times are the sums of theirs, and its messages are those of its first and last layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from terapipe_ds.costs.devices import LinkCard
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import ITEMSIZE

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """What the costs of a layer depend on, besides the model and the cluster."""

    tensor: int
    micro_batch: int  # sequences
    data: int = 1
    zero_stage: int = 0


class TiedCopy(NamedTuple):
    """Bytes of the copy on the last stage: both stages sum it, and the last one reduces and steps it as well."""

    exchanged: float  # between the two stages
    summed: float  # over replicas
    moved: float  # by the optimizer


@dataclass(frozen=True)
class Span:
    """The layers of a part: those in [start, stop), where the part is among `num_parts`, and what it keeps of them."""

    start: int
    stop: int
    recompute: bool = False


class Layers(Protocol):
    """What the planner asks of a model."""

    num_layers: int
    is_sliceable: bool
    whole_is_least: bool  # whether no slices together take less than the whole sequence
    dtype: str  # as `model_memory` spells it

    def __hash__(self) -> int:
        """Return a hash by identity: times are kept per model."""

    def refuse_tensor(self, degree: int) -> str | None:
        """Return why so many ranks cannot share a layer, or None."""

    def refuse_micro_batch(self, tensor: int, rows: int) -> str | None:
        """Return why nothing is known of micro-batches of so many rows on so many tensor ranks, or None."""

    def layer_costs(self, setting: Setting, recompute: bool) -> Sequence[Any]:
        """Return an object with `forward_s`, `backward_s` and perhaps `weight_s` per layer; equal layers share one."""

    def output_bytes(self, setting: Setting) -> Floats:
        """Return, per layer, the bytes per token of what a micro-batch sends on after it."""

    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        """Return the memory of every part of a pipeline."""

    def end_bytes(self, setting: Setting) -> tuple[Floats, Floats]:
        """Return, per layer, on one rank: bytes that are all-reduced over replicas, and that the optimizer moves."""

    def tied_copy(self, setting: Setting) -> TiedCopy | None:
        """Return what a second copy of a tied matrix adds where first and last layer are on different stages."""


@dataclass(frozen=True)
class WholeCosts:
    """Times of a layer that is not sliced: whatever the tokens, as for the whole sequence by share."""

    forward: float
    backward: float
    sequence_length: int
    vectorized = True

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return self.forward * tokens / self.sequence_length + 0.0 * prefix

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return self.backward * tokens / self.sequence_length + 0.0 * prefix


@dataclass(frozen=True)
class Rows:
    """Costs of a layer for several sequences at once, and with its forward again where it is recomputed."""

    costs: Any
    rows: int
    recompute: bool

    @property
    def vectorized(self) -> bool:
        return bool(getattr(self.costs, "vectorized", False))

    @property
    def weight_s(self) -> Callable[[Any, Any], Any]:
        """Return what W takes, in which no forward is. A layer that does not tell has no such method (`hasattr`)."""
        weight_s = self.costs.weight_s
        return lambda tokens, prefix: self.rows * weight_s(tokens, prefix)

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return self.rows * self.costs.forward_s(tokens, prefix)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        again_s = self.costs.forward_s(tokens, prefix) if self.recompute else 0.0
        return self.rows * (self.costs.backward_s(tokens, prefix) + again_s)


@dataclass(frozen=True)
class Wire:
    """A link between two stages, and how many bytes go over it per token."""

    link: LinkCard
    bytes_per_token: float

    def seconds(self, tokens: Any) -> Any:
        return self.link.latency_s + self.bytes_per_token * tokens / self.link.bandwidth_bytes_per_s


class PartCosts:
    """Costs of a part, as planner and simulator ask for them: sums over its layers, and the links at its ends."""

    def __init__(self, layers: Sequence[Any], forward: Wire | None = None, backward: Wire | None = None) -> None:
        counts = Counter(map(id, layers))
        by_id = {id(layer): layer for layer in layers}
        self._layers = [(by_id[key], count) for key, count in counts.items()]
        self.vectorized = all(getattr(layer, "vectorized", False) for layer in layers)
        self._forward, self._backward = forward, backward
        if all(hasattr(layer, "weight_s") for layer in layers):  # a part that cannot split must not look as if it could
            self.weight_s = self._weight_s

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(count * layer.forward_s(tokens, prefix) for layer, count in self._layers)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(count * layer.backward_s(tokens, prefix) for layer, count in self._layers)

    def send_s(self, tokens: Any) -> Any:
        return 0.0 * tokens if self._forward is None else self._forward.seconds(tokens)

    def send_gradient_s(self, tokens: Any) -> Any:
        return 0.0 * tokens if self._backward is None else self._backward.seconds(tokens)

    def _weight_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(count * layer.weight_s(tokens, prefix) for layer, count in self._layers)


def sum_of_memory(layers: Sequence[PartMemory]) -> dict[str, Any]:
    """Return the fields of a part's memory, as floats: sums over its layers, but the most of what only works."""
    numbers: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(PartMemory)):
        values = [getattr(layer, name) for layer in layers]
        is_largest = name.startswith("working") or name == "window_tokens"
        numbers[name] = None if None in values else (max if is_largest else math.fsum)(values)
    return numbers


def bytes_summed(dtype: str, zero_stage: int) -> float:
    """Return the bytes per trained parameter that replicas all-reduce; what is only gathered counts half.

    With ZeRO-1 DeepSpeed 0.19.8 sums whole gradients, as without it, and then gathers parameters as large. For bfloat16
    it sums fp32 gradients, and gathers the parameters whatever the stage.
    """
    if dtype == "bfloat16":
        return 4 + 2 / 2
    return (1.5 if zero_stage else 1.0) * ITEMSIZE[dtype]


def shared(layers: Sequence[Hashable]) -> list[Any]:
    """Return the layers, of which those that are equal are one object."""
    kept: dict[Hashable, Any] = {}
    return [kept.setdefault(layer, layer) for layer in layers]


def spans_of(bounds: Sequence[int], recompute: Sequence[bool]) -> list[Span]:
    """Return the part between each two bounds."""
    return [Span(*edges, again) for edges, again in zip(itertools.pairwise(bounds), recompute, strict=True)]
