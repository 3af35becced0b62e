"""Let weight gradients of megatron-core's linear layers wait for W, or for the gradients of other slices.

If a slice has a W of its own (zero bubble, Qi et al., arXiv 2401.10241), B computes the gradients of biases and, with
megatron-core's collectives, the gradients of the inputs, for which the earlier layers wait. Column-parallel layers sum
the latter over the tensor-parallel ranks, and cut the sum under sequence parallelism. W computes the weight gradient.
Otherwise the product of several slices follows the last one's B, or the product adds to the optimizer's sum in B.

Under sequence parallelism a column-parallel layer multiplies the tokens of all ranks, and each keeps its share of them:
megatron-core gathers them in the forward and once more in the backward. Here W gathers them, because other stages wait
for B. Keeping the gathered tokens would multiply their memory by the number of ranks.

Transformer Engine's linear layers compute all their gradients at once. If a slice has a W, or is a part of a sequence
whose weight gradients join or go to the optimizer's sums, the same layer runs by torch's operations on its own
parameters: the norm that some of them begin with, the product, the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as torch_dist
from megatron.core.extensions import transformer_engine
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terapipe_ds.attention import active_slice
from terapipe_ds.models.megatron.kernels import normed


class SplitBackwards(Protocol):
    """Declare the object that an engine passes to `defer_weight_gradients`: it runs W."""

    def splits_now(self) -> bool:
        """Return whether the slice that runs now has a W of its own."""

    def taker(self, inputs: Tensor, weight: Tensor) -> Callable[..., None] | None:
        """Return what takes `rows`, `inputs` and `gather` in a backward: the gradient is `rows^T gather(inputs)`."""


def split_backwards(module: nn.Module, gradients: SplitBackwards) -> None:
    """Let linear layers in `module`, itself included, leave weight gradients to W, except layers with own products."""
    for layer in module.modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and computes_as_megatron(layer):
            layer._forward_impl = functools.partial(_split_forward, layer, gradients)  # copies of the layer copy this
        elif transformer_engine.HAVE_TE and _computes_as_engine(layer):
            layer.forward = functools.partial(_engine_forward, layer, gradients)


def computes_as_megatron(layer: Any) -> bool:
    """Return whether a layer has the product of its class in megatron-core, or the one of this module."""
    replaced = vars(layer).get("_forward_impl")
    plain = (ColumnParallelLinear._forward_impl, RowParallelLinear._forward_impl)
    is_usual = replaced is None or getattr(replaced, "func", None) is _split_forward  # of an earlier engine
    return is_usual and type(layer)._forward_impl in plain


def _split_forward(
    layer: Any, gradients: SplitBackwards, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Be the `_forward_impl` of `layer`: its product with a weight that may be another layer's."""
    take = gradients.taker(input, weight)
    if take is None:
        return type(layer)._forward_impl(layer, input, weight, bias, **options)  # type: ignore[no-any-return]
    sums, shares = options.get("allreduce_dgrad", False), options.get("sequence_parallel", False)
    ranks = _Ranks(options.get("tp_group"), sums=sums, shares_tokens=shares)
    # no edge to the weight: B would call the weight's hooks without a gradient
    return _SplitLinear.apply(input, weight.detach(), bias, take, ranks)


def _computes_as_engine(layer: Any) -> bool:
    """Return whether Transformer Engine computes the layer as Megatron asks: in high precision, with one weight."""
    kinds = (transformer_engine.TELinear, transformer_engine.TELayerNormColumnParallelLinear)
    is_plain = isinstance(layer, kinds) and type(layer).forward in [kind.forward for kind in kinds]
    replaced = vars(layer).get("forward")
    # a precision of the layer's own, or parts of the weight as parameters of their own
    is_usual = is_plain and layer.te_quant_params is None and isinstance(getattr(layer, "weight", None), nn.Parameter)
    return is_usual and (replaced is None or getattr(replaced, "func", None) is _engine_forward)


def _engine_forward(layer: Any, gradients: SplitBackwards, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Run a layer of Transformer Engine: [T, B, in] -> [T, B, out], and a bias left to add."""
    weight, in_fp8 = layer.weight, transformer_engine.FP8GlobalStateManager.is_fp8_enabled()
    active = active_slice()
    # the layer's own kernels are faster, but write and add a gradient of the weight's size for each slice
    is_sliced = gradients.splits_now() or (active is not None and not active.is_whole)
    take = _taker(gradients, inputs, weight) if is_sliced and not in_fp8 else None
    if take is None:
        return type(layer).forward(layer, inputs)  # type: ignore[no-any-return]
    is_row = layer.parallel_mode == "row"
    # without tensor parallelism no rank has a part of anything
    group, shares = (layer.tp_group, layer.sequence_parallel) if layer.tp_size > 1 else (None, False)
    is_column = group is not None and not is_row
    ranks = _Ranks(group, sums=is_column and not shares, shares_tokens=is_column and shares)
    bias = layer.bias if layer.use_bias and not layer.te_return_bias else None
    is_late = is_row and group is not None  # the ranks' products are summed before a bias comes on top
    if hasattr(layer, "layer_norm_weight"):  # the norm with which some layers begin
        norm = layer.layer_norm_weight, layer.layer_norm_bias, layer.eps, layer.zero_centered_gamma
        inputs = normed(inputs, *norm)
    outputs = _SplitLinear.apply(inputs, weight.detach(), None if is_late else bias, take, ranks)
    if is_late:
        joined = reduce_scatter_to_sequence_parallel_region if shares else reduce_from_tensor_model_parallel_region
        outputs = joined(outputs, group)
        outputs = outputs if bias is None else outputs + bias
    return outputs, layer.bias if layer.te_return_bias else None


def _taker(gradients: SplitBackwards, inputs: Tensor, weight: Tensor) -> Callable[..., None] | None:
    """Return `gradients.taker`; in the first run of a checkpointed layer the second one's, for the same kernels."""
    active = active_slice()
    if torch.is_grad_enabled() or active is None or active.mode == "eval":
        return gradients.taker(inputs, weight)
    with torch.enable_grad():
        return gradients.taker(inputs.detach().requires_grad_(), weight)


class _Ranks(NamedTuple):
    """Do the joint work of a layer's tensor-parallel ranks."""

    group: Any  # None where nothing
    sums: bool  # each has a part of the gradients of the inputs
    shares_tokens: bool  # each has inputs of its share of the tokens, under sequence parallelism

    def gather(self, inputs: Tensor) -> Tensor:
        """Return the inputs of all tokens, [T, B, in], in megatron-core's buffer, until the next call."""
        if not self.shares_tokens:
            return inputs
        shape = (inputs.shape[0] * self.group.size(), *inputs.shape[1:])
        whole = get_global_memory_buffer().get_tensor(list(shape), inputs.dtype, "mpu")
        torch_dist.all_gather_into_tensor(whole, inputs.contiguous(), group=self.group)
        return whole

    def begin_sum(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """Return the gradient of this rank's inputs, and the work to wait for before it is complete."""
        if self.shares_tokens:
            share = gradient.new_empty((gradient.shape[0] // self.group.size(), *gradient.shape[1:]))
            return share, torch_dist.reduce_scatter_tensor(share, gradient, group=self.group, async_op=True)
        if self.sums:
            return gradient, torch_dist.all_reduce(gradient, group=self.group, async_op=True)
        return gradient, None


class _SplitLinear(torch.autograd.Function):
    """[T, B, in] -> [T, B, out]; inputs of T / tp tokens where the ranks share them."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, take: Callable[..., None], ranks: _Ranks
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.take, ctx.ranks = take, ranks
        outputs = torch.matmul(ranks.gather(inputs), weight.t())
        return outputs if bias is None else outputs + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, weight), ranks = ctx.saved_tensors, ctx.ranks
        rows = _rows(grad)
        whole = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        # the collective runs while the bias sums up
        inputs_grad, work = ranks.begin_sum(whole)
        bias_grad = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        if ranks.shares_tokens:
            ctx.take(rows, inputs, lambda own: _rows(ranks.gather(own)))
        else:
            ctx.take(rows, _rows(inputs))
        if work is not None:
            work.wait()
        return inputs_grad, None, bias_grad, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
