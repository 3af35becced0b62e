"""Predicted against measured step times: does the planner's arithmetic hold on this machine?

`python -m studies.predict` starts one process per stage, each pinned to its own core, lets the engine
measure its slices as `"slices": "auto"` does, and then trains with equal plans, the automatic plan and uneven ones,
under several schedules and accumulations, in turns. Predicted is the simulated makespan of the schedule that the engine
runs, from the measured costs, plus the measured seconds of reduce and optimizer. The processes keep the memory that
they free (`ranks.keep_memory`). On a busy machine, `--stages 1 --processor-time` shows whether the difference grows
with the slices: one stage waits for nobody.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.options import (
    add_step_options,
    automatic_section,
    batches,
    list_of,
    measure_in_ranks,
    study_parser,
    workload_of,
    write_report,
)
from terapipe_ds.bench.ranks import (
    BF16_SETTINGS,
    Workload,
    build_engine,
    finish_rank,
    keep_memory,
    machine,
    prepare_rank,
    progress_bar,
)
from terapipe_ds.files.atomic import write_text

EXAMPLES = """  python -m studies.predict
  python -m studies.predict --schedules seq1f1b --accumulation 1 --turns 7
  python -m studies.predict --hidden 512 --json predict.json
  python -m studies.predict --bf16 --stages 1 --processor-time --sequence-length 1024 --accumulation 1"""


@dataclass(frozen=True)
class PlannedCase:
    """Hold one schedule with one plan and one number of micro-batches per step."""

    name: str
    schedule: str
    accumulation: int
    lengths: tuple[int, ...]


@dataclass
class StepTimes:
    """Hold a case with its times: predicted makespan, and measured steps with the part that reduces and steps."""

    case: PlannedCase
    makespan_s: float
    steps_s: list[float]
    closing_s: list[float]

    @property
    def measured_s(self) -> float:
        """Return the median step."""
        return statistics.median(self.steps_s)

    @property
    def predicted_s(self) -> float:
        """Return compute and links as simulated, plus reduce and optimizer as measured."""
        return self.makespan_s + statistics.median(self.closing_s)

    @property
    def error(self) -> float:
        """Return predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def uneven(length: int, granularity: int, num_slices: int, shrink: float) -> tuple[int, ...]:
    """Return slices that shrink by about `shrink` from one to the next, cut at multiples of `granularity`."""
    weights = [shrink**i for i in range(num_slices)]
    cuts, done = [0], 0.0
    for weight in weights[:-1]:
        done += weight / sum(weights)
        cuts.append(max(cuts[-1] + granularity, round(done * length / granularity) * granularity))
    return tuple(b - a for a, b in zip(cuts, [*cuts[1:], length], strict=True))


def cases(arguments: argparse.Namespace, auto: dict[tuple[str, int], tuple[int, ...]]) -> list[PlannedCase]:
    """Return the cases to measure; `auto`: the planner's plans by schedule and accumulation."""
    from terapipe_ds.plan import SlicePlan

    length, granularity = arguments.sequence_length, arguments.granularity
    plans = {f"{n} equal": SlicePlan.equal(length, n, granularity).lengths for n in arguments.slices}
    plans["8 shrinking"] = uneven(length, granularity, 8, 0.9)
    plans["5 shrinking"] = uneven(length, granularity, 5, 0.7)
    planned = []
    for accumulation in arguments.accumulation:
        for schedule in arguments.schedules:
            planned += [PlannedCase(name, schedule, accumulation, lengths) for name, lengths in plans.items()]
            planned.append(PlannedCase("auto", schedule, accumulation, auto[schedule, accumulation]))
    return planned


# -- in each rank ----------------------------------------------------------------------------------------------------


def _rank_main(rank: int, rendezvous: str, work: Workload, arguments: argparse.Namespace, out: str) -> None:
    prepare_rank(rank, work.stages, rendezvous)
    if arguments.processor_time:
        time.perf_counter = time.process_time
    kind: Any = {"ds_config": BF16_SETTINGS, "gpt": {"dtype": "bfloat16"}} if arguments.bf16 else {}
    engine = build_engine(automatic_section(arguments.granularity, Path(out).parent), work, **kind)
    data = batches(work)
    begin_s = time.perf_counter()
    engine.train_batch(data)  # measures
    first_s, begin_s = time.perf_counter() - begin_s, time.perf_counter()
    engine.train_batch(data)
    measuring_s = first_s - (time.perf_counter() - begin_s)
    chosen, predicted = _plan_all(engine, arguments, Path(out).parent)
    todo = cases(arguments, chosen)
    steps: list[list[float]] = [[] for _ in todo]
    closing: list[list[float]] = [[] for _ in todo]
    bar = progress_bar(rank, (1 + arguments.turns) * len(todo), "steps")
    for turn in range(1 + arguments.turns):
        for index, case in enumerate(todo):
            seconds = _one_step(engine, work, data, case)
            if turn > 0:
                steps[index].append(seconds)
                closing[index].append(engine.closing_s)
            bar.update()
    bar.close()
    if rank == 0:
        rows = [StepTimes(case, predicted(case), steps[i], closing[i]) for i, case in enumerate(todo)]
        write_text(out, json.dumps({"measuring_s": measuring_s, "rows": [asdict(row) for row in rows]}))
    finish_rank([engine])


def _plan_all(engine: Any, arguments: argparse.Namespace, folder: Path) -> Any:
    """Return the planner's plan for each schedule and accumulation, and a function that predicts a case."""
    import torch.distributed as torch_dist

    from terapipe_ds.costs.fitted import CostModel
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.planner import plan_slices
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import simulate

    torch_dist.barrier()  # rank 0 has written the profile
    (path,) = folder.glob("profile-*.json")
    costs = CostModel.from_profile(Profile.load(path))
    chosen = {
        (schedule, accumulation): plan_slices(
            costs, arguments.sequence_length, engine.num_stages, accumulation, arguments.granularity, schedule
        )
        .plans[0]
        .lengths
        for schedule in arguments.schedules
        for accumulation in arguments.accumulation
    }

    def predicted(case: PlannedCase) -> float:
        plan = SlicePlan(case.lengths)
        schedule = build(case.schedule, engine.num_stages, case.accumulation, plan.num_slices)
        return float(simulate(schedule, plan, costs).makespan_s)

    return chosen, predicted


def _one_step(engine: Any, work: Workload, data: Any, case: PlannedCase) -> float:
    import torch.distributed as torch_dist

    from terapipe_ds.plan import SlicePlan

    engine.set_train_batch_size(work.micro_batch * case.accumulation)
    engine.use_slice_plan(SlicePlan(case.lengths), case.schedule)
    torch_dist.barrier()
    begin_s = time.perf_counter()
    engine.train_batch(data)
    return time.perf_counter() - begin_s


# -- in the parent ---------------------------------------------------------------------------------------------------


def run(work: Workload, arguments: argparse.Namespace) -> tuple[list[StepTimes], float]:
    """Measure all cases; also return the seconds that measuring and planning took."""
    keep_memory()
    measured = measure_in_ranks(_rank_main, work, arguments)
    rows = []
    for row in measured["rows"]:
        case = row.pop("case")
        rows.append(StepTimes(PlannedCase(**case | {"lengths": tuple(case["lengths"])}), **row))
    return rows, measured["measuring_s"]


def print_table(rows: list[StepTimes], measuring_s: float) -> None:
    """Print one line per case, the worst error, and the cost of measuring."""
    columns = f"{'slices':>7}{'predicted':>11}{'measured':>10}{'spread':>16}{'error':>8}"
    print(f"{'schedule':<10}{'m':>3}  {'plan':<13}{columns}")
    for row in rows:
        spread = f"{min(row.steps_s):.3f}-{max(row.steps_s):.3f} s"
        head = f"{row.case.schedule:<10}{row.case.accumulation:>3}  {row.case.name:<13}{len(row.case.lengths):>7}"
        print(f"{head}{row.predicted_s:>9.3f} s{row.measured_s:>8.3f} s{spread:>16}{row.error:>+8.1%}")
    worst = max(rows, key=lambda row: abs(row.error))
    median = statistics.median(abs(row.error) for row in rows)
    print(f"error: median {median:.1%}, worst {worst.error:+.1%} ({worst.case.schedule}, {worst.case.name})")
    unsliced = [row.measured_s for row in rows if row.case.accumulation == 1 and len(row.case.lengths) == 1]
    if unsliced:
        steps = measuring_s / statistics.median(unsliced)
        print(f"measuring and planning took {measuring_s:.1f} s, {steps:.1f} unsliced steps of 1 micro-batch")
    for key in dict.fromkeys((row.case.schedule, row.case.accumulation) for row in rows):
        group = [row for row in rows if (row.case.schedule, row.case.accumulation) == key]
        auto = next(row for row in group if row.case.name == "auto")
        best = min((row for row in group if row.case.name.endswith("equal")), key=lambda row: row.measured_s)
        ratio = statistics.median(a / b for a, b in zip(auto.steps_s, best.steps_s, strict=True))
        print(
            f"{key[0]}, m = {key[1]}: auto over the best equal plan ({best.case.name}) {ratio:.3f}, "
            f"auto is {list(auto.case.lengths)}"
        )


def main(argv: list[str] | None = None) -> None:
    """Run the command line; see the module's text."""
    parser = study_parser("predict", __doc__, writes="machine, workload and all times", examples=EXAMPLES)
    parser.add_argument("--schedules", type=list_of(str), default=["terapipe", "seq1f1b"], metavar="NAME[,NAME...]")
    parser.add_argument("--bf16", action="store_true", help="train in bf16 with ZeRO-1 (default: fp32)")
    parser.add_argument("--processor-time", action="store_true", help="in place of wall time")
    parser.add_argument("--turns", type=int, default=5, help="measured turns (default: %(default)s)")
    add_step_options(parser, slices=[1, 2, 4, 8, 16], granularity=64)
    arguments = parser.parse_args(argv)
    work, this = workload_of(arguments), machine()
    rows, measuring_s = run(work, arguments)
    print_table(rows, measuring_s)
    runs = [{**asdict(row), "predicted_s": row.predicted_s, "measured_s": row.measured_s} for row in rows]
    write_report(arguments.json, machine=this, workload=asdict(work), measuring_s=measuring_s, runs=runs)


if __name__ == "__main__":
    main()
