"""Choose the data that the check compares: a few rows of the first batch, a window of tokens, two or three slices.

A check of whole sequences costs as much as several steps, and may need more memory than training in slices. A fault
usually shows at the first boundary between slices, so a short window with unequal slices reveals it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors

MOST_ROWS = 2
LEAST_TOKENS, MOST_TOKENS = 128, 1024  # of a window; a shorter sequence is compared whole
_SHARE = 8  # a window has at most 1 / _SHARE of the micro-batch's tokens, which a layer holds all at once
_MOST_SLICES = 3


@dataclass(frozen=True)
class Cut:
    """Choose a window of a micro-batch: `plan` slices its tokens from `start` on, in `rows` rows from `first_row`."""

    plan: SlicePlan
    of_tokens: int
    start: int = 0
    rows: int | None = None  # None: all
    of_rows: int = 1
    first_row: int = 0
    weights: tuple[float, ...] = ()  # of the slices' losses

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
        """Return where documents start in the window; its first token starts a document in each row."""
        if starts is None:
            return None
        stop, rows = self.start + self.plan.sequence_length, starts[self.first_row :][: self.rows]
        return tuple((0, *(s - self.start for s in row if self.start < s < stop)) for row in rows)


def cuttable(batch: SliceableTensors) -> tuple[int | None, bool]:
    """Return the number of rows, and whether tokens may be cut.

    The number is None if some tensor lacks the rows or the sequence. Tokens may be cut if no tensor has the sequence's
    length in another dimension.
    """
    dim = row_dim(batch)
    sizes = {t.size(dim) if t.dim() > dim else None for t in batch.tensors}
    rows = sizes.pop() if all(batch.sliced) and len(sizes) == 1 else None
    dims = {batch.dim} if rows is None else {batch.dim, dim}
    return rows, batch.length not in [size for t in batch.tensors for d, size in enumerate(t.shape) if d not in dims]


def row_dim(batch: SliceableTensors) -> int:
    """Return the dimension of the rows, if there are any."""
    return 0 if batch.dim else 1


def num_rows(batch: SliceableTensors) -> int:
    """Return how many rows the sequences have."""
    return batch.deciding.size(row_dim(batch)) if batch.deciding.dim() > 1 else 1


def unit_of(plan: SlicePlan) -> int:
    """Return the largest number that divides the starts of all slices."""
    return math.gcd(*plan.starts)


def window_plan(
    plan: SlicePlan, granularity: int, multiple: int, rows: int, micro_batches: int, stages: int, cut_rows: int
) -> SlicePlan:
    """Return two or three slices of a window of a sequence that is cut by `plan`.

    Layers may rely on a common divisor of the plan's lengths. The slices are multiples of one of its divisors, if
    possible of `granularity`, and always of `multiple`. A window of the whole sequence has the slices of `plan` if
    these are few. The window is so short that the check takes less time and memory than a step.
    """
    length, most = plan.sequence_length, min(MOST_TOKENS, MOST_ROWS * MOST_TOKENS // cut_rows)
    tokens = length * rows // cut_rows
    allowed = min(max(min(tokens // _SHARE, tokens * micro_batches // (4 * stages)), LEAST_TOKENS), most)
    # a layer may rely on slices of whole blocks, as the plan has them
    common = unit_of(plan)
    divisors = [n for n in range(multiple, allowed // _MOST_SLICES + 1, multiple) if common % n == 0]
    unit = max(divisors, key=lambda n: (n % granularity == 0, n), default=multiple)
    units, last = max(allowed // unit, _MOST_SLICES if _MOST_SLICES * unit <= most else 2), 0
    # a short enough sequence is compared whole
    if length <= max(allowed, units * unit):
        if plan.num_slices <= _MOST_SLICES:
            return plan
        units, last = divmod(length, unit)  # ends with the sequence
    # a layer that keeps something of the slice before alone needs long slices
    first, second = max(2, 3 * units // 10), max(1, min(units // 5, min(plan.lengths[:-1]) // unit))
    # starts share the unit alone
    first = next(count for count in itertools.count(first) if math.gcd(count, second) == 1)
    parts = [1] * units if units <= _MOST_SLICES else [first, second, units - first - second]
    return SlicePlan((*(part * unit for part in parts[:-1]), parts[-1] * unit + last))
