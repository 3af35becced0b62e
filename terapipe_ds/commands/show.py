"""``terapipe show``: print a schedule."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import CommandError, check_output

if TYPE_CHECKING:
    from terapipe_ds.schedule import Schedule

HELP = "print a schedule"
DESCRIPTION = "Print a schedule: who runs what, in which order, with its bubble and its live slices."
EXAMPLES = """\
  terapipe show --schedule seq1f1b --stages 4 --micro-batches 2 --slices 4
  terapipe show --schedule terapipe --stages 4 --micro-batches 2 --slices 4,3   (one number per micro-batch)
  terapipe show --schedule seq1f1b-interleaved --stages 4 --micro-batches 2 --slices 4 --chunks-per-stage 2
  terapipe show --schedule 1f1b --stages 4 --micro-batches 8 --csv my.csv       (to edit by hand)
  terapipe show my.csv                                                          (validates, then shows)
  terapipe show --schedule seq1f1b --stages 4 --micro-batches 2 --slices 4 --stage 0 --lowered
"""

_MAX_FORWARDS, MAX_STAGES = 1_000_000, 10_000
SCHEDULE_HELP = (
    "gpipe, 1f1b, dapple, terapipe, seq1f1b, zb-h1, seq1f1b-zb, interleaved, seq1f1b-interleaved, zbv, chimera or"
    " chimera-seq"
)
OPTION_HELP = "of the schedule: policy=A or policy=B for dapple, slots=4,5,3 for zbv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help=SCHEDULE_HELP)
    source.add_argument("--from-csv", metavar="FILE", help="read a schedule: a row per stage, cells such as F0.3")
    source.add_argument("file", nargs="?", metavar="FILE", help="as --from-csv FILE")
    parser.add_argument("--stages", type=int, metavar="K", help="pipeline stages")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches per step (default 1)")
    parser.add_argument(
        "--slices", metavar="S", help="slices per micro-batch, or one number for each: 4,3,4 (default 1)"
    )
    parser.add_argument("--chunks-per-stage", type=int, metavar="V", help="parts that each stage holds (default 1)")
    parser.add_argument("--option", action="append", metavar="NAME=VALUE", help=OPTION_HELP)
    parser.add_argument("--forward-only", action="store_true", help="the schedule of an evaluation")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--csv",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the orders as CSV to FILE; without a name, or with -, to stdout",
    )
    form.add_argument("--json", action="store_true", help="print as JSON")
    form.add_argument("--stage", type=int, metavar="N", help="print the order of one stage only, one entry per line")
    parser.add_argument(
        "--lowered",
        action="store_true",
        help="with --stage: all that the engine runs, with loads, sends and receives",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print, or write, the schedule that is asked for."""
    import json

    from terapipe_ds.schedule import ScheduleError, render, to_csv, validate
    from terapipe_ds.schedule.show import to_dict

    if arguments.lowered and arguments.stage is None:
        raise CommandError("--lowered needs --stage N: give the stage to print")
    check_output(None if arguments.csv == "-" else arguments.csv, "--csv")
    try:
        arguments.from_csv = arguments.from_csv or arguments.file
        schedule = read_schedule(arguments) if arguments.from_csv else _build_schedule(arguments)
        validate(schedule)
    except ScheduleError as error:
        if error.picture:
            print(error.picture)
        raise
    if arguments.csv not in (None, "-"):
        from terapipe_ds.files.atomic import write_text

        write_text(arguments.csv, to_csv(schedule))
    elif arguments.csv:
        print(to_csv(schedule), end="")
    elif arguments.json:
        print(json.dumps(to_dict(schedule), indent=1))
    elif arguments.stage is not None:
        stage = schedule.for_stage(arguments.stage)
        print("\n".join(map(str, stage.actions) if arguments.lowered else schedule.compute_order(stage.stage_id)))
    else:
        print(render(schedule, width=max(shutil.get_terminal_size((110, 24)).columns, 40)))


def read_schedule(arguments: argparse.Namespace) -> Schedule:
    """The schedule of ``--from-csv``, validated; options that describe one too are refused."""
    from terapipe_ds.schedule import load

    given = {
        "--stages": arguments.stages,
        "--micro-batches": arguments.micro_batches,
        "--slices": arguments.slices,
        "--chunks-per-stage": arguments.chunks_per_stage,
        "--option": arguments.option,
    }
    extra = [option for option, value in given.items() if value is not None]
    if extra or arguments.forward_only:
        raise CommandError(
            f"{(extra or ['--forward-only'])[0]} does not go with --from-csv: the file says it all, leave it out"
        )
    return load(arguments.from_csv)


def _build_schedule(arguments: argparse.Namespace) -> Schedule:
    from terapipe_ds.schedule import build

    if arguments.stages is None:
        raise CommandError("--stages is missing: give the number of pipeline stages")
    num_micro_batches = 1 if arguments.micro_batches is None else arguments.micro_batches
    try:
        counts = [int(count) for count in (arguments.slices or "1").split(",")]
    except ValueError:
        raise CommandError(
            f"--slices is {arguments.slices!r}: give a number, or one per micro-batch as 4,3,4"
        ) from None
    num_slices = counts[0] if len(counts) == 1 else counts
    chunks = 1 if arguments.chunks_per_stage is None else arguments.chunks_per_stage
    num_forwards = arguments.stages * (num_micro_batches * counts[0] if len(counts) == 1 else sum(counts)) * chunks
    if arguments.stages > MAX_STAGES:
        raise CommandError(f"--stages {arguments.stages} are too many to show: ask for at most {MAX_STAGES}")
    if num_forwards > _MAX_FORWARDS:
        raise CommandError(f"{num_forwards} forwards are too many to show: ask for at most {_MAX_FORWARDS}")
    return build(
        arguments.schedule,
        arguments.stages,
        num_micro_batches,
        num_slices,
        forward_only=arguments.forward_only,
        chunks_per_stage=chunks,
        **read_options(arguments),
    )


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The schedule's options, of ``--option`` given once for each.

    Raises:
        CommandError: one without a value, or an option that no schedule has.
    """
    options: dict[str, Any] = {}
    for text in arguments.option or ():
        name, _, value = text.partition("=")
        if name not in ("policy", "slots") or not value:
            raise CommandError(f"--option {text!r}: give policy=A or policy=B for dapple, slots=4,5,3 for zbv")
        if name in options:
            raise CommandError(f"--option {name} is given twice: give it once")
        numbers = value.split(",")
        options[name] = [int(n) for n in numbers] if all(n.isdecimal() and len(n) < 10 for n in numbers) else value
    return options
