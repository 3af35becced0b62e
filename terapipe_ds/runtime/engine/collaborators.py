"""Say what the runners of a stage may ask: their collaborators, and of DeepSpeed's engine only `DeepSpeedCalls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import SliceStore
from terapipe_ds.runtime.batch.sliceable import Tensors, as_tuple
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.deepspeed_faults import missing_loss_scale
from terapipe_ds.runtime.engine.deepspeed_listeners import does_nothing_around_layers
from terapipe_ds.runtime.engine.trace import ActionTracer
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.activation_checkpointing import checkpointing_with_gradients
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import StageFlops
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.links.stage_links import StageLinks

T = TypeVar("T")


class DeepSpeedCalls:
    """Run layers and backwards as `DeepSpeedEngine` does for a micro-batch: with its hooks, loss scale and timers.

    Where none of these has anything to do, which is found out once per batch, layers and backwards run without them.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self.open_batch()

    def open_batch(self) -> None:
        """Find out what DeepSpeed has to do around the forwards and backwards of the batch that begins."""
        engine = self._engine
        self._is_bare = does_nothing_around_layers(engine)
        self._checkpoints = getattr(engine.module, "activation_checkpoint_interval", 0) > 0
        self._micro_batches = engine.gradient_accumulation_steps()
        self._counts_throughput = engine.training_dataloader is None  # else the loader does

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
        return self._engine.module.forward(inputs)

    def _run_with_hooks(self, inputs: Any) -> Any:
        return DeepSpeedEngine.forward(self._engine, inputs)

    def backward_of_loss(self, loss: Any) -> None:
        """Run the backward of the last part."""
        if self._is_bare and torch.is_tensor(loss):
            torch.autograd.backward(loss / self._micro_batches)
            return
        scale = missing_loss_scale(self._engine.optimizer)
        DeepSpeedEngine.backward(self._engine, loss if scale == 1.0 else loss.float() * scale)

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
        if not self._engine.wall_clock_breakdown():
            return call(*arguments)
        timer = self._engine.timers(name)
        timer.start()
        result = call(*arguments)
        timer.stop()
        return result


@dataclass
class Stage:
    """What the parts of one stage share.

    In `store` each part has names of its own. `finite`, which searches for numbers that are not finite, and `flops`,
    which counts operations, are there where the config asks for them.
    """

    stage_id: int
    deepspeed: DeepSpeedCalls
    links: StageLinks
    store: SliceStore
    watchdog: Watchdog
    weights: WeightGradients
    results: BatchResults
    tracer: ActionTracer
    finite: FiniteCheck | None = None
    flops: StageFlops | None = None
