"""Run `terapipe show`: print a schedule."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from typing import ClassVar

from terapipe_ds.commands.options import (
    STDOUT,
    JsonOutput,
    Numbers,
    Printed,
    ScheduleOptions,
    Text,
    json_option,
    option,
    switch,
    write_json,
)
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.schedule import SCHEDULE_NAMES, Schedule, ScheduleError, render, to_csv, validate
from terapipe_ds.schedule.show import to_dict

HELP = "print a schedule"
DESCRIPTION = "Print a schedule: who runs what, in which order, with its bubble and its live slices."
EXAMPLES = """\
  terapipe show --schedule seq1f1b --stages 4 --micro-batches 2 --slices 4
  # a number of slices for each micro-batch
  terapipe show --schedule terapipe --stages 4 --micro-batches 2 --slices 4,3
  terapipe show --schedule seq1f1b-interleaved --stages 4 --micro-batches 2 --slices 4 \\
                --chunks-per-stage 2
  terapipe show --schedule 1f1b --stages 4 --micro-batches 8 --csv my.csv    # to edit by hand
  terapipe show my.csv                                      # validates the file, then shows it
  terapipe show --schedule seq1f1b --stages 4 --micro-batches 2 --slices 4 --stage 0 --lowered
"""


class ShowOptions(ScheduleOptions):
    exclusive: ClassVar[Mapping[str, bool]] = {"source": True, "form": False}

    file: Text | None = option("as --from-csv FILE", "FILE", group="source", flags=("file",), nargs="?")
    slices: Numbers = option("slices per micro-batch, or one number for each: 4,3,4 (default 1)", "S", default=(1,))
    csv: Printed | None = option(
        "write the orders as CSV to FILE; no name, or -: to stdout", "FILE", group="form", nargs="?", const=STDOUT
    )
    as_json: JsonOutput | None = json_option("the schedule", group="form")
    stage: int | None = option("print the order of one stage only, one entry per line", "N", group="form")
    lowered: bool = switch("with --stage: all that the engine runs, with loads, sends and receives")


def run(options: ShowOptions) -> None:
    options.refuse_without("stage", "lowered")
    try:
        path, counts = options.from_csv if options.file is None else options.file, options.slices
        if path in SCHEDULE_NAMES and not os.path.exists(path):
            raise CommandError(f"{path} is the name of a schedule, not of a file: give --schedule {path}")
        if path is None:
            schedule = options.build(counts[0] if len(counts) == 1 else counts)
        else:
            schedule = options.load(path, "slices")
        validate(schedule)
    except ScheduleError as error:
        if error.picture:
            print(error.picture)
        raise
    if options.csv == STDOUT:
        print(to_csv(schedule), end="")
    elif options.csv is not None:
        write_text(options.csv, to_csv(schedule))
    elif not write_json(lambda: json.dumps(to_dict(schedule), indent=1), options.as_json):
        print(_text(schedule, options))


def _text(schedule: Schedule, options: ShowOptions) -> str:
    if options.stage is None:
        return render(schedule, width=max(shutil.get_terminal_size((110, 24)).columns, 40))
    stage = schedule.for_stage(options.stage)
    order = map(str, stage.actions) if options.lowered else schedule.compute_order(stage.stage_id)
    return "\n".join(order)
