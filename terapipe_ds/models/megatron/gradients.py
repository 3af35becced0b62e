"""Say which gradients of megatron-core's layers the tensor-parallel ranks must sum, and which must be equal."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import nn

from terapipe_ds.models.rank_gradients import is_split, require_equal_gradients, sum_gradients

_ADVICE = (
    "Where a rank's gradient counts only its own tokens or heads, set parameter.sequence_parallel = True, so that it "
    "is summed; otherwise the ranks were given different samples or different random numbers for dropout "
    "(terapipe_ds.models.megatron.layers.seed_dropout)"
)


def is_partial(name: str, parameter: nn.Parameter, config: TransformerConfig) -> bool:
    """Return whether only the sum over tensor-parallel ranks is the gradient.

    A rank's share counts only its own tokens (sequence parallelism), or its own heads (query and key norms). The norms
    of latent attention come before the heads are cut.
    """
    if is_split(parameter):
        return False
    if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
        return True
    return not config.multi_latent_attention and ("q_layernorm." in name or "k_layernorm." in name)


def sum_partial_gradients(module: nn.Module, config: TransformerConfig, optimizer: Any, group: Any) -> None:
    """Sum partial gradients over the tensor-parallel ranks, in place: once per batch, after its last backward."""
    partial = {n: p for n, p in module.named_parameters() if p.requires_grad and is_partial(n, p, config)}
    sum_gradients(partial, optimizer, group)


def require_equal_replicas(module: nn.Module, optimizer: Any, group: Any) -> bool:
    """Compare the gradients of replicated parameters over tensor-parallel ranks; see `require_equal_gradients`."""
    replicated = {n: p for n, p in module.named_parameters() if p.requires_grad and not is_split(p)}
    return require_equal_gradients(replicated, optimizer, group, _ADVICE)
