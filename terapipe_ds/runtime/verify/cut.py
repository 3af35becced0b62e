"""Choose what the check compares: a few rows of the first batch, a window of tokens, two or three slices of it.

A check of whole sequences costs as much as several steps, and may need memory that training in slices does not need. A
fault of slicing usually shows at the first boundary between slices, so a short window with unequal slices reveals it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors

MOST_ROWS = 2
LEAST_TOKENS, MOST_TOKENS = 128, 1024  # of a window; a sequence that is shorter is compared whole
_SHARE = 8  # a window has at most 1 / _SHARE of the micro-batch's tokens, which a layer holds all at once
_MOST_SLICES = 3
_ROW_PLACES, _TOKEN_PLACES, _CHANGES = 4, 32, 8  # how many rows, tokens and changes of masking are tried

Counts = Callable[[SliceableTensors, SlicePlan], Sequence[float]]  # how much the labels of each slice count


@dataclass(frozen=True)
class Cut:
    """Describe a window of a micro-batch: `plan` slices its tokens from `start` on, in `rows` rows from `row` on.

    Args:
        rows: their number; None means all rows.
        weights: those of its slices' losses.
        has_labels: whether any label of the window counts.
    """

    plan: SlicePlan
    of_tokens: int
    start: int = 0
    row: int = 0
    rows: int | None = None
    of_rows: int = 1
    weights: tuple[float, ...] = ()
    has_labels: bool = True

    def __str__(self) -> str:
        lengths = " + ".join(map(str, self.plan.lengths))
        slices = f"{self.plan.num_slices} slices" + (f" ({lengths})" if self.plan.num_slices <= _MOST_SLICES else "")
        if self.plan.sequence_length == self.of_tokens:
            tokens = f"of a sequence of {self.of_tokens} tokens"
        else:
            tokens = f"of tokens {self.start} to {self.start + self.plan.sequence_length} of {self.of_tokens}"
        return f"{slices} {tokens}" + ("" if self.rows is None else f" in {self.rows} of {self.of_rows} rows")

    def of(self, batch: SliceableTensors) -> SliceableTensors:
        """Return copies of the tensors of `batch`, limited to the window."""
        tensors = []
        for tensor, is_cut in zip(batch.tensors, batch.sliced, strict=True):
            if is_cut:
                tensor = tensor.narrow(batch.dim, self.start, self.plan.sequence_length)
            if self.rows is not None:
                tensor = tensor.narrow(row_dim(batch), self.row, self.rows)
            tensors.append(tensor.detach().clone())
        return SliceableTensors(tuple(tensors), batch.sliced, batch.dim, batch.is_tuple)


@dataclass(frozen=True)
class Cuttable:
    """Say what may be cut of the tensors of a batch.

    Args:
        rows: the number of rows, where all tensors have the same number and all have the sequence; else None.
        tokens: whether tokens may be cut, which is so where no tensor has the sequence's length in another dimension.
    """

    rows: int | None
    tokens: bool

    @classmethod
    def of(cls, batch: SliceableTensors) -> Cuttable:
        dim = row_dim(batch)
        sizes = {t.size(dim) if t.dim() > dim else None for t in batch.tensors}
        rows = sizes.pop() if all(batch.sliced) and len(sizes) == 1 else None
        known = {batch.dim} if rows is None else {batch.dim, dim}
        others = [size for t in batch.tensors for d, size in enumerate(t.shape) if d not in known]
        return cls(rows, batch.length not in others)

    def both(self, other: Cuttable) -> Cuttable:
        """Return what may be cut of both."""
        return Cuttable(self.rows if self.rows == other.rows else None, self.tokens and other.tokens)


def row_dim(batch: SliceableTensors) -> int:
    """Return the dimension of the rows, where there are any."""
    return 0 if batch.dim else 1


def unit_of(plan: SlicePlan, granularity: int, multiple: int, allowed: int, most: int) -> int:
    """Return the number of tokens that the lengths of a window's slices are multiples of: layers may count on it.

    It is what the lengths of the plan's slices have in common, where three such slices are `allowed`. Else it is their
    granularity, or the largest divisor of it of which two do not exceed `most` tokens.

    `multiple` is what layers need in any case. Slices that were listed or set by hand may have no more in common."""
    common = math.gcd(*(plan.span(i)[0] for i in range(1, plan.num_slices)))
    if common and common % multiple == 0 and _MOST_SLICES * common <= allowed:
        return common
    times = math.lcm(granularity, multiple) // multiple if common % math.lcm(granularity, multiple) == 0 else 1
    if _MOST_SLICES * times * multiple > most:
        fitting = (n for n in range(most // (2 * multiple), 0, -1) if times % n == 0)
        times = next(fitting, 1)
    return times * multiple


def window_plan(
    plan: SlicePlan, granularity: int, multiple: int, rows: int, micro_batches: int, stages: int, cut_rows: int
) -> tuple[SlicePlan, int]:
    """Return slices of a window of a sequence that is cut by `plan`, and the number that they are multiples of.

    There are three unequal slices where there is room, else two. Where the window is the whole sequence and `plan` has
    few slices, they are those of `plan`.

    Layers run forward and backward twice, or four times in half precision, stage after stage: a window has so few
    tokens that this takes no longer than a step, and that what one layer keeps of it is less than what the stage keeps
    of a micro-batch. Only two slices of `multiple` tokens may have more.
    """
    length = plan.sequence_length
    tokens = length * rows // cut_rows
    most = min(MOST_TOKENS, MOST_ROWS * MOST_TOKENS // cut_rows)
    share = min(tokens // _SHARE, tokens * micro_batches // (4 * stages))
    allowed = min(max(share, LEAST_TOKENS), most)
    unit = unit_of(plan, granularity, multiple, allowed, most)
    units, last = max(allowed // unit, _MOST_SLICES if _MOST_SLICES * unit <= most else 2), 0
    if length <= max(allowed, units * unit):
        if plan.num_slices <= _MOST_SLICES:
            return plan, unit
        units, last = divmod(length, unit)  # ends with the sequence
    first, second = max(2, 3 * units // 10), max(1, units // 5)
    parts = [1] * units if units <= _MOST_SLICES else [first, second, units - first - second]
    return SlicePlan((*(part * unit for part in parts[:-1]), parts[-1] * unit + last)), unit


def choose_window(
    labels: SliceableTensors, plan: SlicePlan, rows: int | None, unit: int, ignore_index: int, counts: Counts
) -> tuple[int, int, tuple[float, ...]]:
    """Return the first row and the first token of the best window, and how much the labels of its slices count.

    Prompts are often masked. A window in which no label counts shows nothing of the loss. A window in which all labels
    count cannot tell a mean over valid labels from a mean over all.
    """
    best: tuple[tuple[float, ...], int, int, tuple[float, ...]] | None = None
    for row, start in _windows(labels, plan, rows, unit, ignore_index):
        cut = Cut(plan, labels.length, start, row, rows)
        found = tuple(map(float, counts(cut.of(labels), plan)))
        worth = _worth(found, plan)
        if best is None or worth > best[0]:
            best = worth, row, start, found
    assert best is not None
    return best[1:]


def _windows(
    labels: SliceableTensors, plan: SlicePlan, rows: int | None, unit: int, ignore_index: int
) -> Iterator[tuple[int, int]]:
    """Yield places to try, in the order of the batch: some all over it, and some where masked labels begin or end."""
    last = labels.length - plan.sequence_length
    spread = [last * i // (_TOKEN_PLACES - 1) // unit * unit for i in range(_TOKEN_PLACES)]
    of_rows = labels.deciding.size(row_dim(labels)) if rows is not None else 0
    for row in range(0, of_rows - rows + 1, rows)[:_ROW_PLACES] if rows is not None else (0,):
        changes = [
            min(max(change - plan.sequence_length // 2, 0), last) // unit * unit
            for tensor, is_cut in zip(labels.tensors, labels.sliced, strict=True) if is_cut
            for change in _changes(_valid(tensor, labels, row, rows, ignore_index))[:_CHANGES]
        ]  # fmt: skip
        for start in sorted({*spread, *changes}):
            yield row, start


def _valid(tensor: Tensor, labels: SliceableTensors, row: int, rows: int | None, ignore_index: int) -> Tensor:
    """Return [tokens]: how many numbers of each token are neither masked nor, in a mask, zero."""
    if rows is not None:
        tensor = tensor.narrow(row_dim(labels), row, rows)
    valid = tensor.movedim(labels.dim, 0).flatten(1) if tensor.dim() > 1 else tensor[:, None]
    return ((valid != 0) if tensor.is_floating_point() or tensor.dtype == torch.bool else valid != ignore_index).sum(1)


def _changes(valid: Tensor) -> list[int]:
    return [int(i) + 1 for i in (valid[1:] != valid[:-1]).nonzero().flatten()[:_CHANGES]]


def _worth(counts: Sequence[float], plan: SlicePlan) -> tuple[float, ...]:
    """Return how much a window shows of the loss, as a tuple to compare: larger is better."""
    total = sum(counts)
    if total <= 0:
        return (0.0,)
    shares = [count / total for count in counts]
    uneven = max(
        abs(share - length / plan.sequence_length) for share, length in zip(shares, plan.lengths, strict=True)
    )
    covered = sum(count > 0 for count in counts)
    return min(covered, 2), uneven > 0.01, covered, uneven
