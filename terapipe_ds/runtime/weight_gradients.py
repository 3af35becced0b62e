"""Linear layers that add their weight gradient to ``.grad`` by the matrix product itself.

Autograd makes a gradient for each backward and then adds it to ``.grad``: with slices this happens once per slice, and
costs about three per cent of a step on a CPU. A product with ``beta=1`` reads and writes ``.grad`` once (the fused
accumulation of Megatron-LM, for plain torch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terapipe_ds.attention import active_slice


def accumulate_in_products(module: nn.Module, optimizer: Any) -> None:
    """Let the plain linear layers of ``module`` do so while slices run.

    Nothing changes where somebody else collects gradients, because nobody would be told of them: DeepSpeed's own
    optimizers for half precision and ZeRO do so by hooks on each parameter's accumulation.
    """
    if isinstance(optimizer, DeepSpeedOptimizer):
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = _forward_of(layer)  # type: ignore[assignment, method-assign]


def _forward_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        if _may_accumulate(inputs, layer.weight):
            return _Linear.apply(inputs, layer.weight, layer.bias)
        return F.linear(inputs, layer.weight, layer.bias)

    return forward


def _may_accumulate(inputs: Tensor, weight: Tensor) -> bool:
    """Sliced training in the dtype of the weight, whose gradient nobody watches."""
    active = active_slice()
    return (
        active is not None
        and not active.is_whole
        and torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf
        and inputs.dtype == weight.dtype
        and not torch.is_autocast_enabled(inputs.device.type)
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.weight = weight  # the saved one is another object, without .grad
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, _, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        inputs_grad = (rows @ weight).view(inputs.shape) if needs_inputs else None
        bias_grad = rows.sum(dim=0) if needs_bias else None
        return inputs_grad, _add_product(ctx.weight, rows, inputs.reshape(-1, inputs.shape[-1])), bias_grad


def _add_product(weight: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """``rows^T inputs``, added to ``weight.grad``; or returned for autograd, where there is none to add to."""
    total = weight.grad
    if total is None or total.dtype != rows.dtype or total.layout != torch.strided:
        return rows.t() @ inputs
    total.addmm_(rows.t(), inputs)
    return None
