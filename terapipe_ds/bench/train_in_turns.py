"""Train every system on the same data from the same weights, in turns (A B C A B C ...); this runs in each rank.

All systems live in the same processes, one per stage. So they share the cores, the allocator (which keeps freed
memory, see `ranks.keep_memory`) and the machine's other load. In processes of their own each would have an allocator
with its own history, and the idle ones would still take memory and, at each turn, a wake-up.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator

from terapipe_ds.bench.cases import AUTO, CUTS, Case, Job
from terapipe_ds.bench.drivers.base import Driver, MicroBatches
from terapipe_ds.bench.drivers.deepspeed import StockDriver, TeraPipeDriver
from terapipe_ds.bench.drivers.torch_pipeline import TorchDriver
from terapipe_ds.bench.metrics import Plans, SliceMeasurements
from terapipe_ds.bench.ranks import Position, build_engine, gpt_config, micro_batches, problem_of_any_rank, progress_bar
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import Profile
from terapipe_ds.files.atomic import write_text
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import PlanResult, best_schedule, plan_slices
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.runtime.agreement import from_rank_0
from terapipe_ds.runtime.profiling.cache import memory_of
from terapipe_ds.runtime.profiling.key import device_name
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.schedule import SEARCH, SPLIT_SCHEDULES, to_csv

_PINGS = 5
_DRIVERS: dict[str, Callable[[Case, Job], Driver]] = {
    "deepspeed": StockDriver,
    "terapipe": TeraPipeDriver,
    "torch": TorchDriver,
}


def measure_systems(job: Job, folder: Path, position: Position) -> tuple[dict[str, Any], list[Driver]]:
    """Return this rank's measurements, as its record, and the drivers, which the caller closes. A collective.

    Each of `runs` has `case` (its index), `accumulation`, and either `error` or times, losses, events and bytes.
    """
    turns = _Turns(job, folder, position)
    runs = [run for accumulation in job.accumulations for run in turns.measure(accumulation)]
    turns.bar.close()
    position.at()
    lengths = sorted({n for run in runs for plan in run.get("plans", ()) for n in plan.lengths})
    planned = turns.planned
    measured = SliceMeasurements(planned.costs, planned.memory, measure_links(job, lengths))
    record: dict[str, Any] = {"runs": runs, "measured": measured}
    if job.device != "cpu":
        record["device"] = device_name(torch.device(job.device))
    return record, list(turns.drivers.values())


class _Turns:
    """Hold the systems of a job on this rank: built, warmed up, and with their plans ready."""

    def __init__(self, job: Job, folder: Path, position: Position) -> None:
        self.job, self.position = job, position
        self.drivers: dict[int, Driver] = {}  # by the index of their case
        self.errors: dict[int, str] = {}  # for the cases that some rank cannot build
        self._build_all()
        runs = [(i, m) for i in self.drivers for m in job.accumulations if job.cases[i].runs_at(m)]
        steps = (1 + job.pairs) * sum(not job.problem(i, m) for i, m in runs)
        self.bar = progress_bar(torch_dist.get_rank(), len(self.drivers) + steps, "bench")
        most = max([*job.accumulations, *(driver.fewest for driver in self.drivers.values())])
        self.data = micro_batches(job.work, most, int(gpt_config(job.work, job.gpt).vocab_size))
        for index, driver in self.drivers.items():  # the first step allocates and compiles
            self._begin(index, "warm-up")
            driver.prepare(driver.fewest, (SlicePlan((job.work.sequence_length,)),) * driver.fewest)
            driver.step(self.data[: driver.fewest])
            self.bar.update()
        # beside the memory that is in use while steps run
        self.planned = PlannedCases.measure(job, [job.cases[index] for index in self.drivers], folder, position)

    def _build_all(self) -> None:
        for index, case in enumerate(self.job.cases):
            problems = [self.job.problem(index, m) for m in self.job.accumulations if case.runs_at(m)]
            if problems and all(problems):
                continue
            self.position.at(case.label)
            problem = None
            try:
                self.drivers[index] = _DRIVERS[case.system](case, self.job)
                self.drivers[index].remember_start()
            except Exception as error:  # a case that cannot be built becomes a row that says why
                problem = first_words(error)
            problem = problem_of_any_rank(problem, f"{index}: {case.label}")
            if problem:
                self.drivers.pop(index, None)
                self.errors[index] = problem

    def _begin(self, index: int, what: str, accumulation: int | None = None) -> None:
        self.bar.set_description(f"{self.job.cases[index].label}, {what}")
        self.position.at(self.job.cases[index].label + (f" at m = {accumulation}" if accumulation else ""))

    def measure(self, accumulation: int) -> list[dict[str, Any]]:
        """Return a record per case: first take a step of each, which counts its memory, then timed ones in turns."""
        runs = [self._ready(i, accumulation) for i, case in enumerate(self.job.cases) if case.runs_at(accumulation)]
        going = [(run, self.drivers[run["case"]]) for run in runs if "error" not in run]
        batch = self.data[:accumulation]
        for turn in range(1 + self.job.pairs):
            for run, driver in going:
                what = f"turn {turn}" if turn else "memory"
                self._begin(run["case"], f"m={accumulation}, {what}", accumulation)
                if turn:
                    _timed_step(run, driver, batch)
                else:
                    driver.prepare(accumulation, run["plans"], run["order"])
                    run["schedule"] = driver.schedule(accumulation, run["plans"])
                    _memory_step(run, driver, batch)
                self.bar.update()
        return runs

    def _ready(self, index: int, accumulation: int) -> dict[str, Any]:
        """Return the record of a case; the case is ready to run, or the record has an error."""
        case, run = self.job.cases[index], {"case": index, "accumulation": accumulation}
        problem = self.job.problem(index, accumulation) or self.errors.get(index)
        if problem is not None:
            return {**run, "error": problem}
        self.position.at(f"{case.label} at m = {accumulation}")
        try:
            plans, name = self._choice(case, accumulation)
        except (ValueError, ZeroDivisionError) as error:
            what = "no plan" if case.planned else f"{case.slices} slices of {self.job.work.sequence_length} tokens"
            return {**run, "error": f"{what}: {error}"}
        self.drivers[index].restart()
        return {**run, "plans": plans, "order": name, "seconds": [], "losses": [], "events": []}

    def _choice(self, case: Case, accumulation: int) -> tuple[Plans, str]:
        """Return the slices of each micro-batch, and the name of the schedule or the path of its order."""
        length = self.job.work.sequence_length
        if case.schedule == SEARCH:
            return self.planned.found(case, accumulation)
        if isinstance(case.slices, str):
            plan = self.planned.plan(case, accumulation)
        elif isinstance(case.slices, int):
            plan = SlicePlan.equal(length, case.slices, min(self.job.granularity, length // case.slices))
        elif sum(case.slices) != length:
            raise ValueError(f"their lengths sum to {sum(case.slices)}")
        else:
            plan = SlicePlan(case.slices)
        return (plan,) * accumulation, self.planned.schedule(case, accumulation, plan)


def first_words(error: Exception) -> str:
    """Return the first line of an error for a row, and those that follow where the first is a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    more = 2 if "validation error" in lines[0] else lines[0].endswith(":")  # pydantic's: the key, what is wrong
    return " ".join(lines[: 1 + more])


def _memory_step(run: dict[str, Any], driver: Driver, batch: MicroBatches) -> None:
    """Count the peak of tensor bytes of this system alone: its bytes before the step, plus the most that it adds."""
    driver.forget()
    gc.collect()  # garbage of earlier systems would be collected within this step, and count as freed by it
    held = driver.held_bytes()
    driver.recorder.listens = False
    with MemoryPeak() as peak:
        run["losses"].append(driver.step(batch))
    driver.recorder.listens = True
    run["peak_bytes"] = held + peak.grown_bytes
    parameters = sum(p.numel() * p.element_size() for p in driver.parameters())
    run["static_bytes"] = held + parameters  # with the gradients, which exist for a part of the step


def _timed_step(run: dict[str, Any], driver: Driver, batch: MicroBatches) -> None:
    """Make a step by the wall clock, and record its events.

    On an accelerator, recording waits for the device at every action, so that the step differs from a user's. There
    the timed step is not recorded; one more step is.
    """
    recorder, is_apart = driver.recorder, not get_accelerator().is_synchronized_device()
    recorder.clear()
    recorder.listens = not is_apart
    get_accelerator().synchronize()
    torch_dist.barrier()
    begin_s = time.perf_counter()
    run["losses"].append(driver.step(batch))
    get_accelerator().synchronize()  # stages without a loss to read have only queued their last work
    run["seconds"].append(time.perf_counter() - begin_s)
    recorder.listens = True
    if is_apart:
        recorder.clear()
        torch_dist.barrier()
        run["losses"].append(driver.step(batch))
    run["events"].append(recorder.events)


def measure_links(job: Job, lengths: list[int]) -> dict[int, float]:
    """Return the seconds of a message by its tokens, for replays: half the median round trip of stages 0 and 1."""
    if job.work.stages == 1 or job.device != "cpu":  # on devices nothing is replayed
        return {}
    config = gpt_config(job.work, job.gpt)
    rank, seconds = torch_dist.get_rank(), {}
    for tokens in lengths:
        message = torch.zeros(job.work.micro_batch, tokens, config.hidden_size, dtype=config.torch_dtype)
        torch_dist.barrier()
        trips = [_round_trip(rank, message) for _ in range(1 + _PINGS)] if rank < 2 else [0.0, 0.0]
        seconds[tokens] = statistics.median(trips[1:]) / 2
    torch_dist.barrier()
    return seconds


def _round_trip(rank: int, message: torch.Tensor) -> float:
    """Time a message to the other rank and back."""
    begin_s = time.perf_counter()
    for exchange in (torch_dist.send, torch_dist.recv) if rank == 0 else (torch_dist.recv, torch_dist.send):
        exchange(message, 1 - rank)
    return time.perf_counter() - begin_s


@dataclass
class PlannedCases:
    """Hold the measurements before the first turn, by the cut of the layers, and the plans from them."""

    job: Job
    folder: Path
    # in processor time with fewer cores than stages, as the replayed steps
    costs: dict[str, list[CostModel]] = field(default_factory=dict)
    memory: dict[str, MemoryModel] = field(default_factory=dict)

    @classmethod
    def measure(cls, job: Job, cases: Sequence[Case], folder: Path, position: Position) -> PlannedCases:
        """Let engines measure their slices as `"slices": "auto"` does. A collective.

        Engines run whole stages, and each other cut for which some of `cases` need a plan (all cases can be built).
        """
        planned, ours = cls(job, folder), [case for case in cases if case.system == "terapipe"]
        compiles = (job.ds_config or {}).get("terapipe", {}).get("compile", False)
        for cut, case in {case.cut if case.needs_costs else "whole stages": case for case in ours}.items():
            position.at(f"the costs of {cut}, which the plans of {case.label} need,")
            one = Case("terapipe", CUTS[cut][-1]) if cut in CUTS else case
            if compiles and one.schedule in SPLIT_SCHEDULES:  # which compiled layers do not run
                one = case
            planned._measure(cut, one, folder / cut.replace(" ", "-"))
        return planned

    def _measure(self, cut: str, case: Case, folder: Path) -> None:
        job, left_out = self.job, ("schedule_options", "trace_dir")
        # recompute, links and the like cost time in the steps, so they cost it here
        given = {k: v for k, v in (job.ds_config or {}).get("terapipe", {}).items() if k not in left_out}
        section = {**given, "enabled": True, "schedule": case.schedule, "chunks_per_stage": case.chunks_per_stage}
        section |= {"slices": "auto", "granularity_tokens": job.shortest, "planner": {"cache_dir": str(folder)}}
        if given.get("recompute") == "auto":  # with slices by hand, as in the steps, all layers recompute
            section["recompute"] = "full"
        if len(given.get("partition") or ()) != 1 + job.work.stages * case.chunks_per_stage:
            section.pop("partition", None)
        work = dataclasses.replace(job.work, accumulation=1)
        engine = build_engine(section, work, ds_config=job.ds_config, gpt=job.gpt)
        engine.slice_clock = time.process_time if job.replayed else None
        engine.train_batch(iter(micro_batches(work, 1, int(gpt_config(work, job.gpt).vocab_size))))
        engine.destroy()
        torch_dist.barrier()  # rank 0 has written the profile
        (path,) = folder.glob("profile-*.json")
        profile = Profile.load(path)
        memory = memory_of(profile)
        if memory is None:
            raise ValueError("no memory of slices was measured: leave out the profiler in --config that prevents it")
        self.memory[cut], self.costs[cut] = memory, CostModel.from_profile(profile)

    def plan(self, case: Case, accumulation: int) -> SlicePlan:
        """Return the planner's plan, the same on all ranks, or raise `ValueError` on all of them. A collective."""
        return from_rank_0(lambda: self._result(case, accumulation).plans[0])

    def found(self, case: Case, accumulation: int) -> tuple[Plans, str]:
        """Return the plans and the file of an order that a search finds for the costs, as `plan` does. A collective."""

        def find() -> tuple[Plans, str]:
            result = self._result(case, accumulation)
            order = to_csv(result.build())
            path = self.folder / f"order-{hashlib.sha256(order.encode()).hexdigest()[:16]}.csv"
            write_text(path, order)
            return result.plans, str(path)

        return from_rank_0(find)

    def _result(self, case: Case, accumulation: int) -> PlanResult:
        work, costs = self.job.work, self.costs[case.cut]
        sizes = work.sequence_length, work.stages, accumulation, self.job.granularity, case.schedule, case.max_slices
        options: Any = {"chunks_per_stage": case.chunks_per_stage, "schedule_options": dict(case.options)}
        options["with_order"] = False  # the table names the schedule that "auto" runs; "search" has a row of its own
        return plan_slices(costs, *sizes, **options)

    def schedule(self, case: Case, accumulation: int, plan: SlicePlan) -> str:
        """Return the case's schedule; for "auto", the best for `plan` with one part per stage."""
        if case.schedule != AUTO:
            return case.schedule
        return best_schedule(self.costs[case.cut], plan, self.job.work.stages, accumulation, with_order=False).schedule
