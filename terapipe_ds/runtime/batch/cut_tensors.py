"""Cut a micro-batch, as DeepSpeed's data iterator gives it, into its slices.

A batch is `(inputs, labels)`, each a tensor or a tuple of tensors. The sequence length L is the size of the labels in
`sequence_dim`. A tensor is sliced where that dimension has size L; every other tensor goes whole with each slice.
If the size alone may deceive, the engine refuses the batch until the config names the tensors to slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from terapipe_ds.dict_batch import BatchError
from terapipe_ds.schedule.show import many

Tensors = tuple[torch.Tensor, ...]

_NO_SEQUENCES = (
    'Batches that are no sequences (images with a class each) train whole, with terapipe "slices": 1, '
    '"schedule": "1f1b".'
)


def as_tuple(tensors: Any, what: str) -> Tensors:
    """Return a tensor, or a list or tuple of tensors, as a tuple. Raises BatchError for anything else."""
    if torch.is_tensor(tensors):
        return (tensors,)
    if isinstance(tensors, (tuple, list)) and tensors and all(torch.is_tensor(t) for t in tensors):
        return tuple(tensors)
    fix = ". Give the dict as the batch, with its labels in it" if (type(tensors), what) == (dict, "the inputs") else ""
    inner = ", ".join(type(each).__name__ for each in tensors) if isinstance(tensors, (tuple, list)) else ""
    kind = f"{type(tensors).__name__}{f' of ({inner})' if inner else ''}"
    raise BatchError(f"{what} of a batch must be a tensor or a tuple of tensors, got {kind}{fix}")


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)


def _size(tensor: torch.Tensor, dim: int) -> int | None:
    """Return the size of `tensor` in a dimension; None if it does not have the dimension."""
    return int(tensor.size(dim)) if -tensor.dim() <= dim < tensor.dim() else None


def _named(index: int, tensor: torch.Tensor) -> str:
    """Return, for messages, `input 1 (int64 [2, 64])`."""
    return f"input {index} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"


@dataclass(frozen=True)
class SliceableTensors:
    """Hold the inputs or the labels of one micro-batch, on this rank."""

    tensors: Tensors
    sliced: tuple[bool, ...]  # whether each is cut along `dim`; each slice gets the others whole
    dim: int
    is_tuple: bool

    @property
    def deciding(self) -> torch.Tensor:
        """Return the first tensor that is sliced. In labels, its valid entries weight the slices."""
        return next(t for t, cut in zip(self.tensors, self.sliced, strict=True) if cut)

    @property
    def length(self) -> int:
        """Return L, the size of the sliced tensors in `dim`."""
        return int(self.deciding.size(self.dim))

    @property
    def rows(self) -> int:
        """Return the product of all dimensions but the sequence."""
        return self.deciding.numel() // max(self.length, 1)

    @classmethod
    def of_inputs(
        cls, inputs: Any, length: int, dim: int, sliced_inputs: Sequence[int] | None = None, is_whole: bool = False
    ) -> SliceableTensors:
        """Return the inputs. Tensors with the size `length` in `dim`, or the indices `sliced_inputs`, are sliced.

        With `is_whole` they go in one slice, and none of them needs the labels' length (images, for example).
        """
        tensors = as_tuple(inputs, "the inputs")
        if sliced_inputs is not None:
            sliced = _sliced_by_index(tensors, sliced_inputs, length, dim)
        else:
            sliced = tuple(_size(t, dim) == length for t in tensors)
        if not any(sliced) and not is_whole:
            raise BatchError(
                f"no input tensor has the sequence: the labels have length {length} in dimension {dim} "
                f"(terapipe.sequence_dim), the inputs have shapes {_shapes(tensors)}. Labels and inputs must have the "
                f"same length. {_NO_SEQUENCES}"
            )
        return cls(tensors, sliced, dim, not torch.is_tensor(inputs))

    @classmethod
    def of_labels(cls, labels: Any, dim: int) -> SliceableTensors:
        """Return the labels. The first that has `dim` gives the sequence length; tensors of this length are sliced."""
        # the labels decide how long the sequences are
        tensors = as_tuple(labels, "the labels")
        sizes = [_size(t, dim) for t in tensors]
        length = next((size for size in sizes if size is not None), None)
        if length is None:
            raise BatchError(
                f"no label tensor has dimension {dim} (terapipe.sequence_dim), so the sequence length is unknown; "
                f"label shapes: {_shapes(tensors)}. Give labels of shape [batch, sequence]. {_NO_SEQUENCES}"
            )
        return cls(tensors, tuple(size == length for size in sizes), dim, not torch.is_tensor(labels))

    def describe(self) -> str:
        """Say for a log which tensors are cut and which are not."""
        cut = [_named(i, t) for i, t in enumerate(self.tensors) if self.sliced[i]]
        whole = [_named(i, t) for i, t in enumerate(self.tensors) if not self.sliced[i]]
        told = f"cut in slices, in dimension {self.dim}: {', '.join(cut)}"
        return told + (f"; whole with each slice: {', '.join(whole)}" if whole else "")

    def to(self, device: torch.device) -> SliceableTensors:
        """Return the same tensors on `device`, detached."""
        return replace(self, tensors=tuple(t.detach().to(device, non_blocking=True) for t in self.tensors))

    def span(self, start: int, stop: int) -> Tensors:
        """Return tokens [start, stop): views of the sliced tensors, and the other tensors whole."""
        both = zip(self.tensors, self.sliced, strict=True)
        return tuple([t.narrow(self.dim, start, stop - start) if cut else t for t, cut in both])

    def stretched(self, length: int) -> SliceableTensors:
        """Return a copy with `length` tokens, cut off or repeated from the start, for measurements."""
        return self.picked(torch.arange(length, device="cpu") % self.length)

    def picked(self, tokens: torch.Tensor) -> SliceableTensors:
        """Return a copy with these tokens of all rows."""
        both = zip(self.tensors, self.sliced, strict=True)
        tensors = tuple(t.index_select(self.dim, tokens.to(t.device)) if cut else t.clone() for t, cut in both)
        return replace(self, tensors=tensors)

    def part(self, start: int, stop: int) -> Any:
        """Return copies of tokens [start, stop) in the user's form, whose code may call `view()`, or write to them."""
        tensors = tuple([t.clone(memory_format=torch.contiguous_format) for t in self.span(start, stop)])
        return tensors if self.is_tuple else tensors[0]


@dataclass(frozen=True)
class UncutLabels(SliceableTensors):
    """Hold labels in DeepSpeed's own order that have no dimension to cut: `loss_fn` gets them unchanged."""

    value: Any
    whole_length: int

    @property
    def length(self) -> int:
        return self.whole_length

    @property
    def rows(self) -> int:
        return 1

    def to(self, device: torch.device) -> UncutLabels:
        """Bring a tensor, or a tuple of them, to the device; nothing else moves, as in the stock engine."""
        if torch.is_tensor(self.value):
            return replace(self, value=self.value.detach().to(device, non_blocking=True))
        if isinstance(self.value, tuple) and all(torch.is_tensor(t) for t in self.value):
            return replace(self, value=tuple(t.detach().to(device, non_blocking=True) for t in self.value))
        return self

    def part(self, start: int, stop: int) -> Any:
        assert stop - start == self.whole_length, "the batch source refuses slices that were set by hand"
        return self.value


def _sliced_by_index(tensors: Tensors, indices: Sequence[int], length: int, dim: int) -> tuple[bool, ...]:
    for index in indices:
        what = f"terapipe.sliced_inputs names input {index}"
        if not 0 <= index < len(tensors):
            raise BatchError(
                f"{what}, but the batch has {many(len(tensors), 'input tensor')}: count from 0, or set null"
            )
        if _size(tensors[index], dim) != length:
            raise BatchError(
                f"{what} of shape {list(tensors[index].shape)}, which does not have the labels' length {length} in "
                f"dimension {dim} (terapipe.sequence_dim): leave {index} out"
            )
    return tuple(i in set(indices) for i in range(len(tensors)))


def check_sizes(inputs: SliceableTensors, length: int, rows: int) -> None:
    """Raise BatchError for inputs whose sizes alone do not tell whether they are cut.

    These are masks that have the sequence's length in two dimensions, and tensors whose numbers may belong to tokens or
    be features of the rows. `length` is the sequence length, `rows` is the number of label rows.
    """
    problems: dict[int, str] = {}
    for index, tensor in enumerate(inputs.tensors):
        # the number of rows may equal the number of tokens by chance, so that dimension does not decide
        sizes, row_dim = list(tensor.shape), 1 if inputs.dim == 0 else 0
        if len(sizes) > row_dim and sizes[row_dim] == length and rows % length == 0:  # as many rows as tokens
            del sizes[row_dim]
        if sizes.count(length) > 1:
            problems[index] = (
                f"{_named(index, tensor)} has the sequence's length {length} in two dimensions, as an attention mask "
                "has: slices need no mask, for sliced_attention is causal, so leave it out of the batch, or train "
                'whole sequences with terapipe "slices": 1'
            )
        elif inputs.sliced[index] and tensor.dim() == 2 and tensor.is_floating_point():
            problems[index] = (
                f"{_named(index, tensor)} has the labels' length {length} in dimension {inputs.dim} "
                "(terapipe.sequence_dim), but may hold features of each row as well as a number for each token"
            )
    if problems:
        raise BatchError(f"{'; '.join(problems.values())}. {_ways_out(inputs, list(problems))}")


def _ways_out(inputs: SliceableTensors, doubtful: Sequence[int]) -> str:
    """Say which config cuts the doubtful inputs, if they can be cut, and which config keeps them whole."""
    # without the doubtful inputs they go whole; with them they are cut
    cut = [index for index, is_cut in enumerate(inputs.sliced) if is_cut]
    sure = [index for index in cut if index not in doubtful]
    ways = [f"{sure} hands it whole to each slice"] if sure else []
    if cut != sure:
        ways.append(f"{cut} cuts it in dimension {inputs.dim} with the tokens")
    each = f" (of {doubtful}, each as it is meant)" if len(doubtful) > 1 else ""
    return f"To say what it is name the inputs to cut: terapipe.sliced_inputs = {' and '.join(ways)}{each}."
