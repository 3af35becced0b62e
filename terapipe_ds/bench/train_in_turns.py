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
from terapipe_ds.runtime.machine import device_name
from terapipe_ds.runtime.probe import synchronize
from terapipe_ds.runtime.staging import host_buffer, needs_staging, to_host

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
    drivers, errors = _build_all(job, Agreement(folder), position)
    going = [job.cases[index] for index in drivers]
    data = micro_batches(job.work, max([*job.accumulations, *(d.fewest for d in drivers.values())]), _vocabulary(job))
    bar = _bar(job, drivers)
    for index, driver in drivers.items():  # what is made at the first step, in whatever it allocates and compiles
        _say(bar, job.cases[index], "warm-up")
        position.at_case(index)
        driver.prepare(driver.fewest, SlicePlan((job.work.sequence_length,)))
        driver.step(data[: driver.fewest])
        bar.update()
    planned = PlannedCases.measure(job, going, folder, position)  # beside what is there while steps run
    runs: list[dict[str, Any]] = []
    lengths: set[int] = set()
    for accumulation in job.accumulations:
        here = _open_runs(job, accumulation, drivers, errors, planned, position)
        _measure_runs(job, accumulation, here, drivers, data, bar, position)
        runs += here
        lengths |= {n for run in here for n in run.get("slices", ())}
    bar.close()
    position.at_none()
    measured = SliceMeasurements(planned.costs, planned.memory, measure_links(job, sorted(lengths)))
    found: dict[str, Any] = {"runs": runs, "measured": measured}
    if job.device != "cpu":
        found["device"] = device_name(torch.device(job.device))
    return found, list(drivers.values())


def _vocabulary(job: Job) -> int:
    return int(gpt_config(job.work, job.gpt).vocab_size)


def _build_all(job: Job, agreement: Agreement, position: Position) -> tuple[dict[int, Driver], dict[int, str]]:
    """Return the drivers by the index of their case, and the errors of those that some rank cannot build."""
    drivers: dict[int, Driver] = {}
    errors: dict[int, str] = {}
    for index, case in enumerate(job.cases):
        problems = [job.problem(index, m) for m in job.accumulations if case.runs_at(m)]
        if problems and all(problems):
            continue
        position.at_case(index)
        problem = None
        try:
            drivers[index] = _DRIVERS[case.system](case, job)
            drivers[index].remember_start()
        except Exception as error:  # a case that cannot be had is a row that says why
            problem = str(error).split("\n")[0] or type(error).__name__
        problem = agreement.problem(problem, case.label)
        if problem:
            drivers.pop(index, None)
            errors[index] = problem
    return drivers, errors


def _open_runs(
    job: Job,
    accumulation: int,
    drivers: dict[int, Driver],
    errors: dict[int, str],
    planned: PlannedCases,
    position: Position,
) -> list[dict[str, Any]]:
    """Return a record per case of this accumulation, and get those ready that will run."""
    runs: list[dict[str, Any]] = []
    for index, case in enumerate(job.cases):
        if not case.runs_at(accumulation):
            continue
        run: dict[str, Any] = {"case": index, "accumulation": accumulation}
        runs.append(run)
        plan, problem = None, job.problem(index, accumulation) or errors.get(index)
        if problem is None:
            position.at_case(index, accumulation)
            plan, problem = _plan(job, case, accumulation, planned)
        if problem or plan is None:
            run["error"] = problem
            continue
        run |= {"slices": plan.lengths, "seconds": [], "losses": [], "events": []}
        drivers[index].use_schedule(planned.schedule(case, accumulation, plan))
        drivers[index].restart()
    return runs


def _plan(job: Job, case: Case, accumulation: int, planned: PlannedCases) -> tuple[SlicePlan | None, str | None]:
    """Return the slices of a case, or why there are none."""
    length = job.work.sequence_length
    try:
        if case.planned:
            return planned.plan(case, accumulation), None
        if isinstance(case.slices, tuple):
            if sum(case.slices) != length:
                raise ValueError(f"their lengths sum to {sum(case.slices)}")
            return SlicePlan(case.slices), None
        assert isinstance(case.slices, int)
        return SlicePlan.equal(length, case.slices, min(job.granularity, length // case.slices)), None
    except (ValueError, ZeroDivisionError) as error:
        what = "no plan" if case.planned else f"{case.slices} slices of {length} tokens"
        return None, f"{what}: {error}"


def _measure_runs(
    job: Job,
    accumulation: int,
    runs: list[dict[str, Any]],
    drivers: dict[int, Driver],
    data: MicroBatches,
    bar: Any,
    position: Position,
) -> None:
    """Make a step of each, in which its memory is counted, then the timed ones in turns."""
    going = [(run, drivers[run["case"]]) for run in runs if "error" not in run]
    batch = data[:accumulation]
    for turn in range(1 + job.pairs):
        for run, driver in going:
            _say(bar, job.cases[run["case"]], f"m={accumulation}, {'memory' if turn == 0 else f'turn {turn}'}")
            position.at_case(run["case"], accumulation)
            if turn == 0:
                plan = SlicePlan(tuple(run["slices"]))
                driver.prepare(accumulation, plan)
                run["schedule"] = driver.schedule(accumulation, plan)
                _memory_step(run, driver, batch)
            else:
                _timed_step(run, driver, batch)
            bar.update()


def _memory_step(run: dict[str, Any], driver: Driver, batch: MicroBatches) -> None:
    """Count the peak of tensor bytes of this system alone: what it holds before, and what the step adds at most."""
    from terapipe_ds.runtime.tensor_peak import AcceleratorPeak, TensorPeak

    driver.forget()
    gc.collect()  # what earlier systems left in cycles would go within this step, and count as freed by it
    held = driver.held_bytes()
    driver.recorder.on = False
    with AcceleratorPeak() if _on_accelerator() else TensorPeak() as peak:
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


def _bar(job: Job, drivers: dict[int, Driver]) -> Any:
    pairs = [(i, m) for i in drivers for m in job.accumulations if job.cases[i].runs_at(m)]
    runs = sum(not job.problem(i, m) for i, m in pairs)
    return progress_bar(torch_dist.get_rank(), len(drivers) + runs * (1 + job.pairs), "bench")


def _say(bar: Any, case: Case, what: str) -> None:
    bar.set_description(f"{case.label}, {what}")
