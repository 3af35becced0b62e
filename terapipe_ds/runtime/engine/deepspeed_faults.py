"""Correct faults of DeepSpeed's stock pipeline engine (0.19.8) in training: one fault per function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine as deepspeed_engine
import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import combine_grad_norm_groups, is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.messages import logger
from terapipe_ds.runtime.agreement import everywhere, gather

_DIVIDED = ("model_parallel", "tensor_model_parallel")  # attributes that `is_model_parallel_parameter` reads


@contextmanager
def monitors_agreed() -> Iterator[None]:
    """Let every rank raise an error of DeepSpeed's monitors, which rank 0 alone opens: others would wait for rank 0."""
    monitors = deepspeed_engine.MonitorMaster
    with replaced(deepspeed_engine, "MonitorMaster", lambda config: everywhere(lambda: monitors(config))):
        yield


@torch.no_grad()
def clip_fp32(module: nn.Module, grid: Any, limit: float) -> torch.Tensor:
    """Clip gradients by the norm of all stages, and return the norm; each tied weight counts once.

    DeepSpeed's fp32 `clip_grad_norm_` leaves the parameters of later stages out, unless tensor-parallel ranks divide
    them, counts divided tied weights on each of their stages, and does not scale the sparse gradients of embeddings.
    """
    trained = [each for each in module.parameters() if each.grad is not None]
    # a parameter that tensor-parallel ranks do not divide counts on the first of them
    is_first = grid.get_slice_parallel_rank() == 0
    here = [p for p in trained if not getattr(p, "ds_pipe_replicated", False)]
    norms = [p.grad.float().norm() for p in here if p.grad is not None and (is_first or is_model_parallel_parameter(p))]
    total = torch.stack(norms or [torch.zeros((), device=get_accelerator().current_device_name())]).square().sum()
    torch_dist.all_reduce(total, group=grid.get_model_parallel_group())
    # replicas clip by the same number
    norm = total.sqrt() / grid.get_data_parallel_world_size()
    torch_dist.all_reduce(norm, group=grid.get_data_parallel_group())
    factor = (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)  # a number over a tensor is rounded twice
    for each in trained:
        assert each.grad is not None
        each.grad.mul_(factor)
    return norm


def tell_of_clipping(engine: PipelineEngine) -> None:
    """Log on rank 0 that fp32 losses differ from the stock engine's, which clips by the first stage's norm only."""
    in_fp32 = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    if engine.global_rank == 0 and engine.num_stages > 1 and in_fp32 and engine.gradient_clipping() > 0:
        is_said = "gradient_clipping" in engine._config._param_dict
        source = "set in the config" if is_said else "DeepSpeed's default"
        logger.info(
            f"gradient_clipping is {engine.gradient_clipping():g} ({source}): this engine clips by the norm of all "
            "stages. In fp32 without ZeRO DeepSpeed's own engine clips by the norm of the first stage only, and its "
            'losses differ after the first step that clips. To compare both, set "gradient_clipping": 0 in both configs'
        )


def warn_of_first_step(engine: PipelineEngine) -> None:
    """Warn on rank 0 of optimizers of 16 bits without ZeRO, which step without gradients when they are built.

    `initialize_optimizer_states` does so: Adam then counts a step, and a weight decay acts.
    """
    if engine.global_rank == 0 and isinstance(engine.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        logger.warning(
            f"{type(engine.optimizer).__name__}, DeepSpeed's optimizer for 16 bits without ZeRO, takes a step without "
            "gradients when it is built, so that Adam's first updates are too small, as in the stock engine. Set "
            '"zero_optimization": {"stage": 1} to train as in fp32'
        )


@contextmanager
def right_norm(engine: PipelineEngine) -> Iterator[None]:
    """Let `FP16_UnfusedOptimizer` take a right norm in its step, and report it without the loss scale.

    It reads marks of parameters from gradients, which lack them: tied weights count twice, and only the first of the
    tensor-parallel ranks counts. `get_global_grad_norm` would return the norm of scaled gradients.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        yield
        return
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            for name in ("ds_pipe_replicated", *_DIVIDED):
                setattr(parameter.grad, name, getattr(parameter, name, False))
    scale = optimizer.loss_scale  # which a step may change
    yield
    norm = optimizer._global_grad_norm / scale  # noqa: SLF001 - DeepSpeed has no other way
    optimizer._global_grad_norm = engine._global_grad_norm = norm  # noqa: SLF001


def count_nothing_as_zero(optimizer: Any) -> None:
    """Let `BF16_Optimizer` step, not fail, on a rank where no gradient counts (for example with only a tied copy)."""
    if not isinstance(optimizer, BF16_Optimizer):
        return
    stock = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        counted = stock(for_clipping)
        if for_clipping or counted[0]:
            return counted
        return [torch.zeros(1, device=get_accelerator().current_device_name())], counted[1]

    optimizer.get_grads_for_norm = get_grads_for_norm


def reduce_in_one_bucket(optimizer: Any) -> None:
    """Reduce gradients of ZeRO-1 in the bucket that it has from the first backward on: DeepSpeed allocates another."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    stock = optimizer.reduce_gradients

    def reduce_gradients(pipeline_parallel: bool = False) -> None:
        # it has none where no parameter had a gradient
        stock(pipeline_parallel=pipeline_parallel and not optimizer.ready_for_gradients)

    optimizer.reduce_gradients = reduce_gradients


def forget_replaced_parameters(optimizer: Any) -> None:
    """Drop states of parameters that DeepSpeed has replaced by fp32 copies: no checkpoint could be saved with them.

    `torch.optim.Adagrad` has states from its start.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        kept = {id(each) for group in inner.param_groups for each in group["params"]}
        for parameter in [each for each in inner.state if id(each) not in kept]:
            del inner.state[parameter]


def join_in_each_group(optimizer: Any, world: Any) -> None:
    """Let ZeRO take its norm where ranks have different numbers of parameter groups, because some left out empty ones.

    The stages sum the norm of each group by itself, so that those with more groups would wait.

    Raises TeraPipeConfigError on every rank for another optimizer that would wait, and for groups that ZeRO loses.
    """
    is_zero, is_unfused = hasattr(optimizer, "scaled_global_norm"), isinstance(optimizer, FP16_UnfusedOptimizer)
    if not (is_zero or is_unfused):  # a collective follows, and ranks have the same kind
        return
    own = len(optimizer.bit16_groups if is_zero else optimizer.fp16_groups)
    most, fewest = max(counts := gather(own, world)), min(counts)
    if is_zero and isinstance(optimizer.optimizer, torch.optim.Adagrad) and most > 1:
        raise TeraPipeConfigError(
            f"torch.optim.Adagrad has {most} parameter groups. DeepSpeed's ZeRO joins them, and fails in the first "
            'step: use one group, "zero_optimization": {"stage": 0}, or another optimizer'
        )
    if is_unfused and fewest < most:
        raise TeraPipeConfigError(
            f"ranks have {fewest} to {most} parameter groups, and without ZeRO DeepSpeed's optimizer for fp16 needs as "
            'many on each: keep groups that are empty on a rank, or set "zero_optimization": {"stage": 1}'
        )
    if own < most:
        stock = optimizer.scaled_global_norm

        def scaled_global_norm(norm_type: int = 2) -> Any:
            norms = [stock(norm_type)]
            norms += [optimizer.get_grad_norm_direct([], [], norm_type) for _ in range(most - own)]
            return combine_grad_norm_groups(norms, norm_type)

        optimizer.scaled_global_norm = scaled_global_norm


def steps_between_prints(engine: PipelineEngine) -> int | None:
    """Return the config's `steps_per_print`. With timers always return a number: DeepSpeed divides by it unchecked.

    The number is 1 if `wall_clock_breakdown` is set, so that the log shows the times. The flops profiler alone prints
    no times.
    """
    steps = engine._config.steps_per_print
    if steps or not engine.wall_clock_breakdown():
        return steps or None
    return 1 if engine._config._param_dict.get("wall_clock_breakdown") else sys.maxsize


def missing_loss_scale(optimizer: Any) -> float:
    """Return the factor that `DeepSpeedEngine.backward` fails to apply to the loss: 1.0 except with fp16 and ZeRO-0."""
    if not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return 1.0
    if optimizer.custom_loss_scaler:
        return float(optimizer.external_loss_scale)
    return float(optimizer.loss_scale_config.cur_scale)


def may_overflow(engine: PipelineEngine) -> bool:
    """Return whether overflowing gradients are expected: DeepSpeed then skips the step, and lowers the scale."""
    scalers = engine.torch_autocast_z0_gradscaler, getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return scalers != (None, None) or bool(engine.fp16_enabled() and engine.dynamic_loss_scale())


def skips_nan(engine: PipelineEngine) -> bool:
    """Return whether DeepSpeed skips a step with gradients of NaN: if they may overflow, or if it checks bf16."""
    is_checked = isinstance(engine.optimizer, BF16_Optimizer) or getattr(engine.optimizer, "check_grad_overflow", False)
    return bool(is_checked) or may_overflow(engine)


def problem_of_memory(module: nn.Module) -> str | None:
    """Return an error about a parameter that DeepSpeed cannot broadcast; it fails there, and other stages wait."""
    for name, each in module.named_parameters():
        if each.itemsize > 1 and (each.dim() == 0 or each.stride(-1) != 1):
            has = "no dimension: give it the shape [1]" if each.dim() == 0 else "a turned memory: make it contiguous()"
            return f"the parameter {name} has {has}. DeepSpeed sends parameters to all replicas as rows of bytes"
    return None


def problem_of_grad_scaler(config: DeepSpeedConfig, num_stages: int) -> str | None:
    """Return an error about `torch_autocast` in fp16 with several stages, which fails in DeepSpeed's first step."""
    if num_stages == 1 or not config.torch_autocast_enabled or config.torch_autocast_dtype != torch.float16:
        return None
    return (
        f'torch_autocast.dtype = "float16" with {num_stages} stages: each stage has a GradScaler, and only the '
        "last stage's scales the loss, so that the steps of the other stages fail. Set the dtype to bfloat16, or "
        "enable fp16 instead of torch_autocast"
    )


def problem_of_curriculum(config: DeepSpeedConfig, num_stages: int) -> str | None:
    """Return an error about DeepSpeed's curriculum, which no pipeline with several stages can follow; else None.

    Its sampler sends each batch from rank 0 through the group of a stage's own replicas, and only the first stage's
    group has rank 0. Without `training_data` nothing reads the setting.
    """
    curriculum = config.data_efficiency_config["data_sampling"]["curriculum_learning"]
    if num_stages == 1 or not curriculum["enabled"]:
        return None
    return (
        f"data_efficiency.data_sampling.curriculum_learning.enabled = true with {num_stages} stages: DeepSpeed's "
        "sampler reaches the first stage only, and for data of your own iterator the setting has no effect. Set it to "
        "false, and order the data in your own loader, in the same way on the first and the last stage"
    )
