"""megatron-core's layer specs with our attention in, and the kernels that this machine has."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer

from terapipe_ds import compat
from terapipe_ds.models.megatron.attention import SlicedCoreAttention
from terapipe_ds.models.megatron.cpu import on_cpu
from terapipe_ds.models.megatron.norms import TorchNorm
from terapipe_ds.models.megatron.refusals import MegatronConfigError


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


def layer_specs(config: TransformerConfig, given: ModuleSpec | list[ModuleSpec] | None = None) -> list[ModuleSpec]:
    """One spec for each of the ``config.num_layers`` decoder layers, with sliced attention.

    Args:
        given: the user's, for all layers or one for each. None: megatron-core's, dense or mixture of experts by
            ``config.moe_layer_freq``.

    Raises:
        MegatronConfigError: specs of another number, or of layers whose attention cannot be replaced.
    """
    specs = [given] * config.num_layers if isinstance(given, ModuleSpec) else given
    if specs is None:
        specs = get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=uses_transformer_engine(config),
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
    if len(specs) != config.num_layers:
        raise MegatronConfigError(
            f"transformer_layer_spec has {len(specs)} specs for num_layers={config.num_layers} layers: give one for "
            "each, or one for all"
        )
    return [with_sliced_attention(spec, config) for spec in specs]


def with_sliced_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """A copy of a ``TransformerLayer``'s spec whose core attention is ours and whose norms this machine has.

    Raises:
        MegatronConfigError: it is not the spec of a ``TransformerLayer`` with ``SelfAttention`` alone, whose core
            attention would see the whole sequence.
    """
    problem = _problem_of_spec(spec)
    if problem is not None:
        raise MegatronConfigError(
            f"transformer_layer_spec {problem}: give the spec of a TransformerLayer with SelfAttention and no cross "
            "attention, such as get_gpt_layer_local_spec()"
        )
    spec = copy.deepcopy(spec)
    spec.submodules.self_attention.submodules.core_attention = SlicedCoreAttention
    _replace_norms(spec.submodules, norm_class(config))
    _replace_norms(spec.submodules.self_attention.submodules, norm_class(config))
    return spec


def _problem_of_spec(spec: ModuleSpec) -> str | None:
    if not _is_kind(spec.module, TransformerLayer):
        return f"is of {_name(spec.module)}"
    attention = getattr(spec.submodules, "self_attention", None)
    if not isinstance(attention, ModuleSpec) or not _is_kind(attention.module, SelfAttention):
        return f"has the self_attention {_name(getattr(attention, 'module', attention))}"
    if getattr(spec.submodules, "cross_attention", IdentityOp) is not IdentityOp:
        return "has cross_attention"
    return None


def _is_kind(module: Any, kind: type) -> bool:
    return isinstance(module, type) and issubclass(module, kind)


def _name(module: Any) -> str:
    return getattr(module, "__name__", str(module))


def _replace_norms(submodules: Any, norm: type) -> None:
    """megatron-core's torch and apex norms by ``norm``; Transformer Engine's, identities and L2 norms stay."""
    for name, value in vars(submodules).items():
        if value in (WrappedTorchNorm, FusedLayerNorm):
            setattr(submodules, name, norm)
