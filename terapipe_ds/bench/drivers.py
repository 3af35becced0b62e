"""What trains, behind one face: DeepSpeed's engines, ours, and torch's pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.bench.cases import AUTO, CUTS, Case, Job
from terapipe_ds.bench.orders import of_dualpipev
from terapipe_ds.bench.ranks import build_engine
from terapipe_ds.bench.recorder import EngineRecorder, InstructionRecorder, Recorder
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Schedule, build

_COPIES = (
    "fp32_groups_flat_partition", "fp32_groups_gradients_flat",  # BF16_Optimizer
    "fp32_groups_flat",  # FP16_Optimizer
    "single_partition_of_fp32_groups",  # ZeRO 1
)  # fmt: skip
"""Where DeepSpeed's optimizers keep flat tensors of their own."""

MicroBatches = Sequence[tuple[Tensor, Tensor]]


class Driver:
    """One competitor on one rank. Every rank calls the same methods in the same order."""

    recorder: Recorder
    optimizer: Any
    fewest = 1  # micro-batches of a step

    def prepare(self, accumulation: int, plan: SlicePlan) -> None:
        """The next steps have this many micro-batches, cut like this."""
        raise NotImplementedError

    def use_schedule(self, name: str) -> None:
        """The next steps run this one, where there is a choice."""

    def step(self, micro_batches: MicroBatches) -> float | None:
        """One optimizer step; the mean loss of its micro-batches, on ranks that know it."""
        raise NotImplementedError

    def schedule(self, accumulation: int, plan: SlicePlan) -> Schedule:
        """The order in which it runs, as one of our schedules."""
        raise NotImplementedError

    def parameters(self) -> Sequence[Tensor]:
        """Of this rank."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what earlier steps have left for the next one, except for parameters and optimizer states."""

    def destroy(self) -> None:
        """Give back what is held."""

    # -- what all have in common

    def remember_start(self) -> None:
        """Keep the parameters as they are now, for ``restart``."""
        self._start = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters()]

    def restart(self) -> None:
        """Parameters and optimizer states as they were at the start, so that all systems compute the same losses."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters(), self._start, strict=True):
                parameter.copy_(start)
            for state in self.states():
                state.zero_()
        refresh = getattr(self.optimizer, "refresh_fp32_params", None)
        if refresh is not None:  # the optimizers of DeepSpeed that keep weights of their own
            refresh()

    def states(self) -> list[Tensor]:
        """The tensors of the optimizer."""
        return [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]

    def copies(self) -> list[Tensor]:
        """What the optimizer keeps besides its states: weights in fp32 and the gradients that it sums in fp32."""
        return [t for name in _COPIES for t in getattr(self.optimizer, name, ())]

    def held_bytes(self) -> int:
        """Parameters, gradients that are there, optimizer states, and its copies."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return _bytes([*self.parameters(), *gradients, *self.states(), *self.copies()])


class StockDriver(Driver):
    """DeepSpeed's ``PipelineEngine``, or its DualPipeV."""

    def __init__(self, case: Case, job: Job) -> None:
        self._dualpipe = case.schedule == "dualpipev"
        self.fewest = 2 * job.work.stages if self._dualpipe else 1
        work = dataclasses.replace(job.work, accumulation=self.fewest)
        self._engine = build_engine(None, work, ds_config=job.ds_config, gpt=job.gpt, dualpipe=self._dualpipe)
        self._work = work
        self.recorder: Recorder = InstructionRecorder(self._engine)
        self.optimizer = self._engine.optimizer

    def prepare(self, accumulation: int, plan: SlicePlan) -> None:
        self._engine.set_train_batch_size(self._work.micro_batch * accumulation)

    def step(self, micro_batches: MicroBatches) -> float | None:
        return float(self._engine.train_batch(iter(micro_batches)))

    def schedule(self, accumulation: int, plan: SlicePlan) -> Schedule:
        if self._dualpipe:
            return of_dualpipev(self._work.stages, accumulation)
        return build("1f1b", self._work.stages, accumulation, 1)

    def parameters(self) -> list[Tensor]:
        return list(self._engine.module.parameters())

    def forget(self) -> None:
        self._engine.reset_activation_shape()
        for buffers in self._engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)

    def destroy(self) -> None:
        self._engine.destroy()


class TeraPipeDriver(Driver):
    """Our engine."""

    def __init__(self, case: Case, job: Job) -> None:
        self._schedule = case.schedule if case.schedule != AUTO else CUTS[case.cut][-1]  # until one is chosen
        section = {
            "enabled": True, "schedule": self._schedule, "schedule_options": case.schedule_options,
            "chunks_per_stage": case.chunks_per_stage, "slices": 1, "granularity_tokens": 1,
        }  # fmt: skip
        if job.ds_config is not None:
            section = {**job.ds_config.get("terapipe", {}), **section}
        self._engine = build_engine(section, job.work, ds_config=job.ds_config, gpt=job.gpt)
        self._work, self._case = job.work, case
        self.recorder = self._engine._tracer = EngineRecorder()
        self.optimizer = self._engine.optimizer

    def prepare(self, accumulation: int, plan: SlicePlan) -> None:
        self._engine.set_train_batch_size(self._work.micro_batch * accumulation)
        self._engine.use_slice_plan(plan, self._schedule)

    def use_schedule(self, name: str) -> None:
        self._schedule = name

    def step(self, micro_batches: MicroBatches) -> float | None:
        return float(self._engine.train_batch(iter(micro_batches)))

    def schedule(self, accumulation: int, plan: SlicePlan) -> Schedule:
        return build(
            self._schedule, self._work.stages, accumulation, plan.num_slices,
            chunks_per_stage=self._case.chunks_per_stage, **self._case.schedule_options,
        )  # fmt: skip

    def parameters(self) -> list[Tensor]:
        return list(self._engine.module.parameters())

    def forget(self) -> None:
        self._engine.slice_store.drop_free()

    def destroy(self) -> None:
        self._engine.destroy()


def build_driver(case: Case, job: Job) -> Driver:
    """The driver of a case, with its parameters at their start. A collective."""
    from terapipe_ds.bench.torch_pipeline import TorchDriver

    kinds = {"deepspeed": StockDriver, "terapipe": TeraPipeDriver, "torch": TorchDriver}
    driver: Driver = kinds[case.system](case, job)
    driver.remember_start()
    return driver


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
