"""Gradients that tensor-parallel ranks share: what must be summed, and the check that nothing was forgotten."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from terapipe_ds.models.megatron.groups import sum_over_tensor_ranks

_LARGEST_DIFFERENCE = 1e-3  # relative; equal computations on equal ranks give equal numbers, forgotten sums differ by 1


class ReplicatedGradientError(RuntimeError):
    """Tensor-parallel ranks have different gradients for a parameter of which each keeps a copy."""


def mark_split_parameters(module: nn.Module) -> None:
    """Mark what is split over tensor-parallel ranks, as megatron-core does where it draws the weights (it forgets
    to with ``perform_initialization=False``). The gradient norm goes by these marks."""
    for layer in module.modules():
        if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            continue
        weight = layer.weight
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            dim = 1 if isinstance(layer, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def is_split(parameter: nn.Parameter) -> bool:
    """True where each tensor-parallel rank has a part of the parameter, False where each has a copy."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """The gradient that the optimizer will read: DeepSpeed keeps it in fp32 beside the parameter for bf16, or in an
    attribute of its own where the accumulation dtype differs."""
    for name in ("_hp_grad", "grad_accum"):
        gradient = getattr(parameter, name, None)
        if gradient is not None:
            return gradient
    return parameter.grad


def is_partial(name: str, parameter: nn.Parameter, config: TransformerConfig) -> bool:
    """True where a rank's gradient counts only its own tokens (sequence parallelism) or its own heads (query and key
    norms), so that the sum over tensor-parallel ranks is the gradient."""
    if is_split(parameter):
        return False
    if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
        return True
    return "q_layernorm." in name or "k_layernorm." in name


def sum_partial_gradients(module: nn.Module, config: TransformerConfig, group: Any) -> None:
    """Sum partial gradients over the tensor-parallel ranks, in place: once per batch, after its last backward."""
    partial = [p for name, p in module.named_parameters() if p.requires_grad and is_partial(name, p, config)]
    gradients = [gradient for gradient in map(gradient_of, partial) if gradient is not None]
    if gradients:
        sum_over_tensor_ranks(gradients, group)


def require_equal_replicas(module: nn.Module, group: Any) -> None:
    """Compare the gradients of replicated parameters over tensor-parallel ranks; a collective over ``group``.

    Raises:
        ReplicatedGradientError: on all of these ranks, with the parameters that differ.
    """
    replicated = {n: p for n, p in module.named_parameters() if p.requires_grad and not is_split(p)}
    if not replicated:
        return
    gradients = [gradient_of(p) for p in replicated.values()]
    device = next(iter(replicated.values())).device
    zero = torch.zeros((), dtype=torch.float32, device=device)
    rows = [zero if g is None else g.float().norm() for g in gradients]
    rows += [zero if g is None else g.float().sum() for g in gradients]
    mine = torch.stack(rows)
    everyone = [torch.empty_like(mine) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(everyone, mine, group=group)
    norms, sums = torch.stack(everyone).unflatten(1, (2, -1)).unbind(1)  # [ranks, parameters]
    scale = norms.amax(dim=0).clamp_min(1e-30)
    apart = ((norms - norms[0]).abs() + (sums - sums[0]).abs()) / scale
    # a sum of n numbers has an error of its own; what is not the same gradient differs by 1 for any n
    shares = [min(_LARGEST_DIFFERENCE * p.numel() ** 0.5, 0.1) for p in replicated.values()]
    limits = torch.tensor(shares, device=device)
    wrong = (apart.amax(dim=0) > limits).tolist()
    names = [name for name, is_wrong in zip(replicated, wrong, strict=True) if is_wrong]
    if names:
        raise ReplicatedGradientError(
            f"tensor-parallel ranks {torch_dist.get_process_group_ranks(group)} have different gradients for "
            f"{len(names)} of {len(replicated)} parameters of which each keeps a copy: {', '.join(names[:4])}"
            f"{' and more' if len(names) > 4 else ''}. Where a rank's gradient counts only its own tokens or heads, "
            "set parameter.sequence_parallel = True, so that it is summed; otherwise the ranks were given different "
            "samples or different random numbers for dropout (terapipe_ds.models.megatron.random.seed_dropout)"
        )
