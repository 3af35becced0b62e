"""Describe divided parameters for DeepSpeed's universal checkpoints, which hold every parameter whole."""

from __future__ import annotations

import re
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import nn

from terapipe_ds.models.rank_gradients import is_split, of_all_stages


def universal_checkpoint_info(module: nn.Module, grid: PipelineParallelGrid) -> dict[str, Any]:
    """Return DeepSpeed's description of the parameters of all stages. A collective over the pipeline."""
    maps = collect_autotp_universal_checkpoint_info(module).get(constants.AFFINE_MAP, {})
    known: dict[str, Any] = maps.get(constants.AFFINE_MAP_PARAMS, {})
    # DeepSpeed's converter refuses patterns that name nothing, and frozen parameters have no optimizer states
    trained = {rf"^{re.escape(name)}$": p for name, p in module.named_parameters() if p.requires_grad}
    here = {pattern: known[pattern] if is_split(p) else None for pattern, p in trained.items()}
    layouts = of_all_stages(here, grid)
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
