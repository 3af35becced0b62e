"""Train every system on the same data from the same weights, in turns (A B C A B C ...); this runs in each rank.

All systems live in the same processes, one per stage. So they share the cores, the allocator (which keeps what is
freed, see `ranks.keep_memory`) and whatever else the machine does; processes of their own would each have an
allocator with a past of its own, and the idle ones would still take memory and, at each turn, a wake-up.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator

from terapipe_ds.bench.attempts import Position
from terapipe_ds.bench.cases import Case, Job
from terapipe_ds.bench.drivers.base import Driver, MicroBatches
from terapipe_ds.bench.drivers.deepspeed import StockDriver, TeraPipeDriver
from terapipe_ds.bench.drivers.torch_pipeline import TorchDriver
from terapipe_ds.bench.metrics import SliceMeasurements
from terapipe_ds.bench.planned_cases import PlannedCases
from terapipe_ds.bench.ranks import Agreement, gpt_config, micro_batches, progress_bar
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.links.staging import host_buffer, needs_staging, to_host
from terapipe_ds.runtime.profiling.key import device_name
from terapipe_ds.runtime.profiling.slice_timer import synchronize

_PINGS = 5
_DRIVERS: dict[str, Callable[[Case, Job], Driver]] = {
    "deepspeed": StockDriver,
    "terapipe": TeraPipeDriver,
    "torch": TorchDriver,
}


def measure_systems(job: Job, folder: Path, position: Position) -> tuple[dict[str, Any], list[Driver]]:
    """Return what this rank has measured, in the form of its record, and the drivers, to be closed. A collective.

    Each of `runs` has `case` (its index), `accumulation`, and either `error` or times, losses, events and bytes.
    """
    turns = _Turns(job, folder, position)
    runs = [run for accumulation in job.accumulations for run in turns.measure(accumulation)]
    turns.bar.close()
    position.at_none()
    lengths = sorted({n for run in runs for n in run.get("slices", ())})
    measured = SliceMeasurements(turns.planned.costs, turns.planned.memory, measure_links(job, lengths))
    record: dict[str, Any] = {"runs": runs, "measured": measured}
    if job.device != "cpu":
        record["device"] = device_name(torch.device(job.device))
    return record, list(turns.drivers.values())


class _Turns:
    """The systems of a job on this rank: built, warmed up, and with their plans ready."""

    def __init__(self, job: Job, folder: Path, position: Position) -> None:
        self.job, self.position = job, position
        self.drivers: dict[int, Driver] = {}  # by the index of their case
        self.errors: dict[int, str] = {}  # of the cases that some rank cannot build
        self._build_all(Agreement(folder))
        self.bar = self._bar()
        most = max([*job.accumulations, *(driver.fewest for driver in self.drivers.values())])
        self.data = micro_batches(job.work, most, int(gpt_config(job.work, job.gpt).vocab_size))
        for index, driver in self.drivers.items():  # what the first step makes, in whatever it allocates and compiles
            self._begin(index, "warm-up")
            driver.prepare(driver.fewest, SlicePlan((job.work.sequence_length,)))
            driver.step(self.data[: driver.fewest])
            self.bar.update()
        # beside what is there while steps run
        self.planned = PlannedCases.measure(job, [job.cases[index] for index in self.drivers], folder, position)

    def _build_all(self, agreement: Agreement) -> None:
        for index, case in enumerate(self.job.cases):
            problems = [self.job.problem(index, m) for m in self.job.accumulations if case.runs_at(m)]
            if problems and all(problems):
                continue
            self.position.at_case(index)
            problem = None
            try:
                self.drivers[index] = _DRIVERS[case.system](case, self.job)
                self.drivers[index].remember_start()
            except Exception as error:  # a case that cannot be had is a row that says why
                problem = str(error).split("\n")[0] or type(error).__name__
            problem = agreement.problem(problem, case.label)
            if problem:
                self.drivers.pop(index, None)
                self.errors[index] = problem

    def _bar(self) -> Any:
        pairs = [(i, m) for i in self.drivers for m in self.job.accumulations if self.job.cases[i].runs_at(m)]
        runs = sum(not self.job.problem(i, m) for i, m in pairs)
        return progress_bar(torch_dist.get_rank(), len(self.drivers) + runs * (1 + self.job.pairs), "bench")

    def _begin(self, index: int, what: str, accumulation: int | None = None) -> None:
        self.bar.set_description(f"{self.job.cases[index].label}, {what}")
        self.position.at_case(index, accumulation)

    def measure(self, accumulation: int) -> list[dict[str, Any]]:
        """Return a record per case: first a step of each, in which its memory is counted, then timed ones in turns."""
        runs = [self._open(i, accumulation) for i, case in enumerate(self.job.cases) if case.runs_at(accumulation)]
        going = [(run, self.drivers[run["case"]]) for run in runs if "error" not in run]
        batch = self.data[:accumulation]
        for turn in range(1 + self.job.pairs):
            for run, driver in going:
                what = "memory" if turn == 0 else f"turn {turn}"
                self._begin(run["case"], f"m={accumulation}, {what}", accumulation)
                if turn == 0:
                    plan = SlicePlan(run["slices"])
                    driver.prepare(accumulation, plan)
                    run["schedule"] = driver.schedule(accumulation, plan)
                    _memory_step(run, driver, batch)
                else:
                    _timed_step(run, driver, batch)
                self.bar.update()
        return runs

    def _open(self, index: int, accumulation: int) -> dict[str, Any]:
        """Return the record of a case, which is ready to run, or has an error."""
        case, run = self.job.cases[index], {"case": index, "accumulation": accumulation}
        problem = self.job.problem(index, accumulation) or self.errors.get(index)
        if problem is not None:
            return {**run, "error": problem}
        self.position.at_case(index, accumulation)
        try:
            plan = self._plan(case, accumulation)
        except (ValueError, ZeroDivisionError) as error:
            what = "no plan" if case.planned else f"{case.slices} slices of {self.job.work.sequence_length} tokens"
            return {**run, "error": f"{what}: {error}"}
        self.drivers[index].use_schedule(self.planned.schedule(case, accumulation, plan))
        self.drivers[index].restart()
        return {**run, "slices": plan.lengths, "seconds": [], "losses": [], "events": []}

    def _plan(self, case: Case, accumulation: int) -> SlicePlan:
        length = self.job.work.sequence_length
        if isinstance(case.slices, str):
            return self.planned.plan(case, accumulation)
        if isinstance(case.slices, int):
            return SlicePlan.equal(length, case.slices, min(self.job.granularity, length // case.slices))
        if sum(case.slices) != length:
            raise ValueError(f"their lengths sum to {sum(case.slices)}")
        return SlicePlan(case.slices)


def _memory_step(run: dict[str, Any], driver: Driver, batch: MicroBatches) -> None:
    """Count the peak of tensor bytes of this system alone: what it holds before, and what the step adds at most."""
    from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

    driver.forget()
    gc.collect()  # what earlier systems left in cycles would go within this step, and count as freed by it
    held = driver.held_bytes()
    driver.recorder.on = False
    with MemoryPeak() as peak:
        run["losses"].append(driver.step(batch))
    driver.recorder.on = True
    run["peak_bytes"] = held + peak.grown_bytes
    parameters = sum(p.numel() * p.element_size() for p in driver.parameters())
    run["static_bytes"] = held + parameters  # with the gradients, which are there for a part of the step


def _timed_step(run: dict[str, Any], driver: Driver, batch: MicroBatches) -> None:
    """Make a step by the wall clock, and record its events.

    To record, an accelerator is waited for at every action, which is another step than the one that users have. There
    the timed step is not recorded, and one more is.
    """
    recorder, apart = driver.recorder, _on_accelerator()
    recorder.clear()
    recorder.on = not apart
    synchronize()
    torch_dist.barrier()
    begin_s = time.perf_counter()
    run["losses"].append(driver.step(batch))
    synchronize()  # stages without a loss to read have only queued their last work
    run["seconds"].append(time.perf_counter() - begin_s)
    recorder.on = True
    if apart:
        recorder.clear()
        torch_dist.barrier()
        run["losses"].append(driver.step(batch))
    run["events"].append(recorder.events)


def measure_links(job: Job, lengths: list[int]) -> dict[int, float]:
    """Return the seconds of a message by its tokens: half the median round trip between stages 0 and 1."""
    if job.work.stages == 1:
        return {}
    config = gpt_config(job.work, job.gpt)
    rank, found = torch_dist.get_rank(), {}
    device = torch.device(job.device_of(rank))
    staged = needs_staging(None, device)
    for tokens in lengths:
        message = torch.zeros(job.work.micro_batch, tokens, config.hidden_size, dtype=config.torch_dtype, device=device)
        torch_dist.barrier()
        trips = [_round_trip(rank, message, staged) for _ in range(1 + _PINGS)] if rank < 2 else [0.0, 0.0]
        found[tokens] = statistics.median(trips[1:]) / 2
    torch_dist.barrier()
    return found


def _round_trip(rank: int, message: torch.Tensor, staged: bool) -> float:
    """Time a message to the other rank and back; `staged`: by way of the host, as the engine's messages are then."""
    synchronize()
    begin_s = time.perf_counter()
    for sends in (True, False) if rank == 0 else (False, True):
        if sends:
            torch_dist.send(to_host(message) if staged else message, 1 - rank)
        elif staged:
            buffer = host_buffer(tuple(message.shape), message.dtype, message.device)
            torch_dist.recv(buffer, 1 - rank)
            message.copy_(buffer)
        else:
            torch_dist.recv(message, 1 - rank)
    synchronize()  # NCCL's calls return when they are queued
    return time.perf_counter() - begin_s


def _on_accelerator() -> bool:
    """Return whether work is queued on a device that runs beside this process."""
    return not get_accelerator().is_synchronized_device()
