"""Choose what the check compares: a few rows of the first batch, a window of tokens, two or three slices of it.

A check of whole sequences costs as much as several steps, and may need more memory than training in slices. A fault
usually shows at the first boundary between slices, so a short window with unequal slices reveals it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from terapipe_ds.attention.documents import Starts
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.loss import slice_counts

MOST_ROWS = 2
LEAST_TOKENS, MOST_TOKENS = 128, 1024  # of a window; a sequence that is shorter is compared whole
_SHARE = 8  # a window has at most 1 / _SHARE of the micro-batch's tokens, which a layer holds all at once
_MOST_SLICES = 3
_PLACES = 32  # how many tokens are tried, and around how many changes of masking


@dataclass(frozen=True)
class Cut:
    """Choose a window of a micro-batch: `plan` slices its tokens from `start` on, in its first `rows` rows."""

    plan: SlicePlan
    of_tokens: int
    start: int = 0
    rows: int | None = None  # None: all
    of_rows: int = 1
    first_row: int = 0
    weights: tuple[float, ...] = ()  # of the slices' losses
    has_labels: bool = True  # some label of the window counts

    def __str__(self) -> str:
        lengths = " + ".join(map(str, self.plan.lengths))
        slices = f"{self.plan.num_slices} slices" + (f" ({lengths})" if self.plan.num_slices <= _MOST_SLICES else "")
        tokens = f"a sequence of {self.of_tokens} tokens"
        if self.plan.sequence_length < self.of_tokens:
            tokens = f"tokens {self.start} to {self.start + self.plan.sequence_length} of {self.of_tokens}"
        return f"{slices} of {tokens}" + ("" if self.rows is None else f" in {self.rows} of {self.of_rows} rows")

    def of(self, batch: SliceableTensors) -> SliceableTensors:
        """Return copies of the tensors of `batch`, limited to the window."""
        tensors = []
        for tensor, is_cut in zip(batch.tensors, batch.sliced, strict=True):
            if is_cut:
                tensor = tensor.narrow(batch.dim, self.start, self.plan.sequence_length)
            if self.rows is not None:
                tensor = tensor.narrow(row_dim(batch), self.first_row, self.rows)
            tensors.append(tensor.detach().clone())
        return replace(batch, tensors=tuple(tensors))

    def of_starts(self, starts: Starts | None) -> Starts | None:
        """Return where documents start in the window; its first token starts one in each row."""
        if starts is None:
            return None
        stop = self.start + self.plan.sequence_length
        return tuple((0, *(s - self.start for s in row if self.start < s < stop)) for row in starts[: self.rows])


def cuttable(batch: SliceableTensors) -> tuple[int | None, bool]:
    """Return the number of rows, and whether tokens may be cut.

    The number is None where some tensor lacks the rows or the sequence. Tokens may be cut where no tensor has the
    sequence's length in another dimension.
    """
    dim = row_dim(batch)
    sizes = {t.size(dim) if t.dim() > dim else None for t in batch.tensors}
    rows = sizes.pop() if all(batch.sliced) and len(sizes) == 1 else None
    dims = {batch.dim} if rows is None else {batch.dim, dim}
    return rows, batch.length not in [size for t in batch.tensors for d, size in enumerate(t.shape) if d not in dims]


def row_dim(batch: SliceableTensors) -> int:
    """Return the dimension of the rows, where there are any."""
    return 0 if batch.dim else 1


def num_rows(batch: SliceableTensors) -> int:
    """Return how many rows the sequences have."""
    return batch.deciding.size(row_dim(batch)) if batch.deciding.dim() > 1 else 1


def window_plan(
    plan: SlicePlan, granularity: int, multiple: int, rows: int, micro_batches: int, stages: int, cut_rows: int
) -> tuple[SlicePlan, int]:
    """Return two or three slices of a window of a sequence that is cut by `plan`, and what they are multiples of.

    Layers may rely on a common divisor of the plan's lengths. The slices are multiples of one of its divisors, if
    possible of `granularity`, and always of `multiple`. A window of the whole sequence has the slices of `plan` where
    these are few. The window is so short that the check takes less time and memory than a step.
    """
    length, most = plan.sequence_length, min(MOST_TOKENS, MOST_ROWS * MOST_TOKENS // cut_rows)
    tokens = length * rows // cut_rows
    allowed = min(max(min(tokens // _SHARE, tokens * micro_batches // (4 * stages)), LEAST_TOKENS), most)
    common = math.gcd(*(plan.span(i)[0] for i in range(1, plan.num_slices)))
    divisors = [n for n in range(multiple, allowed // _MOST_SLICES + 1, multiple) if common % n == 0]
    unit = max(divisors, key=lambda n: (n % granularity == 0, n), default=multiple)
    units, last = max(allowed // unit, _MOST_SLICES if _MOST_SLICES * unit <= most else 2), 0
    if length <= max(allowed, units * unit):
        if plan.num_slices <= _MOST_SLICES:
            return plan, unit
        units, last = divmod(length, unit)  # ends with the sequence
    first, second = max(2, 3 * units // 10), max(1, units // 5)
    parts = [1] * units if units <= _MOST_SLICES else [first, second, units - first - second]
    return SlicePlan((*(part * unit for part in parts[:-1]), parts[-1] * unit + last)), unit


def choose_window(
    cut: Cut, labels: SliceableTensors, unit: int, ignore_index: int, slice_weight: Callable[[Any], Any] | None = None
) -> Cut:
    """Return the window like `cut` that shows most of the loss; it begins at a multiple of `unit`.

    Where no label counts (prompts are often masked), a window shows nothing of the loss. Where all labels count, it
    cannot tell a mean over valid labels from a mean over all.
    """

    def worth(window: Cut) -> tuple[float, float]:
        counts = slice_counts(window.of(labels), cut.plan, ignore_index, slice_weight)
        shares = zip(counts, cut.plan.lengths, strict=True)
        total = max(sum(counts), 1e-9)
        uneven = max(abs(count / total - length / cut.plan.sequence_length) for count, length in shares)
        return min(sum(count > 0 for count in counts), 2), uneven

    last, half = labels.length - cut.plan.sequence_length, cut.plan.sequence_length // 2
    everything = replace(cut, plan=SlicePlan((labels.length,)), start=0).of(labels)
    starts = [last * i // (_PLACES - 1) for i in range(_PLACES)]
    starts += [min(max(change - half, 0), last) for change in _changes(everything, ignore_index)]
    return max((replace(cut, start=start) for start in sorted({start // unit * unit for start in starts})), key=worth)


def _changes(labels: SliceableTensors, ignore_index: int) -> list[int]:
    """Return the first tokens of which more or fewer numbers than before are masked (in a mask: are zero)."""
    changes: list[int] = []
    for tensor in itertools.compress(labels.tensors, labels.sliced):
        is_mask = tensor.is_floating_point() or tensor.dtype == torch.bool
        valid = (tensor != (0 if is_mask else ignore_index)).movedim(labels.dim, 0).reshape(labels.length, -1).sum(1)
        changes += [int(i) + 1 for i in (valid[1:] != valid[:-1]).nonzero().flatten()[:_PLACES]]
    return changes
