"""megatron-core's multi-latent attention, with rotary positions of the slice and whole gradients of its keys.

`MLASelfAttention` computes its own rotary positions, from 0 on, and each of its heads reads the one rotary part of the
keys. Both are mended by hooks; all else is megatron-core's code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as torch_dist
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terapipe_ds.models.positions import first_position


def begin_at_slices(layer: nn.Module, tensor_parallel: Any) -> None:
    """Have latent attention in a layer begin its positions at the active slice, on any number of ranks."""
    for attention in layer.modules():
        if not isinstance(attention, MLASelfAttention):
            continue
        attention.rotary_pos_emb.register_forward_pre_hook(_from_slice_start, with_kwargs=True)
        if tensor_parallel.size() > 1:
            sizes = [attention.config.kv_lora_rank, attention.config.qk_pos_emb_head_dim]
            shares_tokens = attention.config.sequence_parallel
            hook = functools.partial(_whole_latents, sizes=sizes, shares_tokens=shares_tokens, group=tensor_parallel)
            attention.linear_kv_down_proj.register_forward_hook(hook)


def _from_slice_start(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**options, "offset": first_position()}


def _whole_latents(
    module: nn.Module, args: Any, result: Any, *, sizes: list[int], shares_tokens: bool, group: Any
) -> tuple[Tensor, Any]:
    """Return the latents and the rotary keys whole, so that the keys' gradients of all ranks' heads are summed.

    megatron-core 0.16.1 gathers the parts of a column-parallel projection itself. It hands a rank back the gradient of
    its part, which counts the rank's own heads where the keys are concerned. Under sequence parallelism it sums
    them where the projection returns a rank's tokens whole.
    """
    both, bias = result
    if both.shape[-1] != sum(sizes):
        both = gather_from_tensor_model_parallel_region(both, group)
        if shares_tokens:
            both = scatter_to_sequence_parallel_region(both, group)
    if not shares_tokens:
        latents, keys = both.split(sizes, dim=-1)
        both = torch.cat([latents, _GradientOfAllHeads.apply(keys, group)], dim=-1)
    return both, bias


class _GradientOfAllHeads(torch.autograd.Function):
    """Sums gradients over ranks. megatron-core's function for it loses the sum where a gradient is not contiguous."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return keys.view_as(keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch_dist.all_reduce(total, group=ctx.group)
        return total, None
