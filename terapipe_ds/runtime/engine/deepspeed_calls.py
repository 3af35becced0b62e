"""Run layers and backwards as DeepSpeed's engine (0.19.8) does, or without it where it would only call them.

Its hooks on the module and on outputs, its timers, its count of backwards and its graph tracker take longer than the
layers of a short slice. In plain fp32, without anything that measures, none of them changes or notes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import DummyOptim
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from terapipe_ds.runtime.batch.cut_tensors import Tensors, as_tuple
from terapipe_ds.runtime.batch.loss import SliceLoss
from terapipe_ds.runtime.engine.deepspeed_faults import missing_loss_scale
from terapipe_ds.runtime.layers.activation_checkpointing import checkpointing_with_gradients
from terapipe_ds.runtime.layout.parted_module import PartedModule

T = TypeVar("T")
_PLAIN = frozenset((bool, int, float, str, type(None), torch.Tensor))


class DeepSpeedCalls:
    """Run layers and backwards as `DeepSpeedEngine` does for a micro-batch: with its hooks, loss scale and timers.

    Where none of these has anything to do, which is found out once per batch, layers and backwards run without them.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._seeds: dict[tuple[float, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}
        self.open_batch()

    def open_batch(self) -> None:
        """Find out what DeepSpeed has to do around the forwards and backwards of the batch that begins."""
        engine = self._engine
        self._is_bare, self._is_timed = does_nothing_around_layers(engine), bool(engine.wall_clock_breakdown())
        self._checkpoints = getattr(engine.module, "activation_checkpoint_interval", 0) > 0
        self._runs_layers_alone = not self._checkpoints and _only_calls_its_layers(engine.module)
        self._micro_batches = engine.gradient_accumulation_steps()
        self._counts_throughput = engine.training_dataloader is None  # else the loader does
        self._seeds.clear()

    def run_layers(self, inputs: Any, training: bool) -> Any:
        """Run the layers of the active part, and return what they give."""
        run = self._run_bare if self._is_bare else self._run_with_hooks
        if self._checkpoints:
            with checkpointing_with_gradients(self._engine.module):
                outputs = run(inputs)
        else:
            outputs = run(inputs)
        if not training:
            ds_checkpointing.reset()  # as the stock engine does between evaluation forwards
        return outputs

    def _run_bare(self, inputs: Any) -> Any:
        if self._counts_throughput:
            self._engine.tput_timer.start()
        module = self._engine.module
        if not self._runs_layers_alone:
            return module.forward(inputs)
        for layer in module.forward_funcs:
            inputs = layer(inputs)
        return inputs

    def _run_with_hooks(self, inputs: Any) -> Any:
        return DeepSpeedEngine.forward(self._engine, inputs)

    def backward_of_loss(self, share: SliceLoss) -> None:
        """Run the backward of the last part, from a slice's share of the loss."""
        if self._is_bare and torch.is_tensor(share.loss):
            torch.autograd.backward(share.loss, self._seed(share.loss, share.weight))
            return
        loss, scale = share.weighted(), missing_loss_scale(self._engine.optimizer)
        DeepSpeedEngine.backward(self._engine, loss if scale == 1.0 else loss.float() * scale)

    def _seed(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the gradient that autograd would bring back to `loss` from its weighted share of the mean.

        The same bits without the nodes of a product and a quotient in each slice's graph.
        """
        key = weight, loss.dtype, loss.device, loss.shape
        if key not in self._seeds:
            seed = torch.ones_like(loss) / self._micro_batches
            self._seeds[key] = seed if weight == 1.0 else seed * weight
        return self._seeds[key]

    def backward_of_outputs(self, outputs: Any, gradients: Tensors) -> None:
        """Do for another part what `DeepSpeedEngine.backward` does. Its prologue runs from hooks on the outputs."""
        tensors = [t for t in as_tuple(outputs, "the outputs of a stage") if t.requires_grad]
        if not tensors:
            return
        if self._is_bare:
            torch.autograd.backward(tensors, gradients)
            return
        with self._engine_backward():
            torch.autograd.backward(tensors, gradients)

    @contextmanager
    def weight_backward(self) -> Iterator[None]:
        """Let W run autograd. Its backward starts at weights, so no hook of an output runs DeepSpeed's prologue."""
        with self._engine_backward():
            self._engine._backward_prologue()
            yield

    @contextmanager
    def _engine_backward(self) -> Iterator[None]:
        """Say that this is the engine's backward: the ZeRO optimizers refuse a user's own `tensor.backward()`."""
        engine = self._engine
        engine._running_engine_backward = True
        try:
            yield
            engine._backward_epilogue()
        finally:
            engine._running_engine_backward = False

    def timed(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        """Call, with `wall_clock_breakdown` under one of DeepSpeed's timers. Of a receive the wait is timed."""
        if not self._is_timed:
            return call(*arguments)
        timer = self._engine.timers(name)
        timer.start()
        result = call(*arguments)
        timer.stop()
        return result


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


def _only_calls_its_layers(module: Any) -> bool:
    """Return whether `forward` calls the layers one after the other: no seeds, and no class of a user's own."""
    own = next(kind for kind in type(module).__mro__ if kind is not PartedModule and "forward" in vars(kind))
    return own is PipelineModule and "forward" not in vars(module) and not module.seed_layers


def set_at_once(engine: PipelineEngine, name: str, value: Any) -> None:
    """Set an attribute of the engine, at once where it is there and its value is plain.

    In every backward DeepSpeed marks in attributes what runs, and every micro-batch leaves its loss in one. `nn.Module`
    would look for a parameter, a layer and a buffer of that name each time.
    """
    if type(value) in _PLAIN and name in engine.__dict__:
        engine.__dict__[name] = value
    else:
        nn.Module.__setattr__(engine, name, value)
