"""A random configuration trained by our engine, on every rank of a pool. Runs inside the ranks."""

from __future__ import annotations

import contextlib
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.distributed.compare import RankRecord
from tests.distributed.configurations import CLIP_NORM, Configuration
from tests.distributed.engines import engine_of, section
from tests.distributed.single_process import (
    ADAM_EPS,
    EVALUATION_STEP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    layers,
    loss_function,
    micro_batches,
)
from tests.distributed.training import record_gradients, to_numpy


class DoublingModule(PipelineModule):
    """Doubles its gradients when the engine calls its hook, before any of them is summed over stages or replicas."""

    def before_reduce(self, engine: Any) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2  # type: ignore[operator]


def train_configuration(configuration: Configuration, fault: str | None = None, **changes: Any) -> RankRecord:
    """Train and record what the equality contract speaks of; with a fault of `faults.py` in all that is done.

    `changes` go into the `terapipe` section.
    """
    with contextlib.nullcontext() if fault is None else _broken_by(fault):
        terapipe = terapipe_section(configuration, **changes)
        with engine_of(layers(configuration), terapipe, **options(configuration)) as engine:
            return _train(engine, configuration)


def _broken_by(fault: str) -> contextlib.AbstractContextManager[None]:
    from tests.distributed.faults import FAULTS

    return FAULTS[fault].broken()


def terapipe_section(c: Configuration, **changes: Any) -> dict[str, Any]:
    slices = c.slices if isinstance(c.slices, int) else list(c.slices)
    of_schedule = {"schedule": c.schedule, "chunks_per_stage": c.chunks_per_stage}
    return section(**of_schedule, slices=slices, loss_reduction=c.loss_reduction, **changes)


def options(c: Configuration) -> dict[str, Any]:
    """Of `engines.build`: the module's and DeepSpeed's."""
    found: dict[str, Any] = {
        "stages": c.stages,
        "loss_fn": loss_function(c.loss_reduction),
        "module_class": DoublingModule if c.hook else PipelineModule,
        "train_micro_batch_size_per_gpu": c.rows,
        "gradient_accumulation_steps": c.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "eps": ADAM_EPS, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "gradient_clipping": CLIP_NORM if c.clipping else 0.0,
        "zero_optimization": {"stage": c.zero_stage},
    }
    if c.checkpointing != "off":
        reentrant = c.checkpointing == "reentrant"
        found["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": reentrant}
        found["module"] = {"checkpointable_layers": ["DecoderLayer"]} if reentrant else {}
    return found


def _train(engine: PipelineEngine, c: Configuration) -> RankRecord:
    replica = engine.grid.get_data_parallel_id()
    record = RankRecord(engine.global_rank, engine.stage_id, replica, type(engine).__name__)
    snapshots = record_gradients(engine)
    for step in range(1, c.steps + 1):
        record.returned.append(float(engine.train_batch(iter(micro_batches(c, replica, step)))))
        assert len(snapshots) == step, "one optimizer step for each batch"
        if c.clipping and c.zero_stage:
            record.norms.append(float(engine.get_global_grad_norm()))
        if engine.is_last_stage():
            record.losses.append(float(engine.total_loss) / c.micro_batches)
    evaluation = engine.eval_batch(iter(micro_batches(c, replica, EVALUATION_STEP)), bcast_loss=False)
    if engine.is_last_stage():
        record.evaluations.append(float(evaluation))
    record.gradients = dict(enumerate(snapshots, 1))
    record.parameters = {name: to_numpy(parameter) for name, parameter in engine.module.named_parameters()}
    return record
