"""Start the ranks of a benchmark, make rows of their measurements, and check that all systems learned the same.

After a failure all ranks end: ranks in a failed step wait for one another, and some messages will never be received.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import signal
import statistics
import tempfile
from collections.abc import Sequence
from operator import truediv
from pathlib import Path
from typing import Any

from terapipe_ds.bench.cases import AUTO, Job
from terapipe_ds.bench.metrics import Plans, SliceMeasurements, StepTrace, drift, ideal_bubble, replay_s, unsliced_s
from terapipe_ds.bench.ranks import (
    Position,
    RankError,
    finish_rank,
    gpt_config,
    keep_memory,
    machine,
    prepare_rank,
    spawn_ranks,
)
from terapipe_ds.costs.devices import peak_of_card
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.files.atomic import write_atomically
from terapipe_ds.files.user_json import DTYPE_NAMES, CommandError
from terapipe_ds.schedule import Schedule
from terapipe_ds.simulator import Replay, simulate
from terapipe_ds.timeline import Timeline
from terapipe_ds.timeline.waits import exposed_comm_s

_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
"""How far the losses after some steps may be apart, relatively: rounding grows with Adam's first steps."""


def run_benchmark(job: Job, preset: str) -> dict[str, Any]:
    """Run the benchmark; return the object that `--json` writes. Raises `CommandError` if a rank failed."""
    before = machine()
    if job.device == "cpu":
        keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn_ranks(rank_main, job.work.stages, job, folder)
        except RankError as error:
            raise CommandError(cause_of(error, Path(folder))) from None
        ranks = [pickle.loads(Path(folder, f"rank{rank}.pickle").read_bytes()) for rank in range(job.work.stages)]
    return result_of(job, preset, before, ranks)


def cause_of(error: RankError, folder: Path) -> str:
    """Return the last work of the first rank that failed, and why it ended, from the `Position`s in `folder`."""
    noted = {rank: Position(folder, rank).read() for rank in error.exit_codes}
    # a rank that left no reason failed first: the others' errors may be consequences of its end
    first = min(noted, key=lambda rank: noted[rank].get("time_s", 0.0))
    code, names = error.exit_codes[first], {-known: known.name for known in signal.Signals}
    ended = f"exit code {code}" if code >= 0 else f"signal {names.get(code, -code)}"
    reason = noted[first].get("reason", f"rank {first} ended with {ended}")
    if not noted[first].get("what"):
        return f"{reason}; what the rank said stands above"
    return f"{noted[first]['what']} failed: {reason}; leave it out with --systems, --schedules or --slices"


def rank_main(rank: int, rendezvous: str, job: Job, folder: str) -> None:
    """Run the job in one rank, which leaves `rank<r>.pickle` in `folder`."""
    prepare_rank(rank, job.work.stages, rendezvous, job.device, job.share_device)
    from terapipe_ds.bench.drivers.base import one_attention  # these import torch
    from terapipe_ds.bench.train_in_turns import measure_systems
    from terapipe_ds.runtime.links.staging import neighbours_staged

    config = gpt_config(job.work, job.gpt)
    position = Position(Path(folder), rank)
    with neighbours_staged(), one_attention(job.device, config.torch_dtype, config.head_dim) as attention:
        try:
            record, drivers = measure_systems(job, Path(folder), position)
        except Exception as error:
            position.failed(error)
            raise
        record["attention"] = attention
        write_atomically(Path(folder, f"rank{rank}.pickle"), lambda path: path.write_bytes(pickle.dumps(record)))
        finish_rank(drivers)


def result_of(job: Job, preset: str, machine_: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    runs = [
        MeasuredRun(job, records, ranks[0]["measured"]) for records in zip(*(r["runs"] for r in ranks), strict=True)
    ]
    rows = []
    for accumulation in job.accumulations:
        rows += _rows([run for run in runs if run.accumulation == accumulation])
    peak = _peak_flops(job, ranks[0].get("device"))
    for row in rows:
        if "error" not in row:
            row["mfu"] = row["model_flops_per_s"] / peak if peak else None
    workload = {**dataclasses.asdict(job.work), "model": job.gpt, "pairs": job.pairs, "device": job.device}
    del workload["accumulation"]
    if job.share_device:
        workload["share_device"] = True
    if "device" in ranks[0]:
        machine_ = {**machine_, "device": ranks[0]["device"]}
    attention = {"attention": ranks[0]["attention"]} if "attention" in ranks[0] else {}
    top = {**attention, **({"peak_flops_per_s": peak} if peak else {})}
    return {"machine": machine_, "preset": preset, "workload": workload, **top, "runs": rows}


def _peak_flops(job: Job, device: str | None) -> float | None:
    """Return the peak of one device, given by the user or by the card that the name of a GPU identifies."""
    if job.peak_tflops is not None:
        return 1e12 * job.peak_tflops
    return None if device is None else peak_of_card(device, _dtype_of_products(job))


def _dtype_of_products(job: Job) -> str:
    """Return the dtype of the model or of autocast, whose default in torch depends on the device."""
    autocast, usual = (job.ds_config or {}).get("torch_autocast") or {}, "bf16" if job.device == "cpu" else "fp16"
    name = autocast.get("dtype") or usual if autocast.get("enabled") else (job.gpt or {}).get("dtype")
    return str(name or "float32").removeprefix("torch.")


class MeasuredRun:
    """Hold one case at one accumulation, as all ranks saw it; `records` has one for each rank."""

    def __init__(self, job: Job, records: Sequence[dict[str, Any]], measured: SliceMeasurements) -> None:
        self.job, self.measured = job, measured
        first = records[0]
        self.case, self.accumulation = job.cases[first["case"]], int(first["accumulation"])
        self.error: str | None = next((record["error"] for record in records if record.get("error")), None)
        if self.error is not None:
            return

        def by_step(key: str) -> list[tuple[Any, ...]]:
            return list(zip(*(record[key] for record in records), strict=True))

        self.plans: Plans = first["plans"]
        self.schedule: Schedule = first["schedule"]
        self.traces = list(map(StepTrace, by_step("events")))
        self.losses = [next(loss for loss in reversed(ranks) if loss is not None) for ranks in by_step("losses")]
        self.peak_bytes = [record["peak_bytes"] for record in records]
        self.static_bytes = [record["static_bytes"] for record in records]
        # the CPU time of the process says nothing about work on a device
        recorded = self.traces if job.device == "cpu" else []
        replays = [replay_s(t, self.schedule, self.plans, measured.links, blocking=self.is_stock) for t in recorded]
        self.replayed_s = statistics.median(seconds for seconds, _ in replays) if replays else None
        # with fewer cores than stages the wall clock means nothing
        self.step_s_all = [s for s, _ in replays] if job.replayed else list(map(max, by_step("seconds")))
        self.timelines = [t for _, t in replays] if job.replayed else [trace.timeline() for trace in self.traces]
        clock = "cpu" if job.replayed else "wall"  # reduce and optimizer, of the slowest stage
        self.closing_s = statistics.median(max(trace.closing_s(clock)) for trace in self.traces)

    @property
    def is_stock(self) -> bool:
        """Return whether this is DeepSpeed's own 1F1B, the baseline of all."""
        return (self.case.system, self.case.schedule) == ("deepspeed", "1f1b")

    @property
    def is_unsliced(self) -> bool:
        """Return whether each F and B takes a whole micro-batch through a whole stage."""
        return max(self.schedule.num_slices) == 1 and self.schedule.chunks_per_stage == 1

    def identity(self) -> dict[str, Any]:
        """Return the fields that name the run, even a failed one."""
        plans = self.plans if self.error is None else ()
        most = max(plans, key=lambda plan: plan.num_slices, default=None)
        slices: dict[str, Any] = {"slices": [] if most is None else list(most.lengths)}
        if len(set(plans)) > 1:  # otherwise the value above holds for all micro-batches
            slices["plans"] = [list(plan.lengths) for plan in plans]
        name, label = self.case.schedule, self.case.label
        if name == AUTO and self.error is None:
            name = f"{AUTO} ({self.schedule.name})"
            label = label.replace(AUTO, name, 1)
        sizes = {**slices, "accumulation": self.accumulation, "stages": self.job.work.stages}
        kinds = {"planned": self.case.planned, "replayed": self.job.replayed}
        return {"system": self.case.system, "schedule": name, "label": label, **sizes, **kinds}

    def disagreement(self, reference: MeasuredRun) -> str | None:
        """Return a sentence if the system did not learn, or not the same as the reference; None if it did."""
        dtype = _dtype_of_products(self.job)
        tolerance = _TOLERANCE.get(DTYPE_NAMES.get(dtype, dtype), _TOLERANCE["float16"])  # such as "half"
        for step, (own, other) in enumerate(zip(self.losses, reference.losses, strict=True), start=1):
            if not math.isfinite(own):
                return f"its loss in step {step} is {own}: give a config and a model whose losses are finite"
            if not math.isclose(own, other, rel_tol=tolerance):
                label = reference.case.label
                return f"its loss in step {step} is {own:.6f}, that of {label} {other:.6f}: they must agree"
        return None

    def predicted_s(self) -> float | None:
        """Predict a step from the costs measured before: simulated makespan, then measured reduce and optimizer."""
        costs = self.measured.costs.get(self.case.cut)
        if costs is None or self.case.system != "terapipe":
            return None
        return float(simulate(self.schedule, self.plans, costs).makespan_s) + self.closing_s

    def predicted_peak_bytes(self) -> list[int] | None:
        """Return the bytes that the schedule, or the stock engine's order, needs by our engine's memory model."""
        memory = self.measured.memory.get(self.case.cut)
        if memory is None or not (self.case.system == "terapipe" or self.is_stock):
            return None
        return list(Replay.of(self.schedule).peak_bytes(self.plans, memory))

    def figures(self, stock: MeasuredRun | None, unsliced: Sequence[float] | None) -> dict[str, Any]:
        """Return all figures of its row."""
        steps, work, bubble = self.step_s_all, self.job.work, ideal_bubble(self.schedule)
        step_s, config = statistics.median(steps), gpt_config(work, self.job.gpt)
        names = {field.name for field in dataclasses.fields(ModelSize)} & set(type(config).model_fields)
        size = ModelSize(name="bench", **{name: getattr(config, name) for name in names})
        sequences, devices = self.accumulation * work.micro_batch, 1 if self.job.share_device else work.stages
        bound = None
        if unsliced is not None:  # a schedule without costs of its own: no bubble but the ideal one
            bound = max(unsliced) * self.accumulation / (1.0 - bubble) + self.closing_s
        costs = self.measured.costs.get("whole stages")
        of_median = self.timelines[steps.index(statistics.median_low(steps))]
        drawn = Timeline(of_median.num_stages, tuple(of_median.computations()), self.case.label)
        # for replays and devices, wall and processor time of a process do not compare
        has_cores = self.job.device == "cpu" and not self.job.replayed
        return {
            "step_s": step_s,
            "step_s_all": steps,
            "spread_s": [min(steps), max(steps)],
            "tokens_per_s": sequences * work.sequence_length / step_s,
            "model_flops_per_s": sequences * size.training_flops(work.sequence_length) / step_s / devices,
            "bound_s": bound,
            "predicted_s": self.predicted_s(),
            "replayed_s": self.replayed_s,
            "closing_s": self.closing_s,
            "ratio_to_stock": None if stock is None else statistics.median(map(truediv, stock.step_s_all, steps)),
            "ratio_to_bound": None if bound is None else bound / step_s,
            "drift": None if unsliced is None or costs is None else drift(unsliced, costs, work.sequence_length),
            "off_core_s": statistics.median(trace.off_core_s() for trace in self.traces) if has_cores else None,
            "bubble": statistics.median(timeline.bubble_fraction for timeline in self.timelines),
            "ideal_bubble": bubble,
            "peak_bytes": self.peak_bytes,
            "static_bytes": self.static_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes(),
            "exposed_comm_s": statistics.median(
                max(exposed_comm_s(t, self.schedule.placement)) for t in self.timelines
            ),
            "loss": self.losses[-1],
            "timeline": json.loads(drawn.to_json()),
        }


def _rows(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """Return the rows of one accumulation, which share a baseline and the seconds of an unsliced micro-batch."""
    going = [run for run in runs if run.error is None]
    stock = next((run for run in going if run.is_stock), None)
    whole = [run.timelines for run in going if run.is_unsliced]
    unsliced = unsliced_s(whole, runs[0].accumulation) if whole else None
    rows = []
    for run in runs:
        problem = run.error or run.disagreement(stock or going[0])
        rows.append({**run.identity(), **({"error": problem} if problem else run.figures(stock, unsliced))})
    return rows
