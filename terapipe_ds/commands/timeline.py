"""``terapipe timeline``: draw what the ranks of a pipeline did."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from terapipe_ds.commands import CommandError, check_output

if TYPE_CHECKING:
    from terapipe_ds.timeline import Timeline

HELP = "draw the timeline of a measured step"
DESCRIPTION = "Draw what the ranks of a pipeline did in one step, from the files of a trace directory."
EXAMPLES = """\
  terapipe timeline traces/ --out step.png
  terapipe timeline traces/ --step 20 --out step20.svg
  terapipe timeline timeline-step000020-rank*.json --out step20.png

The files are timeline-step<step>-rank<rank>.json, as the engine writes them where `trace_dir` is set.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE_DIR_OR_FILE", help="a trace directory, or its files"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="picture to write: .png, .svg or .pdf")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which step (default: the last that all ranks have)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Draw the timeline of one step."""
    check_output(arguments.out, "--out")
    step, timeline = load_step([Path(trace) for trace in arguments.traces], arguments.step)
    timeline.draw(arguments.out, title=f"step {step}, {timeline.name}" if timeline.name else f"step {step}")
    print(
        f"{arguments.out}: step {step}, {timeline.num_stages} stages, makespan {timeline.makespan_s:.6g} s,"
        f" bubble {100 * timeline.bubble_fraction:.1f} %"
    )


def load_step(paths: list[Path], wanted: int | None) -> tuple[int, Timeline]:
    """The step (the wanted one, or the last that all ranks have) and the timeline of its pipeline."""
    step, files = _pick_step(_find_traces(paths), wanted)
    return step, _merge_replica(files)


def _find_traces(paths: list[Path]) -> dict[int, dict[int, Path]]:
    """Step -> rank -> file, of all files named and of all in the directories named."""
    from terapipe_ds.timeline import parse_file_name

    steps: dict[int, dict[int, Path]] = {}
    for path in paths:
        if not path.exists():
            raise CommandError(f"{path}: no such file or directory; give a path that exists")
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            key = parse_file_name(file.name)
            if key is None and not path.is_dir():
                raise CommandError(f"{file}: the name must be timeline-step<6 digits>-rank<4 digits>.json")
            if key is not None and steps.setdefault(key[0], {}).setdefault(key[1], file) != file:
                raise CommandError(
                    f"{file} and {steps[key[0]][key[1]]} are the same step and rank: give one of them"
                )
    if not steps:
        places = ", ".join(map(str, paths))
        raise CommandError(f"no timeline-step*-rank*.json in {places}: set trace_dir, or give another path")
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
        there = ", ".join(map(str, sorted(steps)))
        raise CommandError(f"step {step} is not there: the steps are {there}; give one of them")
    missing = sorted(ranks - set(steps[step]))
    if missing:
        raise CommandError(f"step {step} lacks rank {', '.join(map(str, missing))}: choose another step")
    return step, steps[step]


def _merge_replica(files: dict[int, Path]) -> Timeline:
    """The timeline of one pipeline: of the ranks that hold the same stage, the lowest."""
    from terapipe_ds.timeline import Timeline

    chosen: dict[int, Timeline] = {}
    taken: set[int] = set()
    for rank, file in sorted(files.items()):
        timeline = Timeline.load(file)
        stages = {event.stage_id for event in timeline.events}
        if not stages & taken:
            chosen[rank] = timeline
            taken |= stages
    others = sorted(set(files) - set(chosen))
    if others:
        print(
            f"terapipe: note: ranks {', '.join(map(str, chosen))}; others hold the same stages (replicas, "
            f"tensor-parallel ranks): {', '.join(map(str, others))}. Give their files to see them.",
            file=sys.stderr,
        )
    timeline = Timeline.merge(chosen.values())
    absent = sorted(set(range(timeline.num_stages)) - taken)
    if absent:
        print(f"terapipe: note: no events of stage {', '.join(map(str, absent))}", file=sys.stderr)
    return timeline
