"""Say what the runners of a stage may ask: their collaborators, and of DeepSpeed's engine only `DeepSpeedCalls`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import SliceStore
from terapipe_ds.runtime.batch.sliceable import Tensors, as_tuple
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.deepspeed_faults import missing_loss_scale
from terapipe_ds.runtime.engine.trace import ActionTracer
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.activation_checkpointing import checkpointing_with_gradients
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import StageFlops
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.links.stage_links import StageLinks


class DeepSpeedCalls:
    """Run layers and backwards as `DeepSpeedEngine` does for a micro-batch: with its hooks, loss scale and timers."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine

    def run_layers(self, inputs: Any, training: bool) -> Any:
        """Run the layers of the active part, and return what they give."""
        with checkpointing_with_gradients(self._engine.module):
            outputs = DeepSpeedEngine.forward(self._engine, inputs)
        if not training:
            ds_checkpointing.reset()  # as the stock engine does between evaluation forwards
        return outputs

    def backward_of_loss(self, loss: torch.Tensor) -> None:
        """Run the backward of the last part."""
        scale = missing_loss_scale(self._engine.optimizer)
        DeepSpeedEngine.backward(self._engine, loss if scale == 1.0 else loss.float() * scale)

    def backward_of_outputs(self, outputs: Any, gradients: Tensors) -> None:
        """Do for another part what `DeepSpeedEngine.backward` does. Its prologue runs from hooks on the outputs."""
        tensors = [t for t in as_tuple(outputs, "the outputs of a stage") if t.requires_grad]
        if tensors:
            with self._engine_backward():
                torch.autograd.backward(tensors, list(gradients))

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

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Run one of DeepSpeed's timers, with `wall_clock_breakdown`. Receives are timed while they are waited for."""
        timer = self._engine.timers(name) if self._engine.wall_clock_breakdown() else None
        if timer is not None:
            timer.start()
        yield
        if timer is not None:
            timer.stop()


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
