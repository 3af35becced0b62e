"""Where DeepSpeed's stock pipeline engine (0.19.8) trains wrongly, and what this engine does instead."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn


def count_every_stage_in_norm(module: nn.Module, grid: Any) -> None:
    """Make DeepSpeed's fp32 ``clip_grad_norm_`` count the parameters of every stage, and tied ones once.

    It takes parameters that are not marked as model parallel to be replicated over the whole model-parallel group,
    stages included, and leaves those of later stages out of the norm. The other optimizers count right with and without
    the mark.
    """
    if grid.get_slice_parallel_rank() != 0:  # replicated over tensor-parallel ranks: counted once, on rank 0
        return
    for parameter in module.parameters():
        if not getattr(parameter, "ds_pipe_replicated", False):
            parameter.model_parallel = True  # type: ignore[attr-defined]


def missing_loss_scale(optimizer: Any) -> float:
    """The factor that ``DeepSpeedEngine.backward`` leaves out: with fp16 and ZeRO-0 it does not scale the loss, while
    the optimizer divides the gradients by the loss scale all the same. 1.0 for every other optimizer."""
    if not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return 1.0
    if optimizer.custom_loss_scaler:
        return float(optimizer.external_loss_scale)
    return float(optimizer.loss_scale_config.cur_scale)
