"""``terapipe plan``: where to cut the sequences of a model on a cluster, without the cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import CommandError, check_output
from terapipe_ds.commands.plan_setup import PlanSetup, plan_setup
from terapipe_ds.commands.show import OPTION_HELP, read_options

if TYPE_CHECKING:
    from terapipe_ds.planner import PlanResult, Ranking

HELP = "find the slices and the schedule that take the least time"
DESCRIPTION = (
    "Find where to cut the sequences, and which schedule runs them in the least time within the devices' memory. Costs "
    "are counted from the model's sizes and a device card, or measured (--profile). Nothing runs; no GPU is needed."
)
EXAMPLES = """\
  terapipe plan --model gpt3-13b --device v100 --stages 40 --tensor-parallel 8 --micro-batches 32 --sequence-length 2048
  terapipe plan --model llama-3-8b --device h100 --stages 8 --micro-batches 4 --sequence-length 32768 \\
                --activation-checkpointing --schedule seq1f1b --picture step.svg
  terapipe plan --profile profile.json --stages 4 --micro-batches 8 --out plan.json     (measured costs)
  terapipe plan --model llama-3-8b --device a100 --stages 8 --config ds.json --json     (batch, dtype, limits of it)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. None stands for "not given", so that --config and --profile can fill it."""
    what = parser.add_argument_group("model and devices")
    what.add_argument("--model", metavar="NAME", help="a named size, for example gpt3-13b or llama-3-8b")
    what.add_argument("--device", metavar="NAME", help="a device card: v100, a100, h100, h200, ...")
    what.add_argument("--profile", metavar="FILE", help="measured costs (JSON) in the place of counted ones")
    what.add_argument("--stages", type=int, metavar="K", help="pipeline stages")
    what.add_argument("--tensor-parallel", type=int, metavar="T", help="ranks per stage (default 1)")
    what.add_argument("--sequence-parallel", action="store_true", help="Megatron's, over the tensor-parallel ranks")
    what.add_argument("--data-parallel", type=int, metavar="D", help="pipelines side by side (default 1)")
    batch = parser.add_argument_group("training")
    batch.add_argument("--sequence-length", type=int, metavar="L", help="tokens of a sequence (default: the model's)")
    batch.add_argument("--micro-batches", type=int, metavar="M", help="per step and pipeline (default 1)")
    batch.add_argument("--micro-batch-size", type=int, metavar="B", help="sequences per micro-batch (default 1)")
    batch.add_argument("--dtype", help="fp32, fp16, bf16 (default: what the device is made for)")
    batch.add_argument("--activation-checkpointing", action="store_true", default=None, help="of the decoder layers")
    batch.add_argument("--zero-stage", type=int, choices=(0, 1), help="default 0")
    batch.add_argument("--config", metavar="FILE", help="a DeepSpeed JSON for all of these that are not given")
    search = parser.add_argument_group("search")
    search.add_argument(
        "--schedule",
        metavar="NAME",
        help="a schedule (terapipe show --help lists them), or auto (default): all are compared",
    )
    search.add_argument(
        "--chunks-per-stage",
        type=int,
        metavar="V",
        help="parts that each stage holds (default: those of the schedule; with auto 1 and 2)",
    )
    search.add_argument("--option", action="append", metavar="NAME=VALUE", help=OPTION_HELP)
    search.add_argument(
        "--granularity",
        type=int,
        metavar="N",
        help="cut at multiples of N tokens (default: 64, or the sequence where that is shorter)",
    )
    search.add_argument("--max-slices", type=int, metavar="S", help="at most so many slices")
    search.add_argument("--memory-limit-gb", type=float, metavar="GB", help="per device (default: what it has)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print as JSON")
    output.add_argument("--out", metavar="FILE", help="write the plan as JSON")
    output.add_argument("--picture", metavar="FILE", help="draw the simulated step: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> None:
    """Plan, and print what a person or a program wants to know."""
    if arguments.picture and Path(arguments.picture).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--picture {arguments.picture}: end the name in .png, .svg or .pdf")
    check_output(arguments.out, "--out")
    setup = plan_setup(arguments)
    options = read_options(arguments) or setup.options
    result, ranking = _search(setup, arguments.max_slices, options)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if arguments.out:
        from terapipe_ds.files.atomic import write_text

        write_text(arguments.out, result.plan.to_json() + "\n")
    if arguments.picture:
        _draw(result, setup, arguments.picture, options)
    section = _section(result, setup.granularity) | ({"schedule_options": options} if options else {})
    if arguments.json:
        ranked = {} if ranking is None else {"ranking": ranking.to_dicts()}
        print(json.dumps(result.to_dict() | {"setup": setup.title, "terapipe": section} | ranked, indent=1))
    else:
        print("\n".join(_report(result, ranking, setup, section)))


def _search(setup: PlanSetup, max_slices: int | None, options: dict[str, Any]) -> tuple[PlanResult, Ranking | None]:
    """The best plan, and with "auto" all schedules."""
    from terapipe_ds.planner import plan_slices, rank_schedules

    progress = _progress if sys.stderr.isatty() else None
    shape = setup.sequence_length, setup.stages, setup.micro_batches, setup.granularity
    if setup.schedule == "auto":
        if options:
            raise CommandError(f"--option {next(iter(options))}: they are those of one schedule; give --schedule too")
        ranking = rank_schedules(
            setup.costs_of,
            *shape,
            memory_of=setup.memory_of,
            memory_limit_bytes=setup.limit_bytes,
            max_slices=max_slices,
            chunks_per_stage=setup.chunks_per_stage,
            progress=progress,
            both_ways_s_of=setup.both_ways_s_of,
        )
        return ranking.best, ranking
    chunks = setup.chunks_per_stage or 1
    num_parts = _num_parts(setup, chunks)
    costs, memory = setup.costs_of(num_parts), None if setup.memory_of is None else setup.memory_of(num_parts)
    if costs is None:
        raise CommandError(f"--schedule {setup.schedule}: the layers cannot be cut in {num_parts} parts; ask for fewer")
    result = plan_slices(
        costs,
        *shape,
        setup.schedule,
        max_slices,
        memory,
        setup.limit_bytes,
        progress=progress,
        chunks_per_stage=chunks,
        schedule_options=options,
    )
    if num_parts < result.chunks_per_stage * setup.stages:
        result = dataclasses.replace(result, extra_s=setup.both_ways_s_of(num_parts))
    return result, None


def _num_parts(setup: PlanSetup, chunks: int) -> int:
    """How many parts the schedule cuts the layers in; an unknown one the planner will refuse."""
    from terapipe_ds.planner import num_parts_of
    from terapipe_ds.schedule import SCHEDULE_NAMES

    known = setup.schedule in SCHEDULE_NAMES
    return num_parts_of(setup.schedule, setup.stages, chunks, None) if known else setup.stages


def _section(result: PlanResult, granularity: int) -> dict[str, Any]:
    """What to put in the DeepSpeed JSON to train with this plan: a number where the slices are equal."""
    from terapipe_ds.plan import SlicePlan

    plan = result.plan
    head: dict[str, Any] = {"enabled": True, "schedule": result.schedule}
    if result.chunks_per_stage > 1:
        head["chunks_per_stage"] = result.chunks_per_stage
    if plan == SlicePlan.equal(plan.sequence_length, plan.num_slices, granularity):
        return head | {"slices": plan.num_slices, "granularity_tokens": granularity}
    return head | {"slices": list(plan.lengths)}


def _report(result: PlanResult, ranking: Ranking | None, setup: PlanSetup, section: dict[str, Any]) -> list[str]:
    from terapipe_ds.planner import describe, describe_ranking

    lines = describe(result, schedule_chosen=ranking is not None)
    if ranking is not None:
        lines += ["", *describe_ranking(ranking)]
    paste = f'"terapipe": {json.dumps(section)}'
    return [setup.title, "", *(f"  {line}".rstrip() for line in lines), "", "  in the DeepSpeed JSON:", f"  {paste}"]


def _draw(result: PlanResult, setup: PlanSetup, path: str, options: dict[str, Any]) -> None:
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import simulate
    from terapipe_ds.timeline.picture import draw_timelines

    count = result.plan.num_slices
    schedule = build(
        result.schedule,
        result.num_stages,
        result.num_micro_batches,
        count,
        chunks_per_stage=result.chunks_per_stage,
        **options,
    )
    title = f"{result.schedule}, {count} slices, simulated"
    draw_timelines([(title, simulate(schedule, result.plan, setup.costs_of(schedule.num_parts)))], path)


def _progress(what: str, done: int, of: int) -> None:
    share = min(done / of, 1.0) if of else 1.0
    print(f"\r\x1b[Kplanning {what} {share:4.0%}", end="", file=sys.stderr, flush=True)
