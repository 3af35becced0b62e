"""The forms in which DeepSpeed's optimizers save their states, taken apart by parameter and put together again.

``take`` gives what a saved state has of each parameter, ``put`` makes a saved state of such pieces for others. Flat
forms cut one vector of all parameters over the replicas, so that a piece is a range of a parameter's elements.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address

from terapipe_ds.runtime.state_order import Groups

MASTER = "terapipe fp32 copy"  # key of a parameter's fp32 copy beside those of its optimizer states
Shapes = Mapping[str, tuple[int, ...]]


class StateError(ValueError):
    """A saved state is not of the form, or not of the parameters, that it should be."""


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of a parameter."""

    name: str
    start: int
    stop: int


Content = dict[str, Any]
Held = dict[Piece, Content]


class StateForm(Protocol):
    """How the states of one kind of optimizer are saved."""

    @property
    def num_partitions(self) -> int:
        """Over how many replicas the states of a parameter are cut."""

    def pieces(self, groups: Groups, shapes: Shapes, partition: int) -> list[Piece]:
        """What one of the partitions holds of these parameters."""

    def take(self, state: Mapping[str, Any], groups: Groups, shapes: Shapes, partition: int) -> Held:
        """Raises:
        StateError: the state is not that of these parameters.
        """

    def put(
        self, state: Mapping[str, Any], before: Groups, groups: Groups, shapes: Shapes, partition: int, held: Held
    ) -> dict[str, Any]:
        """``state``, which is of the parameters ``before``, with those of ``groups`` in their place."""


def form_of(optimizer: Any) -> StateForm | None:
    """None for an optimizer whose states we do not know."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        known = not (optimizer.elastic_checkpoint or optimizer.round_robin_gradients or optimizer.has_moe_layers)
        return _flat(optimizer, strips=True) if known else None
    if isinstance(optimizer, BF16_Optimizer):
        known = optimizer.using_real_optimizer and not optimizer.has_moe_layers
        return _flat(optimizer, strips=False) if known else None
    if isinstance(optimizer, FP16_Optimizer):
        return None if optimizer.has_moe_layers else FlatForm("optimizer_state_dict", "fp32_groups_flat")
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return PerParameterForm("optimizer_state_dict", "fp32_groups")
    return PerParameterForm() if isinstance(optimizer, torch.optim.Optimizer) else None


def _flat(optimizer: Any, strips: bool) -> FlatForm:
    count = int(optimizer.partition_count[0])  # of each group alike, where there are no experts
    return FlatForm(
        constants.BASE_OPTIMIZER_STATE, constants.SINGLE_PARTITION_OF_FP32_GROUPS, count,
        optimizer.nccl_start_alignment_factor * count, True, strips,
    )  # fmt: skip


def _numel(shapes: Shapes, name: str) -> int:
    return math.prod(shapes[name])


@dataclass(frozen=True)
class PerParameterForm:
    """torch's own, and that of the fp16 wrapper that does not flatten.

    Args:
        inner: where a wrapper keeps the state of torch's optimizer.
        masters: where it keeps the fp32 copies of the parameters.
    """

    inner: str | None = None
    masters: str | None = None
    num_partitions: int = 1

    def pieces(self, groups: Groups, shapes: Shapes, partition: int) -> list[Piece]:
        return [Piece(name, 0, _numel(shapes, name)) for names in groups for name in names]

    def take(self, state: Mapping[str, Any], groups: Groups, shapes: Shapes, partition: int) -> Held:
        inner = state if self.inner is None else state[self.inner]
        numbers = [list(group["params"]) for group in inner["param_groups"]]
        _require_counts([len(group) for group in numbers], groups)
        held: Held = {}
        for index, (names, group) in enumerate(zip(groups, numbers, strict=True)):
            for position, (name, number) in enumerate(zip(names, group, strict=True)):
                content = dict(inner["state"].get(number, {}))
                if self.masters is not None:
                    content[MASTER] = state[self.masters][index][position]
                _require_shapes(name, shapes[name], content)
                held[Piece(name, 0, _numel(shapes, name))] = content
        return held

    def put(
        self, state: Mapping[str, Any], before: Groups, groups: Groups, shapes: Shapes, partition: int, held: Held
    ) -> dict[str, Any]:
        inner = state if self.inner is None else state[self.inner]
        states: dict[int, Content] = {}
        masters: list[list[Any]] = []
        param_groups, number = [], 0
        for names, group in zip(groups, inner["param_groups"], strict=True):
            param_groups.append({**group, "params": list(range(number, number + len(names)))})
            masters.append([])
            for name in names:
                content = dict(held[Piece(name, 0, _numel(shapes, name))])
                masters[-1].append(content.pop(MASTER, None))
                if content:
                    states[number] = content
                number += 1
        made = {**inner, "state": states, "param_groups": param_groups}
        outer = made if self.inner is None else {**state, self.inner: made}
        return outer if self.masters is None else {**outer, self.masters: masters}


def _require_counts(counts: list[int], groups: Groups) -> None:
    expected = [len(names) for names in groups]
    if counts != expected:
        raise StateError(f"groups of {counts} parameters where {expected} were to be")


def _require_shapes(name: str, shape: tuple[int, ...], content: Content) -> None:
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", MASTER):
        value = content.get(key)
        if torch.is_tensor(value) and tuple(value.shape) != shape:
            raise StateError(f"{key} of {name} has shape {list(value.shape)} where {list(shape)} was to be")


@dataclass(frozen=True)
class FlatForm:
    """One vector per group: ZeRO stage 1, DeepSpeed's bf16 optimizer and its fused fp16 one.

    Args:
        num_partitions: of the vector, each as long as the others.
        alignment: the vector's length is a multiple of it.
        lists_pieces: whether the state says where parameters are, as those that are cut do.
        strips: the fp32 copies are saved without the zeros at the end.
    """

    inner: str
    masters: str
    num_partitions: int = 1
    alignment: int = 1
    lists_pieces: bool = False
    strips: bool = False

    def pieces(self, groups: Groups, shapes: Shapes, partition: int) -> list[Piece]:
        return [piece for names in groups for piece, _ in self._vector(names, shapes, partition).pieces]

    def _vector(self, names: tuple[str, ...], shapes: Shapes, partition: int) -> _Vector:
        used = sum(_numel(shapes, name) for name in names)
        size = math.ceil(used / self.alignment) * self.alignment // self.num_partitions
        begin, end, offset = partition * size, (partition + 1) * size, 0
        pieces = []
        for name in names:
            start, stop = max(begin, offset), min(end, offset + _numel(shapes, name))
            if start < stop:
                pieces.append((Piece(name, start - offset, stop - offset), start - begin))
            offset += _numel(shapes, name)
        return _Vector(size, size * self.num_partitions - used, min(size, max(0, end - used)), pieces)

    def take(self, state: Mapping[str, Any], groups: Groups, shapes: Shapes, partition: int) -> Held:
        _require_counts([1] * len(groups), tuple(tuple(g["params"]) for g in state[self.inner]["param_groups"]))
        if any(any(paddings) for paddings in state.get(constants.PARAM_ALIGNMENT_PADDINGS, ())):
            raise StateError("zero_optimization.parameter_alignment was on")
        held: Held = {}
        for index, names in enumerate(groups):
            vector = self._vector(names, shapes, partition)
            self._require_listed(state, index, vector)
            tensors, others = self._split(state, index, vector)
            for piece, offset in vector.pieces:
                length = piece.stop - piece.start
                held[piece] = {**others, **{key: t.detach().narrow(0, offset, length) for key, t in tensors.items()}}
        return held

    def _require_listed(self, state: Mapping[str, Any], index: int, vector: _Vector) -> None:
        if not self.lists_pieces:
            return
        listed = {name: (at.start, at.numel) for name, at in state[constants.PARAM_SLICE_MAPPINGS][index].items()}
        expected = {piece.name: (offset, piece.stop - piece.start) for piece, offset in vector.pieces}
        if listed != expected:
            names = sorted(name for name in {*listed, *expected} if listed.get(name) != expected.get(name))
            raise StateError(f"{names[0]} stands at {listed.get(names[0])} where {expected.get(names[0])} was to be")

    def _split(self, state: Mapping[str, Any], index: int, vector: _Vector) -> tuple[dict[str, torch.Tensor], Content]:
        """What a group has for each element, and what it has once."""
        inner = state[self.inner]
        found = dict(inner["state"].get(inner["param_groups"][index]["params"][0], {}))
        tensors = {MASTER: state[self.masters][index]}
        for key in [key for key, value in found.items() if torch.is_tensor(value) and value.dim() > 0]:
            tensors[key] = found.pop(key)
        for key, tensor in tensors.items():
            if tensor.numel() not in (vector.size, vector.size - vector.padding):
                raise StateError(f"{key} of group {index} has {tensor.numel()} elements where {vector.size} were to be")
        return tensors, found

    def put(
        self, state: Mapping[str, Any], before: Groups, groups: Groups, shapes: Shapes, partition: int, held: Held
    ) -> dict[str, Any]:
        inner = state[self.inner]
        vectors = [self._vector(names, shapes, partition) for names in groups]
        states, masters = dict(inner["state"]), []
        for index, vector in enumerate(vectors):
            tensors, others = self._split(state, index, self._vector(before[index], shapes, partition))
            made = {key: torch.zeros(vector.size, dtype=tensor.dtype) for key, tensor in tensors.items()}
            for piece, offset in vector.pieces:
                for key, value in held[piece].items():
                    if key in made:
                        made[key][offset : offset + value.numel()] = value
                    else:
                        others[key] = value
            master = made.pop(MASTER)
            masters.append(master[: vector.size - vector.padding] if self.strips else master)
            if made or others:
                states[inner["param_groups"][index]["params"][0]] = {**others, **made}
        found = {**state, self.inner: {**inner, "state": states}, self.masters: masters}
        return found | self._listed(state, vectors, groups, partition)

    def _listed(
        self, state: Mapping[str, Any], vectors: list[_Vector], groups: Groups, partition: int
    ) -> dict[str, Any]:
        if not self.lists_pieces:
            return {}
        last = partition == self.num_partitions - 1
        found: dict[str, Any] = {
            constants.GROUP_PADDINGS: [v.padding if self.strips else v.all_padding * last for v in vectors],
            constants.PARAM_SLICE_MAPPINGS: [
                OrderedDict((p.name, fragment_address(numel=p.stop - p.start, start=offset)) for p, offset in v.pieces)
                for v in vectors
            ],
        }
        if constants.PARAM_ALIGNMENT_PADDINGS in state:
            found[constants.PARAM_ALIGNMENT_PADDINGS] = [[0] * len(names) for names in groups]
        return found


@dataclass(frozen=True)
class _Vector:
    """One partition of a group's vector: its length, how much of all and of it are zeros at the end, and where pieces
    stand in it."""

    size: int
    all_padding: int
    padding: int
    pieces: list[tuple[Piece, int]]
