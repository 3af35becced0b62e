"""The ``terapipe`` command: argument parsing only. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from terapipe_ds.schedule import Schedule
    from terapipe_ds.timeline import Timeline

_SHOW_EXAMPLES = """examples:
  terapipe show --schedule seq1f1b --stages 4 --micro-batches 2 --slices 4
  terapipe show --schedule terapipe --stages 4 --micro-batches 2 --slices 4,3   (one number per micro-batch)
  terapipe show --schedule 1f1b --stages 4 --micro-batches 8 --csv my.csv       (to edit by hand)
  terapipe show --from-csv my.csv                                               (validates, then shows)
  terapipe show --schedule seq1f1b --stages 4 --micro-batches 2 --slices 4 --stage 0 --lowered
"""
_TIMELINE_EXAMPLES = """examples:
  terapipe timeline traces/ --out step.png
  terapipe timeline traces/ --step 20 --out step20.svg
  terapipe timeline timeline-step000020-rank*.json --out step20.png

The files are timeline-step<step>-rank<rank>.json, as the engine writes them where `trace_dir` is set.
"""

_MAX_FORWARDS = 1_000_000


class CommandError(ValueError):
    """What the user asked for cannot be done; the text says why and what to do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2, without the usage that would bury it."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 2 after an error, which is told in one line on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"terapipe {arguments.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _one_line(error: Exception) -> str:
    from terapipe_ds.schedule import ScheduleError

    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join((error.reason if isinstance(error, ScheduleError) else str(error)).split())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="terapipe",
        description="Token-level pipeline parallelism for DeepSpeed: schedules and measured timelines.",
        epilog="Each command has examples: terapipe show --help",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_show(commands)
    _add_timeline(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from terapipe_ds import __version__

        print(f"terapipe {__version__}")
        parser.exit()


def _add_show(commands: argparse._SubParsersAction[_Parser]) -> None:
    show = commands.add_parser(
        "show",
        help="print a schedule",
        description="Print a schedule: who runs what, in which order, with its bubble and its live slices.",
        epilog=_SHOW_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.set_defaults(run=_show)
    source = show.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help="gpipe, 1f1b, terapipe or seq1f1b")
    source.add_argument(
        "--from-csv", metavar="FILE", help="read a schedule: a row per stage, cells such as F0.3"
    )
    show.add_argument("--stages", type=int, metavar="K", help="pipeline stages")
    show.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches per step (default 1)")
    show.add_argument(
        "--slices", metavar="S", help="slices per micro-batch, or one number for each: 4,3,4 (default 1)"
    )
    show.add_argument("--forward-only", action="store_true", help="the schedule of an evaluation")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--csv", metavar="FILE", help="write the orders as CSV to FILE, or to stdout with -")
    form.add_argument("--json", action="store_true", help="print as JSON")
    form.add_argument(
        "--stage", type=int, metavar="N", help="print the order of one stage only, one entry per line"
    )
    show.add_argument(
        "--lowered",
        action="store_true",
        help="with --stage: all that the engine runs, with loads, sends and receives",
    )


def _add_timeline(commands: argparse._SubParsersAction[_Parser]) -> None:
    timeline = commands.add_parser(
        "timeline",
        help="draw the timeline of a measured step",
        description="Draw what the ranks of a pipeline did in one step, from the files of a trace directory.",
        epilog=_TIMELINE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    timeline.set_defaults(run=_timeline)
    timeline.add_argument(
        "traces", nargs="+", metavar="TRACE_DIR_OR_FILE", help="a trace directory, or its files"
    )
    timeline.add_argument("--out", required=True, metavar="FILE", help="picture to write: .png, .svg or .pdf")
    timeline.add_argument(
        "--step", type=int, metavar="N", help="which step (default: the last that all ranks have)"
    )


def _show(arguments: argparse.Namespace) -> None:
    import json

    from terapipe_ds.schedule import ScheduleError, render, to_csv, validate
    from terapipe_ds.schedule.show import to_dict

    if arguments.lowered and arguments.stage is None:
        raise CommandError("--lowered needs --stage N: give the stage to print")
    try:
        schedule = _read_schedule(arguments) if arguments.from_csv else _build_schedule(arguments)
        validate(schedule)
    except ScheduleError as error:
        if error.picture:
            print(error.picture)
        raise
    if arguments.csv not in (None, "-"):
        from terapipe_ds.timeline import write_atomically

        text = to_csv(schedule)
        write_atomically(arguments.csv, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    elif arguments.csv:
        print(to_csv(schedule), end="")
    elif arguments.json:
        print(json.dumps(to_dict(schedule), indent=1))
    elif arguments.stage is not None:
        stage = schedule.for_stage(arguments.stage)
        print(
            "\n".join(
                map(str, stage.actions) if arguments.lowered else schedule.compute_order(stage.stage_id)
            )
        )
    else:
        print(render(schedule, width=max(shutil.get_terminal_size((110, 24)).columns, 40)))


def _read_schedule(arguments: argparse.Namespace) -> Schedule:
    from terapipe_ds.schedule import from_csv

    given = {
        "--stages": arguments.stages,
        "--micro-batches": arguments.micro_batches,
        "--slices": arguments.slices,
    }
    extra = [option for option, value in given.items() if value is not None]
    if extra or arguments.forward_only:
        raise CommandError(
            f"{(extra or ['--forward-only'])[0]} does not go with --from-csv: the file says it all"
        )
    path = Path(arguments.from_csv)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is no text in UTF-8: {error}") from error
    return from_csv(text, name=path.stem)


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
    num_forwards = arguments.stages * (num_micro_batches * counts[0] if len(counts) == 1 else sum(counts))
    if num_forwards > _MAX_FORWARDS:
        raise CommandError(f"{num_forwards} forwards are too many to show: ask for at most {_MAX_FORWARDS}")
    return build(
        arguments.schedule,
        arguments.stages,
        num_micro_batches,
        num_slices,
        forward_only=arguments.forward_only,
    )


def _timeline(arguments: argparse.Namespace) -> None:
    steps = _find_traces([Path(trace) for trace in arguments.traces])
    step, files = _pick_step(steps, arguments.step)
    timeline = _merge_replica(files)
    timeline.draw(arguments.out, title=f"step {step}, {timeline.name}" if timeline.name else f"step {step}")
    print(
        f"{arguments.out}: step {step}, {timeline.num_stages} stages, makespan {timeline.makespan_s:.6g} s,"
        f" bubble {100 * timeline.bubble_fraction:.1f} %"
    )


def _find_traces(paths: list[Path]) -> dict[int, dict[int, Path]]:
    """Step -> rank -> file, of all files named and of all in the directories named."""
    from terapipe_ds.timeline import parse_file_name

    steps: dict[int, dict[int, Path]] = {}
    for path in paths:
        if not path.exists():
            raise CommandError(f"{path}: no such file or directory")
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            key = parse_file_name(file.name)
            if key is None and not path.is_dir():
                raise CommandError(f"{file}: the name must be timeline-step<6 digits>-rank<4 digits>.json")
            if key is not None and steps.setdefault(key[0], {}).setdefault(key[1], file) != file:
                raise CommandError(
                    f"{file} and {steps[key[0]][key[1]]} are the same step and rank: give one of them"
                )
    if not steps:
        raise CommandError(f"no timeline-step*-rank*.json in {', '.join(map(str, paths))}: is trace_dir set?")
    return steps


def _pick_step(steps: dict[int, dict[int, Path]], wanted: int | None) -> tuple[int, dict[int, Path]]:
    ranks = {rank for files in steps.values() for rank in files}
    complete = [step for step, files in steps.items() if len(files) == len(ranks)]
    if wanted is None and not complete:
        raise CommandError(
            f"no step is there for all of the {len(ranks)} ranks: choose one rank's files or --step N"
        )
    step = max(complete) if wanted is None else wanted
    if step not in steps:
        raise CommandError(f"step {step} is not there: the steps are {', '.join(map(str, sorted(steps)))}")
    missing = sorted(ranks - set(steps[step]))
    if missing:
        raise CommandError(f"step {step} lacks rank {', '.join(map(str, missing))}: choose another step")
    return step, steps[step]


def _merge_replica(files: dict[int, Path]) -> Timeline:
    """The timeline of one pipeline: of the ranks that hold the same stage, the lowest."""
    from terapipe_ds.timeline import Timeline

    chosen: list[Timeline] = []
    taken: set[int] = set()
    for _, file in sorted(files.items()):
        timeline = Timeline.load(file)
        stages = {event.stage_id for event in timeline.events}
        if not stages & taken:
            chosen.append(timeline)
            taken |= stages
    timeline = Timeline.merge(chosen)
    absent = sorted(set(range(timeline.num_stages)) - taken)
    if absent:
        print(f"terapipe timeline: note: no events of stage {', '.join(map(str, absent))}", file=sys.stderr)
    return timeline


if __name__ == "__main__":
    sys.exit(main())
