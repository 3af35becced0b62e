"""Let accelerate count replicas of the model, not ranks: the stages of a pipeline get the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accelerate.utils.operations import recursively_apply
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from terapipe_ds.integrations.trainer.stages import Stages


class PipelineAccelerator(Accelerator):
    """Shard data over replicas, gather from them, and prepare the pipeline's engine in place of a model."""

    stages: Stages
    start: Callable[[], None]

    @classmethod
    def adopt(cls, accelerator: Accelerator, stages: Stages, start: Callable[[], None]) -> None:
        """Turn Trainer's accelerator into one of a pipeline. `start` builds the engine."""
        accelerator.__class__ = cls
        accelerator.stages, accelerator.start = stages, start
        if accelerator.dispatch_batches is None:  # one rank would divide the batches of a stream among stages
            accelerator.dataloader_config.dispatch_batches = False

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, but keep the engine, which another training run goes on with."""
        self.deepspeed_engine_wrapped = None
        return super().free_memory(*objects)

    @property
    def num_processes(self) -> int:
        """Return the number of replicas."""
        return self.stages.replicas

    @property
    def process_index(self) -> int:
        """Return the replica that this rank is a stage of."""
        return self.stages.replica

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all replicas, concatenated."""
        return recursively_apply(self.stages.gathered, tensor, error_on_other_type=True)

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """Prepare loaders as Accelerate does; return the engine for a model, and its optimizer and scheduler."""
        return tuple(map(self._prepared, args))

    def _prepared(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return self._prepare_one(item, first_pass=True)
        if isinstance(item, nn.Module):
            self.start()
            self.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(self.stages.engine)
            self._models.append(self.stages.engine)
            return self.stages.engine
        if isinstance(item, Optimizer | DummyOptim):
            self._optimizers.append(DeepSpeedOptimizerWrapper(self.stages.engine.optimizer))
            return self._optimizers[-1]
        if isinstance(item, DummyScheduler):
            config = self.state.deepspeed_plugin.hf_ds_config.config
            if "scheduler" not in config:
                return item.lr_scheduler_callable(self._optimizers[-1])  # Trainer's own, which Trainer steps
            self._schedulers.append(DeepSpeedSchedulerWrapper(self.stages.own_scheduler(config), self._optimizers[-1]))
            return self._schedulers[-1]
        return item
