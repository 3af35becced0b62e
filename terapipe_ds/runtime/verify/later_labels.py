"""Compare the loss once more when a batch has ignored labels for the first time.

While every label counts, a mean over the valid labels and a mean over all tokens are the same number. The first batch
cannot tell then which one `loss_fn` is. Slices of a later batch may differ in how many of their labels count. The first
such batch is compared before it is trained on, with outputs that are kept from the first batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.loss import slice_counts, slice_weights
from terapipe_ds.runtime.verify.cut import Cut, choose_window, row_dim
from terapipe_ds.runtime.verify.layout import Layout, TokenDim
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.report import VerifyError
from terapipe_ds.runtime.verify.runner import Values
from terapipe_ds.runtime.verify.stage import Inputs

_TOKENS = 64  # of the outputs that are kept
_EVEN = 0.01  # with smaller differences between the slices' shares, rounding hides which mean it is


def is_even(weights: tuple[float, ...], plan: SlicePlan) -> bool:
    """Return whether the slices' losses weigh as their tokens do, in which case all reductions to a mean agree."""
    shares = (length / plan.sequence_length for length in plan.lengths)
    return all(abs(weight - share) <= _EVEN for weight, share in zip(weights, shares, strict=True))


class LaterLabels:
    """Compare the loss of slices with that of the whole once labels are ignored unevenly.

    Args:
        outputs: of the last layer on a cut of the first batch; a copy of its first tokens is kept.
        rows: how many the cut has; None means all rows of a micro-batch.
    """

    def __init__(
        self, outputs: Inputs, rows: int | None, loss_fn: Callable[[Any, Any], Any], config: TeraPipeConfig,
        part_id: int = 0,
    ) -> None:  # fmt: skip
        self._outputs = _first_tokens(outputs)
        self._rows, self._loss_fn, self._config, self._part_id = rows, loss_fn, config, part_id

    def compare(self, labels: SliceableTensors) -> bool:
        """Return whether the labels of a micro-batch told the reductions apart, and the loss agrees.

        Raises:
            VerifyError: the loss or its gradients differ.
        """
        ignored = labels.deciding == self._config.ignore_index
        cut = self._window(labels) if bool(ignored.any()) else None
        if cut is None:
            return False
        of_cut = cut.of(labels)
        weights = slice_weights(
            of_cut, cut.plan, loss_reduction="mean_valid", ignore_index=self._config.ignore_index
        )
        if is_even(weights, cut.plan):
            return False
        tensors = self._outputs.values.tensors
        reduction, ignore_index = self._config.loss_reduction, self._config.ignore_index
        check = LossCheck(
            self._loss_fn, of_cut.to(tensors[0].device), cut.plan, self._outputs.values, self._outputs.layouts,
            slice_weights(of_cut, cut.plan, loss_reduction=reduction, ignore_index=ignore_index), reduction,
            ignore_index, part_id=self._part_id,
        )  # fmt: skip
        with torch.enable_grad():
            differs = check.run()
        if differs is not None:
            raise VerifyError(
                f"labels are ignored for the first time (ignore_index {ignore_index}), and the slices' losses do not "
                f"give what loss_fn gives on the whole sequence: {differs[0]}: {differs[1]}"
            )
        return not check.skipped

    def _window(self, labels: SliceableTensors) -> Cut | None:
        """Return the window that shows most; None where the labels do not fit the outputs."""
        tokens = self._num_tokens()
        rows = labels.deciding.size(row_dim(labels)) if labels.deciding.dim() > row_dim(labels) else 1
        if labels.length < tokens or tokens < 2 or rows < (self._rows or 1) or not all(labels.sliced):
            return None
        if self._rows is None and rows != self._num_rows(labels):
            return None
        plan = SlicePlan((max(1, tokens // 3), tokens - max(1, tokens // 3)))
        counts = partial(slice_counts, ignore_index=self._config.ignore_index)
        row, start, _ = choose_window(labels, plan, self._rows, 1, self._config.ignore_index, counts)
        return Cut(plan, labels.length, start, row, self._rows, rows)

    def _num_tokens(self) -> int:
        return next(
            tensor.size(layout.dim)
            for tensor, layout in zip(self._outputs.values.tensors, self._outputs.layouts, strict=True)
            if isinstance(layout, TokenDim)
        )

    def _num_rows(self, labels: SliceableTensors) -> int:
        return next(
            tensor.size(1 - layout.dim)
            for tensor, layout in zip(self._outputs.values.tensors, self._outputs.layouts, strict=True)
            if isinstance(layout, TokenDim)
        )


def can_watch(layouts: list[Layout]) -> bool:
    """Return whether the dimension of tokens is known for such outputs, so that the first tokens can be kept."""
    tokens = [layout for layout in layouts if isinstance(layout, TokenDim)]
    return bool(tokens) and all(t.rows == 1 and t.shared_by == 1 and t.dim in (0, 1) for t in tokens)


def _first_tokens(outputs: Inputs) -> Inputs:
    tensors = [
        tensor.narrow(layout.dim, 0, min(_TOKENS, tensor.size(layout.dim))) if isinstance(layout, TokenDim) else tensor
        for tensor, layout in zip(outputs.values.tensors, outputs.layouts, strict=True)
    ]
    values = Values(tuple(tensor.detach().clone() for tensor in tensors), outputs.values.is_tuple)
    return Inputs(values, outputs.layouts)
