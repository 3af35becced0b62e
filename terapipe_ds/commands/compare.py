"""``terapipe compare``: where a measured step differs from the predicted one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from terapipe_ds.commands import check_output

if TYPE_CHECKING:
    from terapipe_ds.timeline import Timeline

HELP = "compare a measured step with the predicted one"
DESCRIPTION = "Compare two timelines of one schedule: makespan, busy and waiting time per stage, and single actions."
EXAMPLES = """\
  terapipe compare predicted.json measured.json
  terapipe compare predicted.json traces/ --step 20 --picture both.png
  terapipe compare predicted.json measured.json --json

A timeline is a file of `terapipe simulate --timeline`, or a trace directory that the engine wrote.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("predicted", metavar="PREDICTED", help="a timeline file, or a trace directory")
    parser.add_argument("measured", metavar="MEASURED", help="a timeline file, or a trace directory")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which step of a directory (default: the last that all ranks have)"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw one above the other, to a .png, .svg or .pdf file")


def run(arguments: argparse.Namespace) -> None:
    """Compare, print, and draw if asked for."""
    from terapipe_ds.timeline_compare import compare, render

    check_output(arguments.picture, "--picture")
    predicted = _load(arguments.predicted, arguments.step)
    measured = _load(arguments.measured, arguments.step)
    comparison = compare(predicted, measured)
    if arguments.picture:
        from terapipe_ds.timeline_picture import draw_many

        titled = [(f"predicted: {predicted.name}".rstrip(": "), predicted), ("measured", measured)]
        draw_many(titled, arguments.picture)
    print(json.dumps(comparison.to_dict(), indent=1, allow_nan=False) if arguments.json else render(comparison))


def _load(name: str, step: int | None) -> Timeline:
    from terapipe_ds.commands.timeline import load_step
    from terapipe_ds.timeline import Timeline

    path = Path(name)
    return load_step([path], step)[1] if path.is_dir() else Timeline.load(path)
