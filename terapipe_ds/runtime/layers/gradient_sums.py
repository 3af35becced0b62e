"""Add gradients to the sums of DeepSpeed's optimizers at once, without a gradient in `.grad` in between.

`BF16_Optimizer` takes each slice for a micro-batch: it zeroes `.grad` (2 bytes per parameter), autograd writes a
gradient (2) and adds it (6), the optimizer casts it to fp32 (6) and adds that (12): 28 bytes per parameter and slice.
Here the product that computes the gradient of a linear layer's weight adds to the sum (8 bytes), once for several
slices (`weight_gradients`). All other gradients are added in one call per slice, and `.grad` is empty before and after.
ZeRO-1 with gradients in another dtype than the parameters does the same with `grad_accum`.

Without such sums, gradients stay in `.grad`: fp16, and ZeRO-1 that accumulates in the dtype of the parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from terapipe_ds.runtime.layout.tied_and_copied import Gradients


def hooks_without_need(optimizer: object) -> int | None:
    """Return how many hooks an optimizer has on each parameter that need not run if a gradient comes to `.grad`.

    None: the optimizer is DeepSpeed's, and must learn of each gradient that does not go to its `GradientSums`.
    """
    if type(optimizer) in (FP16_Optimizer, FP16_UnfusedOptimizer) or not isinstance(optimizer, DeepSpeedOptimizer):
        return 0
    return 1 if _reduces_at_the_end(optimizer) and not optimizer.use_grad_accum_attribute else None


def _reduces_at_the_end(optimizer: Any) -> bool:
    """Return whether it is ZeRO-1, whose hooks do nothing but add gradients to `grad_accum`, if it has that."""
    return type(optimizer) is DeepSpeedZeroOptimizer and not (optimizer.cpu_offload or optimizer.overlap_comm)


_SMALL = 2**20  # numbers of a gradient: more fill a kernel of their own, and a copy of them would take memory


def _add_all(totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add each gradient to its total.

    For two dtypes `_foreach_add_` launches a kernel per gradient on CUDA; `_foreach_copy_` converts all of them in one.
    """
    each = range(len(totals))
    small = [i for i in each if totals[i].is_cuda and gradients[i].dtype != totals[i].dtype]
    small = [i for i in small if gradients[i].numel() <= _SMALL]
    if small:
        converted = [torch.empty_like(totals[i]) for i in small]
        torch._foreach_copy_(converted, [gradients[i] for i in small])
        torch._foreach_add_([totals[i] for i in small], converted)
    if rest := sorted({*each} - {*small}):
        torch._foreach_add_([totals[i] for i in rest], [gradients[i] for i in rest])


class GradientSums:
    """Add to the sums of one optimizer, by parameter."""

    def __init__(self, gradients: Gradients, parameters: Iterable[nn.Parameter], has_hooks: bool) -> None:
        self._gradients, self._has_hooks = gradients, has_hooks
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._lent: dict[int, nn.Parameter] = {}  # by the id of their stand-ins, while slices are measured
        self.taken_bytes = 0  # of gradients that `take` dropped; in training all of a backward wait for its end

    @staticmethod
    def of(optimizer: Any) -> GradientSums | None:
        """Return the sums of an optimizer that has them, and have it collect all gradients in `.grad` in one call."""
        if isinstance(optimizer, BF16_Optimizer):
            return _SumsOfBf16(optimizer) if optimizer.using_real_optimizer else None
        has_sums = _reduces_at_the_end(optimizer) and optimizer.use_grad_accum_attribute
        return _SumsOfZero1(optimizer) if has_sums else None

    def own_hooks(self, weight: Tensor) -> int:
        """Count the hooks of the optimizer, and `take`, among those that run after a gradient has come to `weight`."""
        return int(self._has_hooks or id(weight) in self._lent)

    def has(self, weight: Tensor) -> bool:
        """Return whether there is a sum for the gradients of `weight`."""
        return id(weight) in self._parameters or id(weight) in self._lent

    def so_far(self, parameter: Tensor) -> Tensor | None:
        """Return the sum of a parameter, None if it has no gradient in this step."""
        return self._gradients.present(parameter) if id(parameter) in self._parameters else None

    def add(self, weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
        """Add `rows^T inputs` to the sum of `weight`: [tokens, out] and [tokens, in] to [out, in].

        Inputs that are integers are the rows of `weight` to which `rows` are added. On CUDA the product has fp32
        results and adds to the sum in one pass. Elsewhere it is rounded first, like `.grad`.
        """
        total = self._total(weight)
        if len(rows) == 0:  # of a slice without labels; the optimizer knows now that there is a gradient
            return
        # do as much in one pass over the sum as the device can; where a program lets products add up in fp16, torch has
        # no product of fp16 with fp32 results
        adds_in_fp16 = rows.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
        if not inputs.is_floating_point():
            total.add_(torch.ops.aten.embedding_dense_backward(rows, inputs, len(weight), -1, False))
        elif total.dtype == rows.dtype:
            total.addmm_(rows.t(), inputs)
        elif rows.is_cuda and total.dtype == torch.float32 and not adds_in_fp16:
            torch.addmm(total, rows.t(), inputs, out_dtype=torch.float32, out=total)
        else:
            total.add_(rows.t() @ inputs)

    def add_rows(self, table: Tensor, start: int, rows: Tensor) -> None:
        """Add the gradient of some rows of a table, from `start` on."""
        self._total(table)[start : start + len(rows)].add_(rows)

    def add_bias(self, bias: Tensor, rows: Tensor) -> None:
        """Add the sum of `rows`, [tokens, out], to the sum of `bias`."""
        total = self._total(bias)
        total.add_(rows.sum(dim=0, dtype=total.dtype))

    def _total(self, parameter: Tensor) -> Tensor:
        """Return the sum of a parameter, which has a gradient in this step from now on."""
        return self._gradients.made(self._lent.get(id(parameter), parameter)).view(parameter.shape)

    @torch.no_grad()
    def collect(self, clear_lp_grads: bool = False) -> None:
        """Add all gradients that are in `.grad`, and empty it. This replaces `BF16_Optimizer.update_hp_grads`."""
        totals, gradients = [], []
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                totals.append(self._total(parameter))
                gradients.append(parameter.grad)
                parameter.grad = None
        _add_all(totals, gradients)

    @contextmanager
    def lent(self, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
        """Let backwards of stand-ins, by the id of their parameters, add to the sums. Zero the sums afterwards.

        It is for measurements between steps, when all sums are zero.
        """
        own = self._parameters
        self._lent = {id(stand_in): own[key] for key, stand_in in stand_ins.items() if key in own}
        try:
            yield
        finally:
            for parameter in self._lent.values():
                self._gradients.clear(parameter)
            self._lent = {}

    def take(self, stand_in: Tensor) -> None:
        """Add the gradient that has come to a stand-in, and drop it: a hook for gradients that `add` does not get."""
        if id(stand_in) in self._lent and stand_in.grad is not None:
            self._total(stand_in).add_(stand_in.grad)
            self.taken_bytes += stand_in.grad.nbytes
            stand_in.grad = None

    def begin(self) -> None:
        """Begin the sums of a training batch."""


class _SumsOfBf16(GradientSums):
    def __init__(self, optimizer: BF16_Optimizer) -> None:
        parameters = itertools.chain(*optimizer.bf16_groups)
        super().__init__(Gradients.of(optimizer), parameters, optimizer.immediate_grad_update)
        self._optimizer = optimizer
        if not optimizer.immediate_grad_update:  # otherwise hooks add each gradient when it arrives
            optimizer.update_hp_grads = self.collect
            # DeepSpeed clears gradients when a backward reaches the outputs of the layers. `collect` leaves none
            # behind, so it would clear only those that parameters of the loss have just got.
            optimizer.backward_prologue = lambda: None

    def begin(self) -> None:
        # a program may have run layers backwards since the last batch; DeepSpeed drops that too
        self._optimizer.clear_lp_grads(set_to_none=True)


class _SumsOfZero1(GradientSums):
    """Add to `grad_accum` of a parameter, which exists from its first gradient in a step to the reduction."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        super().__init__(Gradients.of(optimizer), itertools.chain(*optimizer.bit16_groups), has_hooks=True)
        optimizer.fill_grad_accum_attribute = self.collect
        # its hooks call this for each gradient, and would add that
        optimizer.process_gradients = lambda parameter, group: optimizer.setup_buckets()


class OwnSums(GradientSums):
    """Stand in for the fp32 sums of an optimizer, for measurements without one."""

    def __init__(self, module: nn.Module) -> None:
        trained = (p for p in module.parameters() if p.requires_grad)
        super().__init__(Gradients("grad_accum", torch.float32), trained, has_hooks=False)
