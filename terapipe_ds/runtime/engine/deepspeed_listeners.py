"""Find out whether DeepSpeed (0.19.8) does anything around the forward and the backward of a micro-batch.

Its hooks on the module and on outputs, its timers, its count of backwards and its graph tracker take longer than a
short slice itself. In plain fp32, without anything that measures, none of them changes or notes anything, and the
engine runs layers and autograd directly. The names are those that `DeepSpeedEngine.forward`, `.backward`,
`._forward_prologue`, `._forward_epilogue`, `._backward_prologue` and `._backward_epilogue` ask for.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import DummyOptim
from torch.nn.modules.module import _has_any_global_hook


def does_nothing_around_layers(engine: PipelineEngine) -> bool:
    """Return whether layers and backwards of this batch may run without DeepSpeed's `forward` and `backward`."""
    return not (
        _optimizer_listens(engine)
        or _something_measures(engine)
        or _something_compiles(engine)
        or engine.torch_autocast_enabled()
        or torch.is_autocast_enabled(get_accelerator().device_name())
        or engine.random_ltd_enabled()
        or not engine.managed_gradient_accumulation()
        or _has_other_hooks(engine)
    )


def _optimizer_listens(engine: PipelineEngine) -> bool:
    """Return whether the optimizer scales the loss, collects gradients by hooks, or is none at all."""
    return (
        engine.fp16_enabled()
        or engine.bfloat16_enabled()
        or engine.zero_optimization()
        or engine.zenflow
        or engine.optimizer is None
        or isinstance(engine.optimizer, (DeepSpeedOptimizer, DummyOptim))
        or engine.torch_autocast_z0_gradscaler is not None
        or engine.enable_backward_allreduce
    )


def _something_measures(engine: PipelineEngine) -> bool:
    return (
        engine.wall_clock_breakdown()
        or bool(engine.engine_timers.active_timers())
        or engine.flops_profiler_enabled()
        or engine.memory_breakdown()
        or engine.autotuning_profile_model_info()
    )


def _something_compiles(engine: PipelineEngine) -> bool:
    return engine.is_compiled or engine.is_deepcompile_enabled() or engine._is_compiled_autograd_enabled


def _has_other_hooks(engine: PipelineEngine) -> bool:
    """Return whether calls of the module have hooks that are not DeepSpeed's own."""
    module: Any = engine.module
    own = {handle.id for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook) if handle}
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not own.issuperset(key for each in hooks for key in each) or bool(_has_any_global_hook())
