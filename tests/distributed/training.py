"""`train_case`: a few steps of a tiny GPT by DeepSpeed's stock engine or by ours. Runs inside the ranks."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import numpy as np
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from tests import dict_batches
from tests.distributed.cases import CLIP_NORM, Case
from tests.distributed.compare import RankRecord
from tests.distributed.engines import engine_of, record_gradients, section
from tests.distributed.single_process import (
    ADAM_EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    draw_weights,
    evaluation_data,
    layers,
    loss_of,
    micro_batches,
    to_numpy,
)

System = Literal["stock", "terapipe"]


def train_case(case: Case, system: System = "terapipe", fault: str | None = None, **changes: Any) -> RankRecord:
    """Train the case and record what the equality contract speaks of. Called on every rank.

    With a fault of `faults.py` in all that is done; `changes` go into the `terapipe` section.
    """
    terapipe = None if system == "stock" else {**terapipe_section(case), **changes}
    with contextlib.nullcontext() if fault is None else _broken_by(fault):
        with engine_of(layers(case), terapipe, **options(case)) as engine:
            return _train(engine, case)


def _broken_by(fault: str) -> contextlib.AbstractContextManager[None]:
    from tests.distributed.faults import FAULTS

    return FAULTS[fault].broken()


def terapipe_section(case: Case) -> dict[str, Any]:
    slices = case.slices if isinstance(case.slices, int) else list(case.slices)
    chunks_per_stage = 2 if "interleaved" in case.schedule else 1
    of_schedule = {"schedule": case.schedule, "chunks_per_stage": chunks_per_stage}
    by_dict = "off" if case.batch == "plain" else "position_ids"
    documents = "off" if not case.documents else 1 if case.batch == "tuple" else by_dict
    return section(**of_schedule, slices=slices, loss_reduction=case.loss_reduction, documents=documents)


def options(case: Case) -> dict[str, Any]:
    """Return options of `engines.build`: the module's and DeepSpeed's."""
    found: dict[str, Any] = {
        "stages": case.stages,
        "loss_fn": loss_of(case),
        "module_class": DoublingModule if case.hook else DrawnModule,
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "eps": ADAM_EPS, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "gradient_clipping": CLIP_NORM if case.clipping else 0.0,
        "zero_optimization": {"stage": case.zero_stage},
    }
    if case.dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if case.checkpointing != "off":
        found["pipeline"] = {
            "activation_checkpoint_interval": 1,
            "use_reentrant": case.checkpointing != "non_reentrant",
        }
    if case.checkpointing == "reentrant":
        found["module"] = {"checkpointable_layers": ["DecoderLayer", "MixerLayer", "Beside", "ExpertsLayer"]}
    return found


class DrawnModule(PipelineModule):
    """Starts from the weights that all precisions start from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        draw_weights(self.named_parameters())


class DoublingModule(DrawnModule):
    """Doubles its gradients when the engine calls its hook, before any of them is summed over stages or replicas."""

    def before_reduce(self, engine: Any) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2  # type: ignore[operator]


def _batches(case: Case, drawn: list[tuple[Any, Tensor]]) -> list[Any]:
    """Return micro-batches in the form of the case."""
    if case.batch == "tuple":
        return list(drawn)
    return [dict_batches.of(case.batch, *rows, labels) for rows, labels in drawn]


def _train(engine: PipelineEngine, case: Case) -> RankRecord:
    replica = engine.grid.get_data_parallel_id()
    record = RankRecord(engine.global_rank, engine.stage_id, replica, type(engine).__name__)
    snapshots: list[dict[str, Any]] = []
    record_gradients(engine, lambda gradients: snapshots.append(to_numpy(gradients)))
    for step in range(1, case.steps + 1):
        returned = engine.train_batch(iter(_batches(case, micro_batches(case, replica, step))))
        # the last stage returns fp64, the others what they were sent
        record.returned.append(float(np.float32(float(returned))))
        assert len(snapshots) == step, f"{len(snapshots)} optimizer steps in {step} batches"
        if case.clipping and engine.get_global_grad_norm() is not None:
            record.norms.append(float(engine.get_global_grad_norm()))
        if engine.is_last_stage():
            record.losses.append(float(engine.total_loss) / case.micro_batches)
        if data := evaluation_data(case, replica, step):
            evaluation = engine.eval_batch(iter(_batches(case, data)), bcast_loss=False)
            record.evaluations += [float(evaluation)] if engine.is_last_stage() else []
    record.gradients = dict(enumerate(snapshots, 1))
    record.parameters = to_numpy(dict(engine.module.named_parameters()))
    assert all(gradients.keys() == record.parameters.keys() for gradients in snapshots), "some have no gradient"
    return record
