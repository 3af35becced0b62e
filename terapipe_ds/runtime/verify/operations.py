"""Which operations of a layer mix tokens: evidence for what is likely wrong.

The layer runs on two sequences of different lengths; dimensions whose size goes with the length hold tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SUMS = ("mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "linalg_vector_norm", "norm")
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit")
_RUNNING = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_cummax_helper")
_WINDOWS = ("convolution", "_convolution", "unfold", "im2col", "constant_pad_nd", "roll", "mkldnn_convolution")
_ROUTING = ("topk", "one_hot", "bincount", "sort", "scatter")


@dataclass(frozen=True)
class Operation:
    """One call: its name, the shapes of its tensors, and its other arguments."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[Any, ...]


class Recorder(TorchDispatchMode):
    """Records the operations of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        shapes = tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))
        others = tuple(a for a in args if not isinstance(a, Tensor)) + tuple((kwargs or {}).items())
        self.operations.append(Operation(func.overloadpacket.__name__, shapes, others))
        return func(*args, **(kwargs or {}))


def mixing_kinds(long: Sequence[Operation], short: Sequence[Operation], lengths: tuple[int, int]) -> set[str]:
    """How tokens are mixed: a subset of attention, convolution, running, normalisation, product, routing.

    Args:
        long, short: of the same layer on sequences of ``lengths`` tokens.
    """
    aligned = [a.name for a in long] == [b.name for b in short]
    kinds = set()
    for i, operation in enumerate(long):
        other = short[i] if aligned else None
        kind = _kind(operation, _token_dims(operation, other, lengths))
        if kind is not None:
            kinds.add(kind)
    return kinds


def _token_dims(operation: Operation, other: Operation | None, lengths: tuple[int, int]) -> list[set[int]]:
    """For each tensor, the dimensions that hold tokens."""
    if other is not None and [len(s) for s in operation.shapes] == [len(s) for s in other.shapes]:
        return [{d for d in range(len(s)) if s[d] != o[d]} for s, o in zip(operation.shapes, other.shapes, strict=True)]
    return [{d for d in range(len(s)) if s[d] == lengths[0]} for s in operation.shapes]


def _kind(operation: Operation, tokens: list[set[int]]) -> str | None:
    name, shapes = operation.name, operation.shapes
    if name in _ROUTING:
        return "routing"
    if not tokens or not any(tokens):
        return None
    first, rank = tokens[0], len(shapes[0])
    if name in ("_softmax", "_safe_softmax"):
        return "attention" if _dim(operation.arguments, rank) & first else None
    if "scaled_dot_product" in name:
        causal = True in operation.arguments or ("is_causal", True) in operation.arguments
        return None if causal else "attention"
    if name in _RUNNING:
        return "running" if _dim(operation.arguments, rank) & first else None
    if name in _WINDOWS:
        return _window(operation, first)
    if name in _NORMS:
        return _normalises(operation, first)
    if name in _SUMS:
        return "normalisation" if not operation.arguments or _dim(operation.arguments, rank) & first else None
    if name in ("bmm", "mm") and len(shapes) == 2:
        return "product" if rank - 1 in first and rank - 2 in tokens[1] else None
    return None


def _dim(arguments: tuple[Any, ...], rank: int) -> set[int]:
    """The dimensions that a reduction names; all where it names none."""
    for argument in arguments:
        if isinstance(argument, bool):
            continue
        if isinstance(argument, int):
            return {argument % rank}
        if isinstance(argument, list | tuple) and argument and all(type(a) is int for a in argument):
            return {a % rank for a in argument}
    return set(range(rank))


def _window(operation: Operation, tokens: set[int]) -> str | None:
    rank = len(operation.shapes[0])
    if "convolution" in operation.name:
        kernel = operation.shapes[1][2:] if len(operation.shapes) > 1 else ()
        wide = {rank - len(kernel) + i for i, size in enumerate(kernel) if size > 1}
        return "convolution" if wide & tokens else None
    if operation.name == "unfold":
        numbers = [a for a in operation.arguments if type(a) is int]
        return "convolution" if numbers and numbers[0] % rank in tokens and numbers[1] > 1 else None
    if operation.name == "constant_pad_nd":
        pads = next((a for a in operation.arguments if isinstance(a, list | tuple)), [])
        padded = {rank - 1 - i // 2 for i, size in enumerate(pads) if size}
        return "convolution" if padded & tokens else None
    return "convolution"


def _normalises(operation: Operation, tokens: set[int]) -> str | None:
    rank = len(operation.shapes[0])
    if operation.name == "native_layer_norm":
        normalized = next((a for a in operation.arguments if isinstance(a, list | tuple)), ())
        return "normalisation" if {rank - 1 - i for i in range(len(normalized))} & tokens else None
    return "normalisation" if tokens - {0, 1} else None


def most_keys(operations: Sequence[Operation]) -> int:
    """The most keys that any softmax or fused attention goes over; 0 where there is none."""
    keys = [0]
    for operation in operations:
        if operation.name in ("_softmax", "_safe_softmax"):
            keys.append(operation.shapes[0][-1])
        elif "scaled_dot_product" in operation.name and len(operation.shapes) > 1:
            keys.append(operation.shapes[1][-2])
    return max(keys)


class ShiftedPositions(TorchFunctionMode):
    """While in it, ``torch.arange(T)`` and the first T rows of a table are those of a slice that begins at ``start``:
    what a layer would compute that asks for the slice's start."""

    def __init__(self, start: int, tokens: int, sequence_length: int) -> None:
        super().__init__()
        self._start, self._tokens, self._length = start, tokens, sequence_length
        self.shifted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and self._counts(args):
            self.shifted = True
            return func(self._start, self._start + self._tokens, **kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            return func(args[0], self._moved(args[0], args[1]))
        first_rows = func is Tensor.narrow and tuple(args[2:]) == (0, self._tokens)
        if first_rows and args[0].size(args[1]) >= self._length:
            self.shifted = True
            return func(args[0], args[1], self._start, self._tokens)
        return func(*args, **kwargs)

    def _counts(self, args: Any) -> bool:
        return tuple(args) in ((self._tokens,), (0, self._tokens), (0, self._tokens, 1))

    def _moved(self, table: Tensor, index: Any) -> Any:
        """``[:T]`` of a dimension that has room for a whole sequence."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(part is Ellipsis or part is None or torch.is_tensor(part) for part in parts):
            return index
        for d, part in enumerate(parts):
            begins = isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)
            if begins and part.stop == self._tokens and table.size(d) >= self._length:
                parts[d] = slice(self._start, self._start + self._tokens)
                self.shifted = True
        return tuple(parts)
