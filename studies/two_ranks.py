"""Strategies for two ranks, trained for real: is the order that a measured profile predicts the order measured?

`python -m studies.two_ranks` takes three models of megatron-core layers, of different shape. Two processes, each pinned
to its own core, measure the layers on two stages and on two tensor ranks, the optimizer's step, and an all-reduce
between them. From these `rank_strategies` gives the best strategy with two stages, with two replicas and with two
tensor ranks. Each trains as its `to_deepspeed()` says, in turns in the same processes on the same data. Two strategies
whose measured steps differ by less than 3 % may come in either order.

Measured is the median of the steps in which other programs had the least of both cores: Linux counts for how long a
thread that could run has waited (`schedstat`). "lost" is that share of these steps; above 3 % they decide nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from studies.options import list_of, study_parser, write_report
from studies.two_ranks_training import Outcome, Shape, rank_main, run_of
from terapipe_ds.bench.ranks import keep_memory, machine, spawn_ranks

EXAMPLES = """  python -m studies.two_ranks
  python -m studies.two_ranks --models deep --turns 15
  python -m studies.two_ranks --small --turns 2"""

SHAPES = (
    Shape("short", hidden=512, layers=8, heads=8, vocab=512, length=32, batch=8, granularity=32),
    Shape("deep", hidden=128, layers=12, heads=4, vocab=256, length=2048, batch=2, granularity=128),
    Shape("head", hidden=256, layers=2, heads=4, vocab=65536, length=64, batch=2),
)


def measure(shape: Shape, turns: int) -> Outcome:
    """Profile, plan and train one model on two ranks."""
    keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(rank_main, 2, shape, turns, folder)
        told = json.loads((Path(folder) / "outcome.json").read_text())
    return Outcome(Shape(**told["shape"]), told["link"], list(map(run_of, told["runs"])))


def show(outcome: Outcome) -> str:
    """Return the table of one model."""
    shape, link = outcome.shape, outcome.link
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(shape).items() if name not in ("name", "granularity"))
    lines = [
        f"{shape.name}: {sizes}",
        f"  all-reduce {link['within_bytes_per_s'] / 1e9:.2f} GB/s, {2e6 * link['within_latency_s']:.0f} us",
        "       predicted (ends)  measured (ends)   busy  lost   error  strategy",
    ]
    for run in sorted(outcome.runs, key=lambda run: run.measured_s):
        of, lost = run.strategy, run.median("lost_s") / run.measured_s
        lines.append(
            f"  {run.name} {run.predicted_s:>8.3f} s ({run.predicted_ends_s:.3f}){run.measured_s:>7.3f} s "
            f"({run.median('ends_s'):.3f}){run.median('busy_s'):>7.3f}{lost:>6.0%}"
            f"{run.predicted_s / run.measured_s - 1:>+8.1%}  {of['schedule']} {of['slices']}, "
            f"{of['accumulation']} micro-batches, layers {of['partition']}, ZeRO {of['zero_stage']}"
        )
    predicted, measured = (
        " < ".join(run.name for run in sorted(outcome.runs, key=key))
        for key in (lambda run: run.predicted_s, lambda run: run.measured_s)
    )
    verdict = "as predicted" if outcome.is_as_predicted else "NOT as predicted"
    return "\n".join([*lines, f"  predicted {predicted}; measured {measured}: {verdict}"])


def disagreement(outcome: Outcome) -> str | None:
    """Return which strategies did not learn the same, or None."""
    for losses in zip(*(run.losses for run in outcome.runs), strict=True):
        if max(losses) - min(losses) > 1e-3 * max(losses):
            return f"{outcome.shape.name}: the losses {losses} of a step differ between strategies"
    return None


def main(argv: list[str] | None = None) -> None:
    """Measure and print; the exit code is 1 where an order is not as predicted."""
    parser = study_parser("two_ranks", __doc__, writes="machine, strategies and all times", examples=EXAMPLES)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--models", type=list_of(str), default=names, metavar="NAME[,NAME...]", help=", ".join(names))
    parser.add_argument("--turns", type=int, default=9, help="measured turns (default: %(default)s)")
    parser.add_argument(
        "--small", action="store_true", help="a trial of the study: tiny models, whose order says nothing"
    )
    arguments = parser.parse_args(argv)
    raise SystemExit(run(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code."""
    this, outcomes = machine(), []
    for shape in SHAPES:
        if shape.name in arguments.models:
            outcomes.append(measure(shape.small if arguments.small else shape, arguments.turns))
            print(show(outcomes[-1]), flush=True)
    problems = [problem for problem in map(disagreement, outcomes) if problem is not None]
    print("\n".join(problems), end="\n" if problems else "")
    write_report(arguments.json, machine=this, outcomes=[asdict(outcome) for outcome in outcomes])
    return 0 if not problems and all(outcome.is_as_predicted for outcome in outcomes) else 1


if __name__ == "__main__":
    main()
