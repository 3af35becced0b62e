"""Drive DeepSpeed's pipeline engines, and ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass
from torch import Tensor

from terapipe_ds.bench.cases import AUTO, CUTS, Case, Job
from terapipe_ds.bench.drivers.base import Driver, MicroBatches, schedule_of
from terapipe_ds.bench.drivers.recorder import EngineRecorder, InstructionRecorder
from terapipe_ds.bench.metrics import Plans
from terapipe_ds.bench.ranks import build_engine
from terapipe_ds.schedule import Schedule, build, load
from terapipe_ds.schedule.placement import SEARCH, v_shape


class _EngineDriver(Driver):
    def __init__(self, job: Job, section: dict[str, Any] | None, dualpipe: bool = False) -> None:
        self._work = dataclasses.replace(job.work, accumulation=self.fewest)
        self._engine = build_engine(section, self._work, ds_config=job.ds_config, gpt=job.gpt, dualpipe=dualpipe)
        self.optimizer, self.scheduler = self._engine.optimizer, self._engine.lr_scheduler

    def prepare(self, accumulation: int, plans: Plans, schedule: str | None = None) -> None:
        self._engine.set_train_batch_size(self._work.micro_batch * accumulation)

    def step(self, micro_batches: MicroBatches) -> float | None:
        return float(self._engine.train_batch(iter(micro_batches)))

    def parameters(self) -> list[Tensor]:
        return list(self._engine.module.parameters())

    def destroy(self) -> None:
        self._engine.destroy()


class StockDriver(_EngineDriver):
    """Drive DeepSpeed's `PipelineEngine`, or its DualPipeV."""

    def __init__(self, case: Case, job: Job) -> None:
        self._dualpipe = case.schedule == "dualpipev"
        self.fewest = 2 * job.work.stages if self._dualpipe else 1
        super().__init__(job, None, self._dualpipe)
        self.recorder = InstructionRecorder(self._engine)

    def schedule(self, accumulation: int, plans: Plans) -> Schedule:
        if self._dualpipe:
            return of_dualpipev(self._work.stages, accumulation)
        return build("1f1b", self._work.stages, accumulation, 1)

    def forget(self) -> None:
        self._engine.reset_activation_shape()
        for buffers in self._engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)


class TeraPipeDriver(_EngineDriver):
    def __init__(self, case: Case, job: Job) -> None:
        self._case = case
        self._schedule = CUTS[case.cut][-1] if case.schedule in (AUTO, SEARCH) else case.schedule  # until one is chosen
        options = {"schedule_options": dict(case.options), "chunks_per_stage": case.chunks_per_stage}
        section = {**(job.ds_config or {}).get("terapipe", {}), "schedule": self._schedule, **options}
        super().__init__(job, {**section, "enabled": True, "slices": 1, "granularity_tokens": 1})
        self.recorder = self._engine.tracer = EngineRecorder()

    def prepare(self, accumulation: int, plans: Plans, schedule: str | None = None) -> None:
        super().prepare(accumulation, plans)
        self._schedule = schedule or self._schedule
        self._engine.use_slice_plan(plans, self._schedule)

    def schedule(self, accumulation: int, plans: Plans) -> Schedule:
        if self._schedule.endswith(".csv"):
            return load(self._schedule)
        options = {"chunks_per_stage": self._case.chunks_per_stage, **dict(self._case.options)}
        counts = [plan.num_slices for plan in plans]
        return build(self._schedule, self._work.stages, accumulation, counts, **options)

    def forget(self) -> None:
        self._engine.slice_store.pool.drop_free()


def of_dualpipev(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the order of DeepSpeed's DualPipeV (deepspeed/runtime/pipe/schedule.py), whose phases are chunks."""
    codes = {ForwardPass: "F", BackwardPass: "B"}
    orders = []
    for stage_id in range(num_stages):
        steps = DualPipeVSchedule(num_micro_batches, num_stages, stage_id).steps()
        commands = [(codes[type(c)], c.kwargs) for step in steps for c in step if type(c) in codes]
        # a buffer is (phase, micro-batch), see num_pipe_buffers
        orders.append([f"{code}{k['buffer_id'] % num_micro_batches}.0c{k['phase']}" for code, k in commands])
    return schedule_of("dualpipev", orders, v_shape(num_stages))
