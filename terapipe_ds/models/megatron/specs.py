"""megatron-core's layer specs with our attention in, and the kernels that this machine has."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from terapipe_ds import compat
from terapipe_ds.models.megatron.attention import SlicedCoreAttention
from terapipe_ds.models.megatron.cpu import on_cpu
from terapipe_ds.models.megatron.norms import TorchNorm


def uses_transformer_engine(config: TransformerConfig) -> bool:
    """True where the config asks for Transformer Engine's layers and they can run: installed, and on a GPU."""
    return config.transformer_impl == "transformer_engine" and not on_cpu() and compat.has_transformer_engine()


def norm_class(config: TransformerConfig) -> type:
    """The norm for a layer, the final norm included: Transformer Engine's, NVIDIA apex's or torch's."""
    if uses_transformer_engine(config):
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    # megatron-core takes any package of the name apex for NVIDIA's, hence the question is asked here
    if config.normalization == "LayerNorm" and not on_cpu() and compat.has_apex():
        return FusedLayerNorm
    return TorchNorm


def kernels(config: TransformerConfig) -> str:
    """For the log: what the layers are made of, which the config alone does not decide."""
    layers = "Transformer Engine's" if uses_transformer_engine(config) else "megatron-core's own"
    wanted = config.transformer_impl == "transformer_engine" and not uses_transformer_engine(config)
    why = " (Transformer Engine needs a GPU)" if on_cpu() else " (Transformer Engine is not installed)"
    return f"decoder layers: {layers}{why if wanted else ''}, norms: {norm_class(config).__name__}"


def layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """One spec for each of the ``config.num_layers`` decoder layers, dense or mixture of experts by
    ``config.moe_layer_freq``."""
    engine = uses_transformer_engine(config)
    specs = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=engine, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    return [with_sliced_attention(spec, config) for spec in specs]


def with_sliced_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """A copy of a ``TransformerLayer``'s spec whose core attention is ours and whose norms this machine has.

    Raises:
        ValueError: the spec has no ``self_attention`` with a ``core_attention`` to replace.
    """
    attention = getattr(getattr(spec.submodules, "self_attention", None), "submodules", None)
    if not hasattr(attention, "core_attention"):
        raise ValueError(
            f"the layer spec {spec} has no self_attention.submodules.core_attention: give the spec of a "
            "TransformerLayer with self-attention"
        )
    spec = copy.deepcopy(spec)
    spec.submodules.self_attention.submodules.core_attention = SlicedCoreAttention
    _replace_norms(spec.submodules, norm_class(config))
    _replace_norms(spec.submodules.self_attention.submodules, norm_class(config))
    return spec


def _replace_norms(submodules: Any, norm: type) -> None:
    """megatron-core's torch and apex norms by ``norm``; Transformer Engine's, identities and L2 norms stay."""
    for name, value in vars(submodules).items():
        if value in (WrappedTorchNorm, FusedLayerNorm):
            setattr(submodules, name, norm)
