"""Rehearse pipelines of many stages on few cores: the real engine, messages and schedules, with layers that sleep.

Each layer sleeps as long as its share of a stage would compute, so that 12 stages run on two cores. The costs of a
stage are those that fit the published step times of TeraPipe (settings of its table 1, `studies.paper`), scaled so that
the shortest slice lasts `--slice-ms`, forward and backward together; W takes a third of that without its attention. The
table has the seconds of a step, measured and simulated, and how many times as fast it is as DeepSpeed's own engine.
The difference is the work of engine and messages, and the wait of ranks for a core where they are more than cores: all
stages begin a slot at once. So the table has per slot (a computation of a stage) the seconds beyond the simulation, and
two of its parts: the mean processor seconds of a stage, and those in which its threads were ready and had no core.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.options import list_of, study_parser, write_report
from studies.paper import NOTES, read_setting, reproduce
from studies.parametric_costs import ParametricCosts
from studies.rehearsal_ranks import rehearse
from terapipe_ds.bench.cases import WHOLE
from terapipe_ds.bench.ranks import spawn_ranks
from terapipe_ds.plan import JOINED_ROWS, SlicePlan
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES, Schedule, ScheduleError, build
from terapipe_ds.schedule.placement import BIDIRECTIONAL
from terapipe_ds.simulator import simulate

STOCK = "stock"
USUAL = (STOCK, *(name for name in SCHEDULE_NAMES if name != "dapple"), "seq1f1b-interleaved-zb:4")
"""Schedules, with the parts per stage where they are not the usual ones."""
PER_SLOT = ("more_per_slot_s", "processor_per_slot_s", "core_wait_per_slot_s")

EXAMPLES = """\
  python -m studies.rehearsal --stages 8 --micro-batches 1 --settings 9
  python -m studies.rehearsal --schedules stock,seq1f1b-zb,seq1f1b-interleaved-zb:4 --slices 8,16
  python -m studies.rehearsal --json docs/results/rehearsal.json
"""


@dataclass(frozen=True)
class SleepCosts:
    """Hold the seconds of a part: the scaled seconds of a stage, by the part's share of the layers."""

    of_stage: ParametricCosts
    scale: float
    share: float = 1.0

    def forward_s(self, tokens: int, prefix: int) -> float:
        return float(self.scale * self.share * self.of_stage.forward_s(tokens, prefix))

    def backward_s(self, tokens: int, prefix: int) -> float:
        return float(self.scale * self.share * self.of_stage.backward_s(tokens, prefix))

    def weight_s(self, tokens: int, prefix: int) -> float:
        plain = dataclasses.replace(self.of_stage, per_pair_s=0.0, per_prefix_token_s=0.0)
        return float(self.scale * self.share * plain.both_s(tokens, prefix) / 3)


@dataclass(frozen=True)
class Run:
    """Describe one row: a setting's costs, the batch, and the system."""

    setting: int
    num_stages: int
    num_micro_batches: int
    schedule: str
    chunks_per_stage: int
    num_slices: int
    sequence_length: int
    costs: SleepCosts

    @property
    def plan(self) -> SlicePlan:
        return SlicePlan.equal(self.sequence_length, self.num_slices)

    @property
    def num_rows(self) -> int:
        """Return the sequences of a micro-batch: enough that no two slices have their weight gradients together."""
        return -(-JOINED_ROWS // min(self.plan.lengths))

    @property
    def num_layers(self) -> int:
        """Return the layers of the model, one for each part: a computation sleeps once."""
        return self.num_stages * (1 if self.schedule in BIDIRECTIONAL else self.chunks_per_stage)

    def build(self) -> Schedule:
        """Return the schedule; DeepSpeed's own is 1F1B."""
        name = "1f1b" if self.schedule == STOCK else self.schedule
        counts = self.num_stages, self.num_micro_batches, self.num_slices
        return build(name, *counts, chunks_per_stage=self.chunks_per_stage)

    def simulated_s(self) -> float:
        return simulate(self.build(), self.plan, self.costs).makespan_s

    @property
    def name(self) -> str:
        if self.schedule == STOCK:
            return "DeepSpeed"
        parts = f", {self.chunks_per_stage} parts" if self.chunks_per_stage > 1 else ""
        return f"{self.schedule}{parts}, {self.num_slices} slice{'s' * (self.num_slices > 1)}"


def runs_of(options: Any, num_stages: int) -> Iterator[Run]:
    """Yield the rows of a number of stages; without those that it cannot have."""
    for setting in options.settings:
        costs, _ = reproduce(setting)
        length = read_setting(setting).scheme.plan.sequence_length
        plans = [SlicePlan.equal(length, count) for count in options.slices]
        shortest_s = min(costs.both_s(*span) for plan in plans for span in zip(plan.lengths, plan.starts, strict=True))
        scaled = SleepCosts(costs, options.slice_ms / 1000 / shortest_s)
        for micro_batches in options.micro_batches:
            for text in options.schedules:
                name, _, given = text.partition(":")
                chunks = int(given or (2 if name in CHUNKED_SCHEDULES else 1))
                for slices in [1] if name == STOCK or name in WHOLE else options.slices:
                    share = 1.0 if name in BIDIRECTIONAL else 1 / chunks
                    part = dataclasses.replace(scaled, share=share)
                    run = Run(setting, num_stages, micro_batches, name, chunks, slices, length, part)
                    try:
                        run.build()
                    except ScheduleError:  # a bidirectional one on an odd number of stages
                        continue
                    yield run


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown, each with its speed-up over the stock engine of the same batch."""
    lines = [
        "| setting | K | m | system | measured | simulated | ratio | speed-up | simulated | per slot | work | wait |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        more = f"{row['ratio']:.3f} | {_times(row['speed_up'])} | {_times(row['simulated_speed_up'])}"
        shape = f"{row['setting']} | {row['num_stages']} | {row['num_micro_batches']} | {row['name']}"
        times = f"{row['step_s']:.3f} | {row['simulated_s']:.3f}"
        per_slot = " | ".join(f"{1000 * row[name]:.1f} ms" for name in PER_SLOT)
        lines.append(f"| {shape} | {times} | {more} | {per_slot} |")
    return "\n".join(lines)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def finished(measured: Sequence[tuple[Run, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return the rows: measured beside simulated, and both beside the stock engine."""
    rows: list[dict[str, Any]] = []
    for run, times in measured:
        simulated_s = run.simulated_s()
        slots = max(map(len, run.build().orders))
        facts = {name: getattr(run, name) for name in ("setting", "num_stages", "num_micro_batches", "schedule")}
        facts |= {"name": run.name, "chunks_per_stage": run.chunks_per_stage, "num_slices": run.num_slices, **times}
        facts |= {"simulated_s": simulated_s, "ratio": times["step_s"] / simulated_s}
        of_stage = (times[name] / run.num_stages for name in ("processor_s", "core_waits_s"))
        per_slot = (seconds / slots for seconds in (times["step_s"] - simulated_s, *of_stage))
        rows.append(facts | dict(zip(PER_SLOT, per_slot, strict=True)))
    for row in rows:
        same = ("setting", "num_stages", "num_micro_batches")
        stock = next((o for o in rows if o["schedule"] == STOCK and all(o[key] == row[key] for key in same)), None)
        row["speed_up"] = stock and stock["step_s"] / row["step_s"]
        row["simulated_speed_up"] = stock and stock["simulated_s"] / row["simulated_s"]
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write JSON."""
    parser = study_parser("rehearsal", __doc__, writes="the rows", examples=EXAMPLES)
    parser.add_argument("--stages", type=list_of(int), default=[4, 8, 12], metavar="K[,K...]", help="(4,8,12)")
    parser.add_argument("--micro-batches", type=list_of(int), default=[1, 2, 4], metavar="M[,M...]", help="(1,2,4)")
    of_settings = f"rows of TeraPipe's table 1, of {', '.join(map(str, NOTES))} (all)"
    parser.add_argument("--settings", type=list_of(int), default=list(NOTES), metavar="N[,N...]", help=of_settings)
    of_schedules = f"NAME or NAME:PARTS (all: {', '.join(USUAL)})"
    parser.add_argument("--schedules", type=list_of(str), default=list(USUAL), metavar="NAME[,...]", help=of_schedules)
    parser.add_argument("--slices", type=list_of(int), default=[8], metavar="N[,N...]", help="equal ones (8)")
    parser.add_argument("--slice-ms", type=float, default=30.0, help="F + B of the shortest slice of a stage (30)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; the median counts (3)")
    parser.add_argument("--trace", metavar="DIR", help="write the measured timelines here, a folder for each row")
    options = parser.parse_args(words)
    measured: list[tuple[Run, dict[str, float]]] = []
    for stages in options.stages:
        runs = list(runs_of(options, stages))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "measured.json"
            spawn_ranks(rehearse, stages, runs, options.steps, options.trace, str(out))
            times = json.loads(out.read_text())
        measured += zip(runs, times, strict=True)
        print(table(finished(measured)), flush=True)
        arguments = " ".join(sys.argv[1:] if words is None else words)
        facts = {"command": f"python -m studies.rehearsal {arguments}".strip(), "cores": os.cpu_count()}
        write_report(options.json, **facts, slice_ms=options.slice_ms, rows=finished(measured))


if __name__ == "__main__":
    main()
