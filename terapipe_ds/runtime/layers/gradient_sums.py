"""Add gradients to the fp32 sums of DeepSpeed's `BF16_Optimizer` at once, without a gradient in `.grad` in between.

DeepSpeed takes each slice for a micro-batch: it zeroes `.grad` (2 bytes per parameter), autograd writes a gradient (2)
and adds it (6), the optimizer casts it to fp32 (6) and adds that (12): 28 bytes per parameter and slice. Here the
product that computes the gradient of a linear layer's weight adds to the sum (8 bytes). All other gradients are added
in one call per slice, and `.grad` is empty before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

_Place = tuple[int, int]  # of a parameter in the optimizer: its group, and its number there


def _clear_nothing() -> None:
    """Stand in for `BF16_Optimizer.backward_prologue`."""


class GradientSums:
    """Add to the sums of one optimizer, by parameter."""

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        self._optimizer = optimizer
        groups = enumerate(optimizer.bf16_groups)
        self._parameters = [(parameter, (i, j)) for i, group in groups for j, parameter in enumerate(group)]
        self._places = {id(parameter): place for parameter, place in self._parameters}
        self._lent: dict[int, _Place] = {}  # of stand-ins for parameters, while slices are measured

    @staticmethod
    def of(optimizer: object) -> GradientSums | None:
        """Return the sums of an optimizer that has them, and have it collect all gradients in `.grad` in one call.

        None for any other optimizer, and if DeepSpeed corrects each gradient by itself (expert folding).
        """
        if not isinstance(optimizer, BF16_Optimizer) or not optimizer.using_real_optimizer:
            return None
        if getattr(optimizer, "autoep_folding_tp_group", None) is not None:
            return None
        sums = GradientSums(optimizer)
        if not optimizer.immediate_grad_update:  # otherwise hooks add each gradient when it arrives
            optimizer.update_hp_grads = sums.collect
            # DeepSpeed clears gradients when a backward reaches the outputs of the layers. `collect` leaves none
            # behind, so it would clear only those that parameters of the loss have just got.
            optimizer.backward_prologue = _clear_nothing
        return sums

    def own_hooks(self, weight: Tensor) -> int:
        """Count the hooks of the optimizer, and `take`, among those that run after a gradient has come to `weight`."""
        return int(self._optimizer.immediate_grad_update or id(weight) in self._lent)

    def has(self, weight: Tensor) -> bool:
        """Return whether there is a sum for the gradients of `weight`."""
        return id(weight) in self._places or id(weight) in self._lent

    def add(self, weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
        """Add `rows^T inputs` to the sum of `weight`: [tokens, out] and [tokens, in] to [out, in].

        On CUDA the product has fp32 results and adds to the sum in one pass. Elsewhere it is rounded first, like
        `.grad`.
        """
        total = self._total(weight)
        # do as much in one pass over the sum as the device can
        if total.dtype == rows.dtype:
            total.addmm_(rows.t(), inputs)
        elif rows.is_cuda and total.dtype == torch.float32:
            torch.addmm(total, rows.t(), inputs, out_dtype=torch.float32, out=total)
        else:
            total.add_(rows.t() @ inputs)

    def add_rows(self, table: Tensor, start: int, rows: Tensor) -> None:
        """Add the gradient of some rows of a table, from `start` on."""
        self._total(table)[start : start + len(rows)].add_(rows)

    def _total(self, weight: Tensor) -> Tensor:
        place = self._lent.get(id(weight))
        if place is None:
            place = self._mark(weight, self._places[id(weight)])
        return self._sum(place).view(weight.shape)

    @torch.no_grad()
    def collect(self, clear_lp_grads: bool = False) -> None:
        """Add all gradients that are in `.grad`, and empty it. This replaces `BF16_Optimizer.update_hp_grads`."""
        totals, gradients = [], []
        # one call for all: a kernel per parameter would wait for the host
        for parameter, place in self._parameters:
            if parameter.grad is not None:
                totals.append(self._sum(self._mark(parameter, place)).view_as(parameter))
                gradients.append(parameter.grad)
                parameter.grad = None
        if totals:
            torch._foreach_add_(totals, gradients)

    @contextmanager
    def lent(self, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
        """Let backwards of stand-ins, by the id of their parameters, add to the sums. Zero the sums afterwards.

        It is for measurements between steps, when all sums are zero.
        """
        self._lent = {id(stand_in): self._places[key] for key, stand_in in stand_ins.items() if key in self._places}
        try:
            yield
        finally:
            for place in self._lent.values():
                self._sum(place).zero_()
            self._lent = {}

    def take(self, stand_in: Tensor) -> None:
        """Add the gradient that has come to a stand-in, and drop it: a hook for gradients that `add` does not get."""
        place = self._lent.get(id(stand_in))
        if place is not None and stand_in.grad is not None:
            self._sum(place).view_as(stand_in).add_(stand_in.grad)
            stand_in.grad = None

    def _sum(self, place: _Place) -> Tensor:
        group, number = place
        total: Tensor = self._optimizer.fp32_groups_gradients[group][number]
        return total

    def _mark(self, parameter: Any, place: _Place) -> _Place:
        """Tell the optimizer that the parameter has a gradient in this step."""
        group, number = place
        has_gradients = self._optimizer.fp32_groups_has_gradients[group]
        # DeepSpeed leaves out parameters that had no gradient
        if not has_gradients[number]:
            has_gradients[number], parameter._hp_grad = True, self._sum(place)
        return place
