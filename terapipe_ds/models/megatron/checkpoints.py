"""What DeepSpeed's ``ds_to_universal`` must know to put the parts of tensor-parallel ranks together.

A universal checkpoint holds every parameter and its Adam moments whole, under a name that no layout changes. DeepSpeed
(0.19.8) finds out from ``universal_checkpoint_info``, which it saves with the model, how the parts of a parameter make
the whole, and cuts the whole the same way for the ranks that load it. Parameters that no pattern names are
concatenated along dim 0; that is right for megatron-core's column-parallel weights, fused QKV included, whose query
groups lie one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch.distributed as torch_dist
from deepspeed.checkpoint import constants
from megatron.core.transformer import TransformerConfig
from torch import nn

from terapipe_ds.models.megatron.gradients import is_split
from terapipe_ds.models.megatron.layers import Blueprint

_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_GROUPED_EXPERTS = ("experts.weight1", "experts.weight2")
_GROUPED_REASON = (
    "the experts of one grouped weight lie between the parts of tensor-parallel ranks; build the experts one by one "
    "(moe_grouped_gemm=False)"
)
_ROW = constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
_GATED = constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
_VOCAB = constants.VOCABULARY_PARAMETER_PATTERNS
_AVERAGE = constants.PARAMETER_TO_AVERAGE_PATTERNS
_ONE_STAGE = constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS
_UNSUPPORTED = constants.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS


# what a checkpoint must agree on with the model that loads it: the engine compares them
_SIZES_KEY = "terapipe_model_sizes"
_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "gated_linear_unit", "normalization", "num_moe_experts",
)  # fmt: skip


def universal_checkpoint_info(module: nn.Module, blueprint: Blueprint, grid: Any) -> dict[str, Any]:
    """DeepSpeed's description of the parameters of all stages, to stand in ``module.universal_checkpoint_info``.

    DeepSpeed reads it from the file of one rank and asserts that each pattern matches something, so stages tell one
    another what they have: a collective over the pipeline.

    Args:
        module: this stage's layers, with their tensor-parallel marks.
        grid: DeepSpeed's ``PipelineParallelGrid``.
    """
    mine = {name: _kinds(name, p, blueprint.config) for name, p in module.named_parameters() if p.requires_grad}
    stages: list[dict[str, tuple[str, ...]]] = [mine]
    if grid.get_pipe_parallel_world_size() > 1:
        stages = [{} for _ in range(grid.get_pipe_parallel_world_size())]
        torch_dist.all_gather_object(stages, mine, group=grid.get_pipe_parallel_group())
    info: dict[str, Any] = {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        # nothing is stripped from the vocabulary: padded rows are part of the softmax
        constants.ORIGINAL_VOCAB_SIZE: blueprint.vocab_size,
        _SIZES_KEY: _sizes(blueprint),
    }
    for kind in (_ROW, _GATED, _VOCAB, _AVERAGE, _ONE_STAGE):
        info[kind] = _patterns(name for stage in stages for name, kinds in stage.items() if kind in kinds)
    if grid.get_slice_parallel_world_size() > 1:
        grouped = _patterns(name for stage in stages for name in stage if name.endswith(_GROUPED_EXPERTS))
        info[_UNSUPPORTED] = dict.fromkeys(grouped, _GROUPED_REASON)
    return info


def _sizes(blueprint: Blueprint) -> dict[str, Any]:
    return {
        **{name: getattr(blueprint.config, name) for name in _SIZES},
        "vocab_size": blueprint.vocab_size,
        "position_embedding_type": blueprint.position_embedding_type,
        "share_embeddings_and_output_weights": blueprint.share_embeddings_and_output_weights,
    }


def _kinds(name: str, parameter: nn.Parameter, config: TransformerConfig) -> tuple[str, ...]:
    """The keys of DeepSpeed's description that name the parameter."""
    kinds = [_ONE_STAGE] if name.startswith("tied_modules.") else []
    if not is_split(parameter):
        # copies that are equal but for rounding; the converter asserts that "replicated" ones are equal bit by bit
        return (*kinds, _AVERAGE)
    if name.endswith(_VOCABULARY):
        return (*kinds, _VOCAB)
    if getattr(parameter, "partition_dim", 0) == 1:
        return (*kinds, _ROW)
    if config.gated_linear_unit and "linear_fc1" in name.split("."):
        return (*kinds, _GATED)  # each rank has a part of the gate, then a part of the up projection
    return tuple(kinds)


def _patterns(names: Iterable[str]) -> list[str]:
    """Regular expressions for exactly these names in any layer (and any expert), so that deep models have few."""
    return sorted({
        r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")) + "$" for name in names
    })  # fmt: skip
