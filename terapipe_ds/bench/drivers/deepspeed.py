"""DeepSpeed's pipeline engines, and ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from terapipe_ds.bench.cases import AUTO, CUTS, Case, Job
from terapipe_ds.bench.drivers.base import Driver, MicroBatches
from terapipe_ds.bench.drivers.orders import of_dualpipev
from terapipe_ds.bench.drivers.recorder import EngineRecorder, InstructionRecorder
from terapipe_ds.bench.ranks import build_engine
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Schedule, build


class _EngineDriver(Driver):
    def __init__(self, job: Job, section: dict[str, Any] | None, dualpipe: bool = False) -> None:
        self._work = dataclasses.replace(job.work, accumulation=self.fewest)
        self._engine = build_engine(section, self._work, ds_config=job.ds_config, gpt=job.gpt, dualpipe=dualpipe)
        self.optimizer = self._engine.optimizer

    def prepare(self, accumulation: int, plan: SlicePlan) -> None:
        self._engine.set_train_batch_size(self._work.micro_batch * accumulation)

    def step(self, micro_batches: MicroBatches) -> float | None:
        return float(self._engine.train_batch(iter(micro_batches)))

    def parameters(self) -> list[Tensor]:
        return list(self._engine.module.parameters())

    def destroy(self) -> None:
        self._engine.destroy()


class StockDriver(_EngineDriver):
    """DeepSpeed's `PipelineEngine`, or its DualPipeV."""

    def __init__(self, case: Case, job: Job) -> None:
        self._dualpipe = case.schedule == "dualpipev"
        self.fewest = 2 * job.work.stages if self._dualpipe else 1
        super().__init__(job, None, self._dualpipe)
        self.recorder = InstructionRecorder(self._engine)

    def schedule(self, accumulation: int, plan: SlicePlan) -> Schedule:
        if self._dualpipe:
            return of_dualpipev(self._work.stages, accumulation)
        return build("1f1b", self._work.stages, accumulation, 1)

    def forget(self) -> None:
        self._engine.reset_activation_shape()
        for buffers in self._engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)


class TeraPipeDriver(_EngineDriver):
    """Our engine."""

    def __init__(self, case: Case, job: Job) -> None:
        self._case = case
        self._schedule = case.schedule if case.schedule != AUTO else CUTS[case.cut][-1]  # until one is chosen
        section = {
            **(job.ds_config or {}).get("terapipe", {}),
            "enabled": True,
            "schedule": self._schedule,
            "schedule_options": case.schedule_options,
            "chunks_per_stage": case.chunks_per_stage,
            "slices": 1,
            "granularity_tokens": 1,
        }
        super().__init__(job, section)
        self.recorder = self._engine.tracer = EngineRecorder()

    def prepare(self, accumulation: int, plan: SlicePlan) -> None:
        super().prepare(accumulation, plan)
        self._engine.use_slice_plan(plan, self._schedule)

    def use_schedule(self, name: str) -> None:
        self._schedule = name

    def schedule(self, accumulation: int, plan: SlicePlan) -> Schedule:
        options = {"chunks_per_stage": self._case.chunks_per_stage, **self._case.schedule_options}
        return build(self._schedule, self._work.stages, accumulation, plan.num_slices, **options)

    def forget(self) -> None:
        self._engine.slice_store.drop_free()
