"""A micro-batch as DeepSpeed's data iterator gives it, and its slices.

A batch is ``(inputs, labels)``, each a tensor or a tuple of tensors. The sequence length L is the size of the labels in
``sequence_dim``; a tensor is sliced where that dimension has size L, every other tensor goes whole with each slice.
Where the size alone may deceive, the batch is refused until the config names what to slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

_NO_SEQUENCES = (
    'Batches that are no sequences (images with a class each) train whole, with terapipe "slices": 1, '
    '"schedule": "1f1b".'
)


class BatchError(ValueError):
    """A batch that cannot be cut in token slices."""


def as_tuple(tensors: Any, what: str) -> Tensors:
    """A tensor or a list or tuple of tensors as a tuple. Raises BatchError for anything else."""
    if torch.is_tensor(tensors):
        return (tensors,)
    if isinstance(tensors, (tuple, list)) and tensors and all(torch.is_tensor(t) for t in tensors):
        return tuple(tensors)
    raise BatchError(f"{what} of a batch must be a tensor or a tuple of tensors, got {type(tensors).__name__}")


def shapes(tensors: Sequence[torch.Tensor]) -> str:
    """For messages: ``[2, 64], [2, 1, 64, 64]``."""
    return ", ".join(str(list(t.shape)) for t in tensors)


def has_length(tensor: torch.Tensor, dim: int, length: int) -> bool:
    """True where ``tensor`` has the dimension ``dim`` and its size there is ``length``."""
    return -tensor.dim() <= dim < tensor.dim() and tensor.size(dim) == length


def sequence_length(labels: Sequence[torch.Tensor], dim: int) -> int:
    """L: the size in ``dim`` of the first label tensor that has this dimension."""
    for tensor in labels:
        if -tensor.dim() <= dim < tensor.dim():
            return int(tensor.size(dim))
    raise BatchError(
        f"no label tensor has dimension {dim} (terapipe.sequence_dim), so the sequence length is unknown; label "
        f"shapes: {shapes(labels)}. Give labels of shape [batch, sequence]. {_NO_SEQUENCES}"
    )


def named(index: int, tensor: torch.Tensor) -> str:
    """For messages: ``input 1 (int64 [2, 64])``."""
    return f"input {index} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"


@dataclass(frozen=True)
class SliceableTensors:
    """The inputs or the labels of one micro-batch, on this rank.

    ``sliced[i]`` tells whether ``tensors[i]`` is cut along ``dim``; the others are handed whole to each slice.
    """

    tensors: Tensors
    sliced: tuple[bool, ...]
    dim: int
    is_tuple: bool

    @property
    def deciding(self) -> torch.Tensor:
        """The first tensor that is sliced; of labels, the one whose valid entries weight the slices."""
        return next(t for t, cut in zip(self.tensors, self.sliced, strict=True) if cut)

    @property
    def length(self) -> int:
        """L, the size of the sliced tensors in ``dim``."""
        return int(self.deciding.size(self.dim))

    @property
    def rows(self) -> int:
        """All dimensions but the sequence."""
        return self.deciding.numel() // max(self.length, 1)

    @classmethod
    def of_inputs(
        cls, inputs: Any, length: int, dim: int, sliced_inputs: Sequence[int] | None = None, is_whole: bool = False
    ) -> SliceableTensors:
        """The inputs; ``sliced_inputs`` names the indices to slice instead of finding them by size.

        ``is_whole``: they go in one slice, and none of them need have the labels' length (images, say).
        """
        tensors = as_tuple(inputs, "the inputs")
        if sliced_inputs is not None:
            sliced = _sliced_by_index(tensors, sliced_inputs, length, dim)
        else:
            sliced = tuple(has_length(t, dim, length) for t in tensors)
        if not any(sliced) and not is_whole:
            raise BatchError(
                f"no input tensor has the sequence: the labels have length {length} in dimension {dim} "
                f"(terapipe.sequence_dim), the inputs have shapes {shapes(tensors)}. Labels and inputs must have the "
                f"same length. {_NO_SEQUENCES}"
            )
        return cls(tensors, sliced, dim, not torch.is_tensor(inputs))

    @classmethod
    def of_labels(cls, labels: Any, dim: int) -> SliceableTensors:
        """The labels; those with the sequence length of the first one are sliced."""
        tensors = as_tuple(labels, "the labels")
        length = sequence_length(tensors, dim)
        return cls(tensors, tuple(has_length(t, dim, length) for t in tensors), dim, not torch.is_tensor(labels))

    def describe(self) -> str:
        """For a log: what is cut, and what is not."""
        cut = [named(i, t) for i, t in enumerate(self.tensors) if self.sliced[i]]
        whole = [named(i, t) for i, t in enumerate(self.tensors) if not self.sliced[i]]
        told = f"cut in slices, in dimension {self.dim}: {', '.join(cut)}"
        return told + (f"; whole with each slice: {', '.join(whole)}" if whole else "")

    def to(self, device: torch.device) -> SliceableTensors:
        """The same tensors on ``device``, detached."""
        moved = tuple(t.detach().to(device, non_blocking=True) for t in self.tensors)
        return SliceableTensors(moved, self.sliced, self.dim, self.is_tuple)

    def span(self, start: int, stop: int) -> Tensors:
        """Tokens [start, stop): views of the sliced tensors, the others whole."""
        return tuple(
            t.narrow(self.dim, start, stop - start) if cut else t
            for t, cut in zip(self.tensors, self.sliced, strict=True)
        )

    def stretched(self, length: int) -> SliceableTensors:
        """A copy with sequences of ``length`` tokens: cut off, or repeated from the start. For measurements."""
        places = torch.arange(length) % self.length
        tensors = tuple(
            t.index_select(self.dim, places.to(t.device)) if cut else t.clone()
            for t, cut in zip(self.tensors, self.sliced, strict=True)
        )
        return SliceableTensors(tensors, self.sliced, self.dim, self.is_tuple)

    def part(self, start: int, stop: int) -> Any:
        """Tokens [start, stop) for the user's code, which may call ``view()``: contiguous, and packed."""
        return self.packed(tuple(t.contiguous() for t in self.span(start, stop)))

    def packed(self, tensors: Tensors) -> Any:
        """``tensors`` in the form in which the user gave them: one tensor, or a tuple."""
        return tensors if self.is_tuple else tensors[0]


@dataclass(frozen=True)
class UncutLabels(SliceableTensors):
    """Labels in DeepSpeed's own order that have no dimension to cut: ``loss_fn`` gets them as they are."""

    value: Any
    whole_length: int

    @classmethod
    def of(cls, labels: Any, length: int) -> UncutLabels:
        """``length``: what a sequence of the inputs has."""
        return cls((), (), 0, False, labels, length)

    @property
    def length(self) -> int:
        return self.whole_length

    @property
    def rows(self) -> int:
        return 1

    def to(self, device: torch.device) -> UncutLabels:
        """Tensors without dimensions go to the device, one or a tuple of them; all else stays where it is, as in the
        stock engine."""
        if torch.is_tensor(self.value):
            return replace(self, value=self.value.detach().to(device))
        if isinstance(self.value, tuple) and all(torch.is_tensor(t) for t in self.value):
            return replace(self, value=tuple(t.detach().to(device) for t in self.value))
        return self

    def part(self, start: int, stop: int) -> Any:
        assert stop - start == self.whole_length, "the batch source refuses slices that were set by hand"
        return self.value


def _sliced_by_index(tensors: Tensors, indices: Sequence[int], length: int, dim: int) -> tuple[bool, ...]:
    for index in indices:
        if not 0 <= index < len(tensors):
            raise BatchError(
                f"terapipe.sliced_inputs names input {index}, but the batch has {len(tensors)} input tensors"
            )
        if not has_length(tensors[index], dim, length):
            raise BatchError(
                f"terapipe.sliced_inputs names input {index} of shape {list(tensors[index].shape)}, which does not "
                f"have the labels' length {length} in dimension {dim} (terapipe.sequence_dim)"
            )
    return tuple(i in set(indices) for i in range(len(tensors)))


def check_found(inputs: SliceableTensors, length: int, rows: int) -> None:
    """Refuse inputs that were found by their size alone, and need not be what the size suggests.

    Args:
        length: of the sequences, which are going to be cut.
        rows: of the labels, all of their dimensions but the sequence. A batch may have as many rows as tokens.

    Raises:
        BatchError: names a mask, or another input with the sequence's length in two dimensions; or numbers for the
            tokens that might be features of the rows as well.
    """
    problems: dict[int, str] = {}
    for index, tensor in enumerate(inputs.tensors):
        if _sizes_besides_rows(tensor, inputs.dim, length, rows).count(length) > 1:
            problems[index] = (
                f"{named(index, tensor)} has the sequence's length {length} in two dimensions, as an attention mask "
                "has: slices need no mask, for sliced_attention is causal, so leave it out of the batch, or train "
                'whole sequences with terapipe "slices": 1'
            )
        elif inputs.sliced[index] and tensor.dim() == 2 and tensor.is_floating_point():
            problems[index] = (
                f"{named(index, tensor)} has the labels' length {length} in dimension {inputs.dim} "
                "(terapipe.sequence_dim), but may hold features of each row as well as a number for each token"
            )
    if problems:
        raise BatchError(f"{'; '.join(problems.values())}. {_ways_out(inputs, list(problems))}")


def _sizes_besides_rows(tensor: torch.Tensor, dim: int, length: int, rows: int) -> list[int]:
    """All sizes, but for that of the rows in a batch that has as many rows as tokens."""
    sizes, row_dim = list(tensor.shape), 1 if dim == 0 else 0
    if len(sizes) > row_dim and sizes[row_dim] == length and rows % length == 0:
        del sizes[row_dim]
    return sizes


def _ways_out(inputs: SliceableTensors, doubtful: Sequence[int]) -> str:
    """What to write so that the doubtful inputs are cut, where they can be, and so that they are not."""
    cut = [index for index, is_cut in enumerate(inputs.sliced) if is_cut]
    sure = [index for index in cut if index not in doubtful]
    ways = [f"{sure} hands it whole to each slice"] if sure else []
    if cut != sure:
        ways.append(f"{cut} cuts it in dimension {inputs.dim} with the tokens")
    each = f" (of {doubtful}, each as it is meant)" if len(doubtful) > 1 else ""
    return f"To say what it is name the inputs to cut: terapipe.sliced_inputs = {' and '.join(ways)}{each}."
