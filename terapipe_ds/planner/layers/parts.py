"""Define the costs of each layer of a model: the one source for the time, the memory and the messages of any cut.

A part is a run of layers. Its times are the sums of theirs, and its messages are its first and last layer's.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terapipe_ds.costs.interface import Costs
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import ITEMSIZE

Floats = NDArray[np.float64]


class Again(enum.IntEnum):
    """Name the layers of a stage that run a second time in their backward."""

    OFF = 0
    FULL = 1
    KEEPS_ATTENTION = 2  # all but their attention, whose results are kept


@dataclass(frozen=True)
class Setting:
    """Hold the settings, other than the model and the cluster, that decide the costs of a layer."""

    tensor: int
    micro_batch: int  # sequences
    data: int = 1
    zero_stage: int = 0
    sequence: int = 1  # ranks that divide the tokens of a slice; tensor is 1 then
    offload_optimizer: bool = False


class TiedCopy(NamedTuple):
    """Hold the bytes of the copy on the last stage. Both stages sum it; the last one reduces and steps it as well."""

    exchanged: float  # between the two stages
    summed: float  # over replicas
    moved: float  # by the optimizer


@dataclass(frozen=True)
class Span:
    """Name the layers of a part, those in [start, stop), and say how they recompute, by `Again`."""

    start: int
    stop: int
    recompute: int = Again.OFF


class Layers(abc.ABC):
    """Answer the planner's questions about a model. Searches keep its times by identity."""

    num_layers: int
    is_sliceable: bool
    whole_is_least: bool  # whether no slices together take less than the whole sequence
    dtype: str  # as `model_memory` spells it
    levers: frozenset[str] = frozenset()  # fields of `candidate.Levers` with known costs
    kinds: tuple[Again, ...] = (Again.OFF, Again.FULL)  # of recomputation, with known costs
    recomputes_before_weights = False  # whether the seconds of W are known where a stage recomputes

    @abc.abstractmethod
    def refuse_tensor(self, degree: int) -> str | None:
        """Return why `degree` ranks cannot share a layer, or None."""

    def refuse_micro_batch(self, tensor: int, rows: int) -> str | None:
        """Return why nothing is known about micro-batches of `rows` rows on `tensor` tensor ranks, or None."""
        return None

    @abc.abstractmethod
    def layer_costs(self, setting: Setting, recompute: int) -> Sequence[Costs]:
        """Return the costs of each layer; equal layers share one object."""

    def overhead(self, setting: Setting, layer: int) -> Sequence[Costs]:
        """Return the costs of each F and B of a part that ends with `layer`, besides its layers."""
        return ()

    @abc.abstractmethod
    def output_bytes(self, setting: Setting) -> Floats:
        """Return, per layer, the bytes per token that a micro-batch sends on after it."""

    @abc.abstractmethod
    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        """Return the memory of every part of a pipeline."""

    @abc.abstractmethod
    def end_bytes(self, setting: Setting) -> tuple[Floats, Floats]:
        """Return, per layer, on one rank: bytes that replicas all-reduce, and bytes that the optimizer moves."""

    def refuse_sequence(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot divide the tokens of a slice, or None."""
        return None if ranks == 1 else "nothing is known about sequence ranks"

    def host_bytes(self, setting: Setting) -> Floats:
        """Return, per layer, the bytes of the optimizer that a rank has in its host's memory."""
        return np.zeros(self.num_layers)

    def tied_copy(self, setting: Setting) -> TiedCopy | None:
        """Return the bytes that a tied matrix's second copy adds where first and last layer are on different stages."""
        return None


@dataclass(frozen=True)
class WholeCosts:
    """Time a layer that is not sliced: a slice takes its share of the tokens of a whole sequence."""

    forward: float
    backward: float
    sequence_length: int
    vectorized = True

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return self.forward * tokens / self.sequence_length + 0.0 * prefix

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return self.backward * tokens / self.sequence_length + 0.0 * prefix


def bytes_summed(dtype: str, zero_stage: int) -> float:
    """Return the bytes per trained parameter that replicas all-reduce; bytes that they only gather count half.

    With ZeRO-1 DeepSpeed 0.19.8 sums whole gradients, as without it, and then gathers parameters of that size. Its
    optimizer for bfloat16 gathers whatever the stage, and sums in bfloat16 (`communication_data_type`) also where
    gradients accumulate in fp32.
    """
    return (1.5 if zero_stage or dtype == "bfloat16" else 1.0) * ITEMSIZE[dtype]
