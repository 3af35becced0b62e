"""Run a small training job, in which a fault may strike one rank.

The ranks of `harness.RankPool` run it and, as a script, DeepSpeed's own launcher.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils.data import DataLoader

import terapipe_ds
from terapipe_ds.runtime.failures import watchdog
from tests.distributed import engines
from tests.distributed.failures import faults
from tests.distributed.failures.faults import Fault

SEQUENCE_LENGTH = 16
PLAN = [4, 4, 4, 4]
MICRO_BATCHES = 2
ENVIRONMENT = "TERAPIPE_TEST_JOB"


@dataclass(frozen=True)
class Job:
    """Train `steps` steps, and save a checkpoint in `folder` after each step in `saves`."""

    stages: int = 2
    steps: int = 3
    fault: Fault | None = None
    recompute: bool = False
    stall_timeout_s: float = 60.0
    folder: str = ""
    saves: tuple[int, ...] = ()
    resume: str = ""  # the tag of a checkpoint in `folder` to start from
    workers: int = 0  # processes that a data loader forks; 0: data without a loader
    section: dict[str, Any] = field(default_factory=dict)  # on top of the usual `terapipe` section

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        fault = fields.pop("fault")
        return replace(cls(**fields), fault=None if fault is None else Fault(**fault))


def run(job: Job) -> list[float]:
    """Return the losses of the steps. Called on every rank."""
    engine = build_engine(job)
    try:
        return list(_train(engine, job))
    finally:
        engine.destroy()


def run_until_it_ends(job: Job) -> list[float]:
    """Call `run`, without the time that ranks take to end for the sake of a launcher."""
    watchdog.LINGER_S = 0.1
    return run(job)


def _train(engine: PipelineEngine, job: Job) -> Iterator[float]:
    pipeline_id, fault = engine.grid.get_data_parallel_id(), job.fault
    struck_in = fault.step if fault and (fault.stage, fault.pipeline) == (engine.stage_id, pipeline_id) else None
    faults.exchange_pids()
    loader = _loader(job.workers) if job.workers else None
    if job.resume:
        if fault and struck_in == 0:
            fault.arm(engine, iter(()))
        path, _ = engine.load_checkpoint(job.folder, job.resume)
        assert path is not None, f"no checkpoint in {job.folder}"
    for step in range(engine.global_steps + 1, job.steps + 1):
        data = loader or batches(step, pipeline_id)
        if fault and struck_in == step:
            if fault.kind == faults.LEAVES:
                return faults.mark()
            data = fault.arm(engine, data)
        evaluates = fault is not None and (fault.place, fault.step) == ("eval", step)
        yield float((engine.eval_batch if evaluates else engine.train_batch)(data))
        if step in job.saves:
            engine.save_checkpoint(job.folder)


def _loader(workers: int) -> Iterator[engines.MicroBatch]:
    """Return an iterator whose workers are forked from this rank, and hold everything that it holds."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        sequences = [sequence for step in range(1, 50) for sequence in batches(step)]
        return iter(DataLoader(sequences, batch_size=None, num_workers=workers, multiprocessing_context="fork"))


def batches(step: int, pipeline_id: int = 0, length: int = SEQUENCE_LENGTH) -> Iterator[engines.MicroBatch]:
    (batch,) = engines.batches(1, MICRO_BATCHES, 100 * step + 10 * pipeline_id, length=length, masked=False)
    return iter(batch)


# -- the engine ----------------------------------------------------------------------------------------------


def build_engine(job: Job, changes: dict[str, Any] | None = None) -> PipelineEngine:
    """Return an engine with one decoder layer per stage. `changes`: to the DeepSpeed config; None removes a key."""
    model = build_model(job)
    values = {**deepspeed_config(job), **(changes or {})}
    return terapipe_ds.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={key: value for key, value in values.items() if value is not None},
    )[0]


def build_model(job: Job) -> PipelineModule:
    """Build the model. This makes process groups: a collective over all ranks."""
    layers = engines.fp32_layers(num_layers=job.stages)
    return engines.pipeline_module(layers, job.stages, partition_method="type:DecoderLayer")


def deepspeed_config(job: Job) -> dict[str, Any]:
    section = {"enabled": True, "slices": PLAN, "stall_timeout_s": job.stall_timeout_s, **job.section}
    return engines.config(terapipe=section, **engines.CHECKPOINTING["non_reentrant" if job.recompute else "off"])


def main() -> None:
    """Run the job that an environment variable holds, as a training script of the launcher."""
    import deepspeed

    torch.set_num_threads(1)
    # DeepSpeed would compile this operator now, for a minute and behind a lock that outlives a killed rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for step, loss in enumerate(run(Job.from_json(os.environ[ENVIRONMENT])), start=1):
        print(f"step {step}: loss {loss}", flush=True)


if __name__ == "__main__":
    main()
