"""What does choosing the layers that recompute gain over recomputing everything, in the same memory?

`python -m studies.recompute` measures a small GPT on four pipeline ranks, sets a memory limit between what recomputing
everything needs and what recomputing nothing needs, and lets the planner choose (`"recompute": "auto"`). Three rows
for the same slices and schedule: nothing, everything, chosen. Each has the step as the simulator replays it with the
measured costs, the median of measured steps, and per stage the bytes above parameters and optimizer states, predicted
and measured exactly (`MemoryPeak`).

Where ranks share cores, a measured step tells the work of all stages rather than that of the busiest one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from studies.options import automatic_section, batches, measure_in_ranks, study_parser, write_report
from terapipe_ds.bench.ranks import Workload, build_engine, finish_rank, machine, prepare_rank
from terapipe_ds.files.atomic import write_text
from terapipe_ds.plan import SlicePlan

EXAMPLES = """  python -m studies.recompute
  python -m studies.recompute --limit 0.7 --slices 8 --micro-batches 8 --json recompute.json"""
SCHEDULE = "seq1f1b"


@dataclass(frozen=True)
class Row:
    """Hold one way to recompute; bytes are per stage, above parameters and optimizer states."""

    recompute: str
    layers: list[list[int]]  # that recompute, per stage
    predicted_s: float
    predicted_bytes: list[int]
    step_s: float = 0.0
    measured_bytes: tuple[int, ...] = ()

    def errors(self) -> list[float]:
        """Return predicted over measured less one, by stage."""
        return [p / m - 1 for p, m in zip(self.predicted_bytes, self.measured_bytes, strict=True)]


@dataclass(frozen=True)
class Case:
    """Describe the compared training."""

    slices: int
    micro_batches: int
    limit: float  # share of the way from recomputing everything (0) to nothing (1)
    steps: int
    granularity: int


# -- in each rank ----------------------------------------------------------------------------------------------------


def rank_main(rank: int, rendezvous: str, work: Workload, arguments: argparse.Namespace, out: str) -> None:
    """Measure all rows on this rank; rank 0 writes them to `out`."""
    prepare_rank(rank, work.stages, rendezvous)
    names = Case.__dataclass_fields__
    case = Case(**{name: getattr(arguments, name) for name in names})
    rows, limit = compare(work, case, Path(out).parent)
    if rank == 0:
        write_text(out, json.dumps({"rows": [asdict(row) for row in rows], "limit_bytes": limit}))
    finish_rank([])


def compare(work: Workload, case: Case, folder: Path) -> tuple[list[Row], float]:
    """Return the rows and the limit in bytes; `folder` keeps the profile. A collective over the ranks of a pipeline."""
    import torch.distributed as torch_dist

    section = automatic_section(case.granularity, folder)
    engine = build_engine(section, work)
    try:
        engine.train_batch(batches(work))  # measures
        torch_dist.barrier()  # rank 0 has written the measurements
        predicted, limit_bytes = predict(engine, work, case, folder)
    finally:
        engine.destroy()
    rows = []
    lengths = list(SlicePlan.equal(work.sequence_length, case.slices, case.granularity).lengths)
    for row in predicted:
        by_hand = {**section, "recompute": row.recompute, "slices": lengths}
        if row.recompute == "auto":
            by_hand["planner"] = {"cache_dir": str(folder), "memory_limit_gb": limit_bytes / 1e9}
        rows.append(_measured(by_hand, work, case, row))
    return rows, limit_bytes


def predict(engine: Any, work: Workload, case: Case, folder: Path) -> tuple[list[Row], float]:
    """Return the planner's prediction for each row, from the profile in `folder`, and the limit of the last."""
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.planner.layers.measured_parts import MeasuredParts
    from terapipe_ds.planner.recompute import choose_layers, recomputable_parts
    from terapipe_ds.planner.recompute.choose_layers import recompute_everything
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import Replay

    (path,) = folder.glob("profile-*.json")
    parts = recomputable_parts(
        MeasuredParts.of_profile(Profile.load(path)), [int(bound) for bound in engine.module.parts]
    )
    plan = SlicePlan.equal(work.sequence_length, case.slices, case.granularity)
    schedule = build(SCHEDULE, work.stages, case.micro_batches, case.slices)
    replay = Replay.of(schedule)

    def row(name: str, choice: Any) -> Row:
        peaks = replay.peak_bytes(plan, choice.memory)
        above = [peak - choice.memory.static_bytes(stage_id) for stage_id, peak in enumerate(peaks)]
        return Row(name, [list(ids) for ids in choice.layers], replay.makespan(plan, list(choice.costs)), above)

    nothing = choose_layers(parts, schedule, plan, 1e18)
    everything = recompute_everything(parts, plan, case.micro_batches)
    least, most = (max(replay.peak_bytes(plan, choice.memory)) for choice in (everything, nothing))
    limit_bytes = least + case.limit * (most - least)
    chosen = choose_layers(parts, schedule, plan, limit_bytes)
    return [row("off", nothing), row("full", everything), row("auto", chosen)], limit_bytes


def _measured(section: dict[str, Any], work: Workload, case: Case, row: Row) -> Row:
    """Return the row with the time and the bytes of steps."""
    import torch.distributed as torch_dist

    from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

    engine, data = build_engine(section, replace(work, accumulation=case.micro_batches)), batches(work)
    try:
        engine.train_batch(data)
        seconds = []
        for _ in range(case.steps):
            torch_dist.barrier()
            begin_s = time.perf_counter()
            engine.train_batch(data)
            seconds.append(time.perf_counter() - begin_s)
        engine.slice_store.pool.drop_free()  # as in a first step
        torch_dist.barrier()
        with MemoryPeak() as peak:
            engine.train_batch(data)
        own = _layers_of(engine)
    finally:
        engine.destroy()
    everyone: list[Any] = [None] * work.stages
    torch_dist.all_gather_object(everyone, (peak.grown_bytes, own))
    if row.recompute == "auto":
        row = replace(row, layers=[layers for _, layers in everyone])  # the layers that really did
    return replace(row, step_s=statistics.median(seconds), measured_bytes=tuple(grown for grown, _ in everyone))


def _layers_of(engine: Any) -> list[int]:
    """Return the layers of this stage that DeepSpeed checkpoints."""
    module = engine.module
    flags = module.is_checkpointable_results if module.activation_checkpoint_interval else []
    return [int(module._local_start) + index for index, is_checkpointed in enumerate(flags) if is_checkpointed]


# -- in the parent ---------------------------------------------------------------------------------------------------


def print_table(rows: list[Row], limit_bytes: float) -> None:
    """Print one line per row and stage."""
    from terapipe_ds.planner.ranking.report import shown_runs

    print(f"limit {limit_bytes / 1e6:.2f} MB per stage, parameters and optimizer states with it")
    head = f"{'recompute':<10}{'predicted':>11}{'measured':>10}"
    print(f"{head}   stage  layers       predicted MB  measured MB   error")
    for row in rows:
        start = f"{row.recompute:<10}{1e3 * row.predicted_s:>8.1f} ms{1e3 * row.step_s:>7.1f} ms"
        for stage_id, (layers, error) in enumerate(zip(row.layers, row.errors(), strict=True)):
            bytes_ = f"{row.predicted_bytes[stage_id] / 1e6:>12.2f}{row.measured_bytes[stage_id] / 1e6:>13.2f}"
            what = shown_runs(layers) or "none"
            print(f"{start if not stage_id else '':<31}   {stage_id:>5}  {what:<12}{bytes_}{error:>+9.1%}")
    full, auto = rows[1], rows[2]
    print(
        f"chosen against everything: {1 - auto.predicted_s / full.predicted_s:.1%} less time predicted, "
        f"{1 - auto.step_s / full.step_s:.1%} measured"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the command line; see the module's text."""
    parser = study_parser("recompute", __doc__, writes="machine, workload and all rows", examples=EXAMPLES)
    usual = {"stages": 4, "sequence_length": 512, "micro_batch": 1, "hidden": 128, "layers": 16, "heads": 4}
    usual |= {"slices": 4, "micro_batches": 8, "granularity": 128, "steps": 5}
    for name, default in usual.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default: %(default)s")
    what = "0 is what recomputing everything needs, 1 what recomputing nothing needs (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=0.5, help=what)
    arguments = parser.parse_args(argv)
    shape = {name: getattr(arguments, name) for name in Workload.__dataclass_fields__ if name != "accumulation"}
    work, this = Workload(accumulation=1, **shape), machine()
    measured = measure_in_ranks(rank_main, work, arguments)
    rows = [Row(**row) for row in measured["rows"]]
    print_table(rows, measured["limit_bytes"])
    write_report(arguments.json, machine=this, workload=asdict(work), **measured)


if __name__ == "__main__":
    main()
