"""Take the saved state of an optimizer apart by parameter, and put one together for other parameters.

An optimizer saves its states in vectors. In torch's own optimizers each parameter has its own vector. In DeepSpeed's
ZeRO-1, bf16 and fused fp16 optimizers all parameters of a group share one vector, which may be cut into partitions, one
for each replica.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

Groups = tuple[tuple[str, ...], ...]  # names of parameters by group of an optimizer, in its order

Shapes = Mapping[str, tuple[int, ...]]
State = Mapping[str, Any]
_MASTER = "terapipe fp32 copy"  # key of a parameter's fp32 copy beside those of its optimizer states
_PER_ELEMENT = (_MASTER, "exp_avg", "exp_avg_sq", "momentum_buffer")  # states with the shape of their parameter


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if torch.is_tensor(value) else isinstance(value, int | float | str | None)


class StateError(ValueError):
    """Say that a saved state has an unexpected form, or belongs to other parameters."""


@dataclass(frozen=True)
class Piece:
    """Name the elements [start, stop) of a parameter."""

    name: str
    start: int
    stop: int

    def overlap(self, other: Piece) -> tuple[int, int] | None:
        """Return the first element and the end of the range that both have; None: they share nothing."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return (start, stop) if self.name == other.name and (start < stop or self == other) else None


class Content(NamedTuple):
    """Hold an optimizer's states of a piece: vectors with a number for each element, and everything else."""

    vectors: dict[str, Tensor]
    others: dict[str, Any]


Received = Mapping[str, Sequence[tuple[Piece, Content]]]  # by parameter, whole pieces as other ranks hold them


@dataclass(frozen=True)
class _Vector:
    """Describe a vector, or one partition of it."""

    names: Sequence[str]
    size: int
    padding: int  # zeros at its end
    all_padding: int  # zeros at the end of all partitions
    shape: tuple[int, ...]  # of the one parameter, or of the vector
    offsets: dict[Piece, int]  # where each piece begins


@dataclass(frozen=True)
class StateForm:
    """Describe how the optimizer states of a stage are saved."""

    inner: str | None = None  # where a wrapper keeps the state of torch's optimizer
    masters: str | None = None  # where it keeps the fp32 copies of parameters
    is_flat: bool = False  # all parameters of a group make one vector
    num_partitions: int = 1  # equally long parts that a vector is cut into
    alignment: int = 1  # the length of a vector is a multiple of it
    lists_pieces: bool = False  # the state says where parameters are, as states in partitions do
    strips: bool = False  # the fp32 copies are saved without the zeros at the end


@dataclass(frozen=True)
class Shard:
    """Take apart and fill one partition of the states of a stage whose optimizer holds these parameters."""

    form: StateForm
    groups: Groups
    shapes: Shapes
    partition: int

    @property
    def pieces(self) -> list[Piece]:
        """Return the pieces of parameters that this partition holds."""
        return [piece for vectors in self._vectors for vector in vectors for piece in vector.offsets]

    def take(self, state: State) -> dict[Piece, Content]:
        """Take a saved state apart; raise StateError if it belongs to other parameters."""
        # Raise now if anything does not fit, before elements of other parameters are taken for these
        counts = [len(group["params"]) for group in self._inner(state)["param_groups"]]
        wanted = [len(vectors) for vectors in self._vectors]
        if counts != wanted:
            raise StateError(f"groups of {counts} parameters where {wanted} were to be")
        if any(any(paddings) for paddings in state.get(constants.PARAM_ALIGNMENT_PADDINGS, ())):
            raise StateError("zero_optimization.parameter_alignment was on")
        # Cut every vector at the borders of its parameters; values that are no vectors belong to all of them
        contents = {}
        for index, vectors in enumerate(self._vectors):
            for position, vector in enumerate(vectors):
                whole = self._content(state, index, position)
                self._check(state, index, vector, whole)
                flat = {key: tensor.detach().reshape(-1) for key, tensor in whole.vectors.items()}
                for piece, offset in vector.offsets.items():
                    end = offset + piece.stop - piece.start
                    elements = {key: tensor[offset:end] for key, tensor in flat.items()}
                    contents[piece] = Content(elements, whole.others)
        return contents

    def put(self, state: State, received: Received) -> dict[str, Any]:
        """Return a saved state whose contents are replaced by `received`; parameters without pieces get zeros."""
        # Number the parameters anew, group by group, as torch does
        inner = self._inner(state)
        states: dict[int, dict[str, Any]] = {}
        param_groups, masters, numbers = [], [], itertools.count()
        for index, vectors in enumerate(self._vectors):
            filled = {next(numbers): self._filled(state, index, vector, received) for vector in vectors}
            param_groups.append({**inner["param_groups"][index], "params": list(filled)})
            copies = [of_parameter.pop(_MASTER, None) for of_parameter in filled.values()]
            masters.append(copies[0] if self.form.is_flat else copies)
            states |= {number: of_parameter for number, of_parameter in filled.items() if of_parameter}
        # Around it goes the wrapper's state: all else stays as it was saved
        made = {**inner, "state": states, "param_groups": param_groups}
        if self.form.inner is not None:
            made = {**state, self.form.inner: made}
        if self.form.masters is not None:
            made[self.form.masters] = masters
        return {**made, **(self._listed(state) if self.form.lists_pieces else {})}

    def _filled(self, state: State, index: int, vector: _Vector, received: Received) -> dict[str, Any]:
        whole = self._content(state, index, 0) if self.form.is_flat else Content({}, {})
        tensors = {
            key: torch.zeros(vector.size, dtype=tensor.dtype, device="cpu") for key, tensor in whole.vectors.items()
        }
        others = dict(whole.others)
        # A piece may come in parts, from several partitions of another layout
        for target, offset in vector.offsets.items():
            for source, content in received[target.name]:
                common = source.overlap(target)
                if common is None:
                    continue
                others |= content.others
                (start, stop), shift = common, offset - target.start
                for key, tensor in content.vectors.items():
                    if key not in tensors:
                        tensors[key] = torch.zeros(vector.size, dtype=tensor.dtype, device="cpu")
                    tensors[key][start + shift : stop + shift] = tensor[start - source.start : stop - source.start]
        if self.form.masters is not None and _MASTER not in tensors:
            tensors[_MASTER] = torch.zeros(vector.size, device="cpu")
        if self.form.strips:
            tensors[_MASTER] = tensors[_MASTER][: vector.size - vector.padding]
        return {**others, **(tensors if self.form.is_flat else {k: t.view(vector.shape) for k, t in tensors.items()})}

    def _inner(self, state: State) -> State:
        return state if self.form.inner is None else state[self.form.inner]

    def _content(self, state: State, index: int, position: int) -> Content:
        inner, is_flat = self._inner(state), self.form.is_flat
        others = dict(inner["state"].get(inner["param_groups"][index]["params"][position], {}))
        if self.form.masters is not None:
            copies = state[self.form.masters][index]
            others[_MASTER] = copies if is_flat else copies[position]
        # the momentum of a sparse embedding is sparse too, and moves unchanged
        dense = {key: value for key, value in others.items() if getattr(value, "layout", None) is torch.strided}
        tensors = [key for key, value in dense.items() if value.dim() > 0]
        return Content({key: others.pop(key) for key in tensors if is_flat or key in _PER_ELEMENT}, others)

    @cached_property
    def _vectors(self) -> list[list[_Vector]]:
        if self.form.is_flat:
            return [[self._vector(names)] for names in self.groups]
        return [[self._vector((name,)) for name in names] for names in self.groups]

    def _vector(self, names: Sequence[str]) -> _Vector:
        form, counts = self.form, [math.prod(self.shapes[name]) for name in names]
        used = sum(counts)
        size = -(-used // form.alignment) * form.alignment // form.num_partitions
        # The elements of this partition, counted in the whole vector
        begin, end, offset = self.partition * size, (self.partition + 1) * size, 0
        offsets = {}
        for name, count in zip(names, counts, strict=True):
            start, stop = max(begin, offset), min(end, offset + count)
            if start < stop or not form.is_flat:
                offsets[Piece(name, start - offset, stop - offset)] = start - begin
            offset += count
        shape, padding = (size,) if form.is_flat else self.shapes[names[0]], min(size, max(0, end - used))
        return _Vector(names, size, padding, size * form.num_partitions - used, shape, offsets)

    def _check(self, state: State, index: int, vector: _Vector, whole: Content) -> None:
        # bitsandbytes keeps its vectors in a dict: each parameter would get the vectors of all
        if self.form.is_flat and (key := next((k for k, v in whole.others.items() if not _is_number(v)), None)):
            raise StateError(f"{key} of group {index} holds more than a number for the group, or for each element")
        sparse = {k: v for k, v in whole.others.items() if torch.is_tensor(v) and v.layout is not torch.strided}
        for key, tensor in {**whole.vectors, **sparse}.items():
            is_stripped = self.form.is_flat and tensor.numel() == vector.size - vector.padding
            if tuple(tensor.shape) != vector.shape and not is_stripped:
                what = f"group {index}" if self.form.is_flat else vector.names[0]
                shape, wanted = list(tensor.shape), list(vector.shape)
                raise StateError(f"{key} of {what} has shape {shape} where {wanted} was to be")
        if self.form.lists_pieces:
            there = {name: (at.start, at.numel) for name, at in state[constants.PARAM_SLICE_MAPPINGS][index].items()}
            here = {piece.name: (offset, piece.stop - piece.start) for piece, offset in vector.offsets.items()}
            name = next((name for name in sorted({*there, *here}) if there.get(name) != here.get(name)), None)
            if name is not None:
                raise StateError(f"{name} is at {there.get(name)} where {here.get(name)} was to be")

    def _listed(self, state: State) -> dict[str, Any]:
        """Return the places of parameters in the form of DeepSpeed's list."""
        is_last = self.partition == self.form.num_partitions - 1
        paddings, mappings = [], []
        for (vector,) in self._vectors:
            paddings.append(vector.padding if self.form.strips else vector.all_padding * is_last)
            places = ((p.name, p.stop - p.start, offset) for p, offset in vector.offsets.items())
            mappings.append(OrderedDict((name, fragment_address(numel=n, start=at)) for name, n, at in places))
        listed: dict[str, Any] = {constants.GROUP_PADDINGS: paddings, constants.PARAM_SLICE_MAPPINGS: mappings}
        if constants.PARAM_ALIGNMENT_PADDINGS in state:
            listed[constants.PARAM_ALIGNMENT_PADDINGS] = [[0] * len(names) for names in self.groups]
        return listed


def form_of(optimizer: Any) -> StateForm | None:
    """Return the form in which an optimizer saves its states; None: we do not know it."""
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        is_zero = isinstance(optimizer, DeepSpeedZeroOptimizer)
        if is_zero and (optimizer.elastic_checkpoint or optimizer.round_robin_gradients):
            return None
        if not is_zero and not optimizer.using_real_optimizer:
            return None
        inner, masters = constants.BASE_OPTIMIZER_STATE, constants.SINGLE_PARTITION_OF_FP32_GROUPS
        count = int(optimizer.partition_count[0])  # the same for each group
        alignment = optimizer.nccl_start_alignment_factor * count
        return StateForm(inner, masters, True, count, alignment, lists_pieces=True, strips=is_zero)
    if isinstance(optimizer, FP16_Optimizer):
        return StateForm("optimizer_state_dict", "fp32_groups_flat", is_flat=True)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return StateForm("optimizer_state_dict", "fp32_groups")
    return StateForm() if isinstance(optimizer, torch.optim.Optimizer) else None
