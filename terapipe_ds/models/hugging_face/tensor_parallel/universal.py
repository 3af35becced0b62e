"""Describe divided parameters for DeepSpeed's universal checkpoints, which hold every parameter whole."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as torch_dist
from deepspeed.checkpoint import constants
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import nn

from terapipe_ds.models.hugging_face.tensor_parallel.layers import is_share


def universal_checkpoint_info(module: nn.Module, grid: PipelineParallelGrid) -> dict[str, Any]:
    """Return DeepSpeed's description of the parameters of all stages. A collective over the pipeline."""
    maps = collect_autotp_universal_checkpoint_info(module).get(constants.AFFINE_MAP, {})
    known: dict[str, Any] = maps.get(constants.AFFINE_MAP_PARAMS, {})
    # DeepSpeed's converter refuses patterns that name nothing, and frozen parameters have no optimizer states
    trained = {rf"^{re.escape(name)}$": p for name, p in module.named_parameters() if p.requires_grad}
    here = {pattern: known[pattern] if is_share(p) else None for pattern, p in trained.items()}
    stages: list[dict[str, Any]] = [here] * grid.get_pipe_parallel_world_size()
    if len(stages) > 1:
        torch_dist.all_gather_object(stages, here, group=grid.get_pipe_parallel_group())
    layouts = {pattern: layout for stage in stages for pattern, layout in stage.items()}
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        # copies are equal but for rounding, and those that DeepSpeed calls replicated must be equal bit by bit
        constants.PARAMETER_TO_AVERAGE_PATTERNS: [pattern for pattern, layout in layouts.items() if layout is None],
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [p for p in layouts if p.startswith(r"^tied_modules\.")],
        constants.AFFINE_MAP: {
            constants.AFFINE_MAP_VERSION: maps.get(constants.AFFINE_MAP_VERSION, 1),
            constants.AFFINE_MAP_PARAMS: {p: layout for p, layout in layouts.items() if layout is not None},
        },
    }
