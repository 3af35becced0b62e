"""Define the core attention of megatron-core's layers in token slices, and the layer specs that put it in place."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from terapipe_ds.attention import sliced_attention
from terapipe_ds.models.megatron.kernels import norm_class, uses_transformer_engine
from terapipe_ds.models.megatron.refusals import MegatronConfigError, window_of


class SlicedCoreAttention(MegatronModule):
    """Attend causally to the slice and its prefix with the heads of this rank, in place of `DotProductAttention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        # config.apply_query_key_layer_scaling divides the scores by the layer number before the softmax kernel and
        # multiplies them again inside it, against overflow in fp16; a fused kernel has its scores in fp32
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = window_of(config, layer_number)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            rank, ranks = (0, 1) if pg_collection is None else (pg_collection.tp.rank(), pg_collection.tp.size())
            self.softmax_offset = _sinks(config, rank, ranks)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        **others: Any,
    ) -> Tensor:
        """Take query and key [T, B, H, D], value [T, B, H_kv, D_v] of this rank's heads; return [T, B, H * D_v].

        Raises ValueError on a mask, a bias or packed sequences: causal attention is all that slices can do.
        """
        for name, argument in {"attention_mask": attention_mask, **others}.items():
            if argument is not None:
                raise ValueError(
                    f"{name} cannot be combined with token slices: attention is causal over the whole sequence, or "
                    f"each document of packed rows. Leave {name} out; documents are those of the position ids that "
                    "terapipe.documents names"
                )
        # Megatron has tokens first
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))  # [B, H, T, D]
        sinks: Tensor | None = self.softmax_offset
        if self.config.softmax_type == "off-by-one":  # 1 in the denominator
            sinks = q.new_zeros(q.shape[1])
        dropout_p = self.dropout_p if self.training else 0.0
        # tensor-parallel ranks need different dropout for their heads; with sequence parallelism all of it differs
        of_rank = dropout_p > 0.0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if of_rank else contextlib.nullcontext():
            out = sliced_attention(
                q, k, v, self.layer_number, self.scale, dropout_p=dropout_p, window=self.window, sinks=sinks
            )
        return out.permute(2, 0, 1, 3).flatten(2)


def _sinks(config: TransformerConfig, rank: int, ranks: int) -> nn.Parameter:
    """Return the logits of the sinks of this rank's heads, of all that `DotProductAttention` draws on one rank."""
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    of_all_heads = torch.empty(config.num_attention_heads, dtype=config.params_dtype, device=device)
    if config.perform_initialization:
        config.init_method(of_all_heads)
    sinks = nn.Parameter(of_all_heads.chunk(ranks)[rank].clone())
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def layer_specs(config: TransformerConfig, of_user: ModuleSpec | list[ModuleSpec] | None = None) -> list[ModuleSpec]:
    """Return one spec for each of the `config.num_layers` decoder layers, with sliced attention.

    `of_user` is the user's spec, for all layers or one for each; without it, the specs are megatron-core's, by
    `config.moe_layer_freq`. Raises MegatronConfigError on a wrong number of specs, or on layers whose attention cannot
    be replaced.
    """
    # megatron-core's own follow from the config: which layers have experts, whose kernels
    specs = [of_user] * config.num_layers if isinstance(of_user, ModuleSpec) else of_user
    if specs is None:
        specs = get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=uses_transformer_engine(config),
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
    # a TransformerBlockSubmodules has the layers of one stage
    held = f"has {len(specs)} specs" if isinstance(specs, (list, tuple)) else f"is of {_name(type(specs))}"
    if held != f"has {config.num_layers} specs":
        problem = f"transformer_layer_spec {held} for num_layers={config.num_layers} layers"
        raise MegatronConfigError(f"{problem}: give a list with one for each, or one for all")
    return [_with_sliced_attention(spec, config) for spec in specs]


def _with_sliced_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Return a copy of a `TransformerLayer`'s spec whose core attention is ours and whose norms this machine has."""
    wanted = MLASelfAttention if config.multi_latent_attention else SelfAttention
    if (problem := _problem_of_spec(spec, wanted)) is not None:
        fix = f"give the spec of a TransformerLayer with {wanted.__name__}, causal, and no cross attention"
        call = f"get_gpt_layer_local_spec({'multi_latent_attention=True' if wanted is MLASelfAttention else ''})"
        raise MegatronConfigError(f"transformer_layer_spec {problem}: {fix}, such as {call}")
    # the caller may build another model of the same spec
    spec = copy.deepcopy(spec)
    spec.submodules.self_attention.submodules.core_attention = SlicedCoreAttention
    for submodules in (spec.submodules, spec.submodules.self_attention.submodules):
        for name, value in vars(submodules).items():
            if value in (WrappedTorchNorm, FusedLayerNorm):  # Transformer Engine's, identities and L2 norms stay
                setattr(submodules, name, norm_class(config))
    return spec


def _problem_of_spec(spec: ModuleSpec, wanted: type) -> str | None:
    if not (isinstance(spec.module, type) and issubclass(spec.module, TransformerLayer)):
        return f"is of {_name(spec.module)}"
    attention = getattr(spec.submodules, "self_attention", None)
    kind = getattr(attention, "module", attention)
    if not (isinstance(attention, ModuleSpec) and isinstance(kind, type) and issubclass(kind, wanted)):
        return f"has the self_attention {_name(kind)}"
    if getattr(spec.submodules, "cross_attention", IdentityOp) is not IdentityOp:
        return "has cross_attention"
    # ours computes what these do, without settings of their own
    core = getattr(attention.submodules, "core_attention", None)
    core = core.module if isinstance(core, ModuleSpec) and not core.params else core
    if core not in (None, DotProductAttention, SlicedCoreAttention, transformer_engine.TEDotProductAttention):
        return f"has the core_attention {_name(core)}"
    if "causal" not in (mask := attention.params.get("attn_mask_type") or AttnMaskType.causal).name:
        return f"has attn_mask_type={mask}, which is not causal"
    return None


def _name(module: Any) -> str:
    return getattr(module, "__name__", str(module))
