"""Step time of DeepSpeed's stock engine and of token slices, side by side.

``python -m terapipe_ds.bench.step`` starts one process per stage, each pinned to its own core, builds every system with
the same model, data and partition in the same processes, and runs their steps in turns (A B C A B C ...), so that
whatever else the machine does meets all of them alike. Printed: the median step, its spread, and the median of the
ratios of each turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terapipe_ds.bench.ranks import (
    Workload,
    batches,
    build_engine,
    finish_rank,
    machine,
    prepare_rank,
    progress_bar,
    spawn_ranks,
)

EXAMPLES = """examples:
  python -m terapipe_ds.bench.step                              stock, slices: 1, and 8 slices; 2 stages, 2048 tokens
  python -m terapipe_ds.bench.step --slices 2,4,8,16 --schedule terapipe
  python -m terapipe_ds.bench.step --plan 344,304,272,256,240,224,208,200
  python -m terapipe_ds.bench.step --accumulation 4 --steps 5 --json step.json
"""


@dataclass(frozen=True)
class System:
    """One competitor: DeepSpeed's stock engine (``section`` None) or ours with a ``terapipe`` section."""

    name: str
    section: dict[str, Any] | None


def bubble_bound(stages: int, accumulation: int, slices: int) -> float:
    """The best ratio that slices can give with equal stages and no overhead: both bubbles by the formula of the
    paper."""
    return (accumulation + stages - 1) / accumulation * (accumulation * slices) / (accumulation * slices + stages - 1)


def _systems(arguments: argparse.Namespace) -> list[System]:
    systems = [System("deepspeed 1f1b", None), System("terapipe 1f1b, slices 1", _section("1f1b", 1))]
    for count in arguments.slices:
        systems.append(System(f"terapipe {arguments.schedule}, slices {count}", _section(arguments.schedule, count)))
    for lengths in arguments.plan:
        name = f"terapipe {arguments.schedule}, plan of {len(lengths)}"
        systems.append(System(name, _section(arguments.schedule, lengths)))
    return systems


def _section(schedule: str, slices: int | list[int]) -> dict[str, Any]:
    return {"enabled": True, "schedule": schedule, "slices": slices, "granularity_tokens": 1}


# -- in each rank ----------------------------------------------------------------------------------------------------


def _rank_main(
    rank: int, rendezvous: str, work: Workload, systems: list[System], steps: int, warmup: int, out: str
) -> None:
    prepare_rank(rank, work.stages, rendezvous)
    import torch.distributed as torch_dist

    engines = [build_engine(system.section, work) for system in systems]
    data = batches(work)
    times: list[list[float]] = [[] for _ in systems]
    losses: list[float] = [0.0 for _ in systems]
    bar = progress_bar(rank, (warmup + steps) * len(engines), "steps")
    for turn in range(warmup + steps):
        for index, engine in enumerate(engines):
            torch_dist.barrier()
            start = time.perf_counter()
            losses[index] = float(engine.train_batch(data))
            if turn >= warmup:
                times[index].append(time.perf_counter() - start)
            bar.update()
    bar.close()
    if rank == 0:
        Path(out).write_text(json.dumps({"times": times, "losses": losses}))
    finish_rank(engines)


# -- in the parent ---------------------------------------------------------------------------------------------------


def measure(work: Workload, systems: list[System], steps: int, warmup: int) -> dict[str, Any]:
    """Run all systems in turns; returns the times and losses by system, as rank 0 saw them."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "result.json")
        spawn_ranks(_rank_main, work.stages, work, systems, steps, warmup, out)
        result: dict[str, Any] = json.loads(Path(out).read_text())
    return result


def _rows(work: Workload, systems: list[System], result: dict[str, Any]) -> list[dict[str, Any]]:
    stock = result["times"][0]
    rows = []
    for system, times, loss in zip(systems, result["times"], result["losses"], strict=True):
        given = 1 if system.section is None else system.section["slices"]
        slices = len(given) if isinstance(given, list) else given
        rows.append({
            "system": system.name,
            "section": system.section,
            "step_s": statistics.median(times),
            "step_s_all": times,
            "ratio": statistics.median(a / b for a, b in zip(stock, times, strict=True)),
            "bound": bubble_bound(work.stages, work.accumulation, slices),
            "loss": loss,
        })  # fmt: skip
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'system':<34}{'step':>9}{'spread':>17}{'stock/this':>12}{'bound':>8}{'loss':>11}")
    for row in rows:
        spread = f"{min(row['step_s_all']):.3f}-{max(row['step_s_all']):.3f} s"
        figures = f"{row['ratio']:>12.3f}{row['bound']:>8.3f}{row['loss']:>11.6f}"
        print(f"{row['system']:<34}{row['step_s']:>7.3f} s{spread:>17}{figures}")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m terapipe_ds.bench.step", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--schedule", default="seq1f1b", help="of the sliced runs (default: %(default)s)")
    parser.add_argument(
        "--slices", type=lambda text: [int(n) for n in text.split(",")], default=[8], metavar="N[,N...]",
        help="numbers of equal slices to run (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=lambda text: [int(n) for n in text.split(",")], default=[], action="append", metavar="N,N,...",
        help="slice lengths in tokens to run as well; may be given again. Later slices read a longer prefix, so equal "
        "times want longer slices first",
    )  # fmt: skip
    Workload.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=11, help="timed turns (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="turns before (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write machine, workload and all times here")
    arguments = parser.parse_args(argv)
    work, systems, this = Workload.of(arguments), _systems(arguments), machine()
    rows = _rows(work, systems, measure(work, systems, arguments.steps, arguments.warmup))
    _print_table(rows)
    if arguments.json:
        report = {"machine": this, "workload": asdict(work), "runs": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
