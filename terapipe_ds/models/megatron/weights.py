"""Mark parameters that tensor-parallel ranks share, name partial gradients, and describe parameters for DeepSpeed.

A universal checkpoint holds every parameter and its Adam moments whole, under a name that no layout changes.
DeepSpeed (0.19.8) finds out from `universal_checkpoint_info`, which it saves with the model, how the parts of a
parameter make the whole, and cuts the whole the same way for the ranks that load it. Parameters that no pattern names
are concatenated along dim 0; that is right for megatron-core's column-parallel weights, fused QKV included, whose
query groups lie one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import nn

from terapipe_ds.models.megatron.layers import Blueprint
from terapipe_ds.models.rank_gradients import is_split, of_all_stages

_GROUPED_REASON = (
    "the experts of one grouped weight lie between the parts of tensor-parallel ranks; build the experts one by one "
    "(moe_grouped_gemm=False)"
)
_ROW = constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
_GATED = constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
_VOCAB = constants.VOCABULARY_PARAMETER_PATTERNS
_AVERAGE = constants.PARAMETER_TO_AVERAGE_PATTERNS
_ONE_STAGE = constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS

# a checkpoint must agree on these with the model that loads it: the engine compares them
_SIZES_KEY = "terapipe_model_sizes"
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
          "gated_linear_unit", "normalization", "num_moe_experts")  # fmt: skip
# left out if a model has none, so that checkpoints of models without them are read as before
_SIZES_OF_ATTENTION = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_MORE_SIZES = ("vocab_size", "position_embedding_type", "share_embeddings_and_output_weights")


def mark_split_parameters(module: nn.Module) -> None:
    """Mark parameters that are split over tensor-parallel ranks; the gradient norm reads these marks.

    megatron-core marks them where it draws the weights, but not with `perform_initialization=False`.
    """
    for layer in module.modules():
        if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            continue
        weight = layer.weight
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            dim = 1 if isinstance(layer, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def is_partial(name: str, parameter: nn.Parameter, config: TransformerConfig) -> bool:
    """Return whether only the sum over tensor-parallel ranks is the gradient.

    A rank's share counts only its own tokens (sequence parallelism), or its own heads (query and key norms). The norms
    of latent attention come before the heads are cut.
    """
    if is_split(parameter):
        return False
    if config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
        return True
    return not config.multi_latent_attention and not {"q_layernorm", "k_layernorm"}.isdisjoint(name.split("."))


def universal_checkpoint_info(module: nn.Module, blueprint: Blueprint, grid: PipelineParallelGrid) -> dict[str, Any]:
    """Return DeepSpeed's description of the parameters of all stages. A collective over the pipeline.

    DeepSpeed reads it from the file of one rank and asserts that each pattern matches something.
    """
    # a rank knows its own stage; the description covers the whole model
    here = {name: _kinds(name, p, blueprint.config) for name, p in module.named_parameters() if p.requires_grad}
    kinds_of = of_all_stages(here, grid)
    sizes = {name: getattr(blueprint.config, name) for name in _SIZES}
    if blueprint.config.multi_latent_attention:
        sizes |= {name: getattr(blueprint.config, name) for name in _SIZES_OF_ATTENTION}
    if blueprint.config.softmax_type != "vanilla":
        sizes["softmax_type"] = blueprint.config.softmax_type
    info: dict[str, Any] = {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        # nothing is stripped from the vocabulary: padded rows are part of the softmax
        constants.ORIGINAL_VOCAB_SIZE: blueprint.vocab_size,
        _SIZES_KEY: sizes | {name: getattr(blueprint, name) for name in _MORE_SIZES},
    }
    for kind in (_ROW, _GATED, _VOCAB, _AVERAGE, _ONE_STAGE):
        info[kind] = _patterns(name for name, kinds in kinds_of.items() if kind in kinds)
    # alone a rank has all experts, in order
    if grid.get_slice_parallel_world_size() > 1:
        grouped = _patterns(name for name in kinds_of if name.endswith(("experts.weight1", "experts.weight2")))
        info[constants.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS] = dict.fromkeys(grouped, _GROUPED_REASON)
    return info


def _kinds(name: str, parameter: nn.Parameter, config: TransformerConfig) -> list[str]:
    """Return the keys of DeepSpeed's description that name the parameter."""
    kinds = [_ONE_STAGE] if name.startswith("tied_modules.") else []
    if not is_split(parameter):
        # copies that are equal but for rounding; the converter asserts that "replicated" ones are equal bit by bit
        kinds.append(_AVERAGE)
    elif name.endswith(("word_embeddings.weight", "output_layer.weight")):
        kinds.append(_VOCAB)
    elif getattr(parameter, "partition_dim", 0) == 1:
        kinds.append(_ROW)
    elif config.gated_linear_unit and "linear_fc1" in name.split("."):
        kinds.append(_GATED)  # each rank has a part of the gate, then a part of the up projection
    return kinds


def _patterns(names: Iterable[str]) -> list[str]:
    """Return regular expressions for these names in any layer (and any expert), so that deep models have few."""
    split = (name.split(".") for name in names)
    return sorted(
        {r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts) + "$" for parts in split}
    )
