"""Run `terapipe timeline`: draw the timeline of a pipeline's ranks, or compare it with a predicted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from terapipe_ds.commands.options import JsonOutput, Options, Output, Picture, Text, json_option, option, write_json
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.timeline import Timeline, parse_file_name
from terapipe_ds.timeline.compare import compare
from terapipe_ds.timeline.export import to_chrome_trace
from terapipe_ds.timeline.interactive import timeline_page
from terapipe_ds.timeline.picture import draw_timelines

HELP = "draw a measured step, or compare it with a predicted one"
DESCRIPTION = (
    "Draw what the ranks of a pipeline did in one step, from the files of a trace directory. With --against, print a "
    "table: makespan, busy and waiting time per stage, and the single actions that differ most."
)
EXAMPLES = """\
  terapipe timeline traces/ --out step.png
  terapipe timeline traces/ --step 20 --out step20.svg
  terapipe timeline timeline-step000020-rank*.json --out step20.png
  terapipe timeline traces/ --against predicted.json
  terapipe timeline traces/ --step 20 --against predicted.json --json --out both.png
  # a page to zoom, hover and filter; needs plotly
  terapipe timeline traces/ --against predicted.json --html step.html
  terapipe timeline traces/ --perfetto trace.json    # opens in ui.perfetto.dev

With `trace_dir` set, the engine writes timeline-step<step>-rank<rank>.json into that directory.
A single file may also be one that `terapipe simulate --timeline` wrote.
"""


class TimelineOptions(Options):
    traces: tuple[Text, ...] = option(
        "a trace directory, its files, or one timeline file", "TRACE_DIR_OR_FILE", flags=("traces",), nargs="+"
    )
    out: Picture | None = option("picture to write: .png, .svg or .pdf", "FILE")
    html: Output | None = option("page to write: a timeline that can be zoomed, hovered and filtered", "FILE.html")
    perfetto: Output | None = option("Chrome trace to write, which ui.perfetto.dev opens", "FILE.json")
    step: int | None = option("which step (default: the last run's last that all ranks have)", "N")
    against: Text | None = option("compare with this timeline file or trace directory, drawn above", "PREDICTED")
    as_json: JsonOutput | None = json_option("the comparison")


def run(options: TimelineOptions) -> None:
    writes = ", ".join(filter(None, (options.out, options.html, options.perfetto)))
    if options.against is None and (not writes or options.as_json):
        missing = "--json goes with --against only" if options.as_json else "--out is missing"
        raise CommandError(
            f"{missing}: give --out FILE for a picture, --html FILE for a page, --perfetto FILE for a trace, or "
            "--against PREDICTED for a table"
        )
    step, timeline = load_step([Path(trace) for trace in options.traces], options.step)
    other, predicted = ("", None) if options.against is None else load_step([Path(options.against)], options.step)
    if options.step is not None and not (step or other):
        raise CommandError(f"--step {options.step} goes with a trace directory or its files only: leave it out")
    if predicted is None:
        _write(options, [(", ".join(filter(None, (step, timeline.name))), timeline)])
        print(
            f"{writes}: {step or Path(options.traces[0]).name}, {timeline.num_stages} stages,"
            f" makespan {timeline.makespan_s:.6g} s, bubble {100 * timeline.bubble_fraction:.1f} %"
        )
        return
    comparison = compare(predicted, timeline)
    _write(options, [(f"predicted: {predicted.name}".rstrip(": "), predicted), ("measured", timeline)])
    if not write_json(lambda: json.dumps(comparison.to_dict(), indent=1, allow_nan=False), options.as_json):
        print(comparison.render())


def _write(options: TimelineOptions, titled: list[tuple[str, Timeline]]) -> None:
    if options.out:
        draw_timelines(titled, options.out)
    if options.html:
        title = "Predicted and measured step" if len(titled) > 1 else titled[0][0] or Path(options.traces[0]).name
        short = [("predicted", titled[0][1]), *titled[1:]] if len(titled) > 1 else titled
        write_text(options.html, timeline_page(short, title))
    if options.perfetto:
        (title, first), *others = titled
        write_text(options.perfetto, to_chrome_trace(first, title if others else "", *others))


def load_step(paths: list[Path], wanted: int | None) -> tuple[str, Timeline]:
    """Return the name of the step (the wanted one, or the last that all ranks have) and its pipeline's timeline.

    A single file that does not have the name of a rank's file is a whole timeline, of a step without a number.
    """
    if len(paths) == 1 and not paths[0].is_dir() and parse_file_name(paths[0].name) is None:
        return "", Timeline.load(paths[0])
    step, files = _pick_step(_find_traces(paths), wanted)
    return f"step {step}", _merge_replica(files)


def _find_traces(paths: list[Path]) -> dict[int, dict[int, Path]]:
    """Return step -> rank -> file for all named files and all files in named folders."""
    steps: dict[int, dict[int, Path]] = {}
    for path in paths:
        if not path.exists():
            raise CommandError(f"{path}: no such file or directory; give a path that exists")
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            key = parse_file_name(file.name)
            if key is None and not path.is_dir():
                raise CommandError(f"{file}: the name must be timeline-step<6 digits>-rank<4 digits>.json")
            if key is not None and steps.setdefault(key[0], {}).setdefault(key[1], file) != file:
                raise CommandError(f"{file} and {steps[key[0]][key[1]]} are the same step and rank: give one of them")
    if not steps:
        places = ", ".join(map(str, paths))
        raise CommandError(f"no timeline-step*-rank*.json in {places}: set trace_dir, or give another path")
    return steps


def _pick_step(steps: dict[int, dict[int, Path]], wanted: int | None) -> tuple[int, dict[int, Path]]:
    ranks = {rank for files in steps.values() for rank in files}
    complete = [step for step, files in steps.items() if len(files) == len(ranks)]
    if wanted is None and not complete:
        raise CommandError(f"no step is there for all of the {len(ranks)} ranks: choose one rank's files or --step N")
    # the last by the clock: an older run may have left later steps in the folder
    by_clock = {step: _span_s(Timeline.load(steps[step][min(ranks)])) for step in complete if wanted is None}
    step = max(complete, key=lambda step: (by_clock[step], step)) if wanted is None else wanted
    if step not in steps:
        raise CommandError(f"step {step} is not there: the steps are {', '.join(map(str, sorted(steps)))}; give one")
    missing = sorted(ranks - set(steps[step]))
    if missing:
        raise CommandError(f"step {step} lacks rank {', '.join(map(str, missing))}: choose another step")
    return step, steps[step]


def _span_s(timeline: Timeline) -> tuple[float, float]:
    """Return when the first action of a rank began, and when its last one ended."""
    events = timeline.events
    return min((event.start_s for event in events), default=0.0), max((event.end_s for event in events), default=0.0)


def _merge_replica(files: dict[int, Path]) -> Timeline:
    """Return the timeline of one pipeline: each stage is read from its lowest rank."""
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
        same = f"others hold the same stages (replicas, tensor-parallel ranks): {', '.join(map(str, others))}"
        _note(f"ranks {', '.join(map(str, chosen))}; {same}. Give their files to see them.")
    timeline = Timeline.merge(chosen.values())
    spans = [_span_s(each) for each in chosen.values() if each.events]
    if (gap_s := max((span[0] for span in spans), default=0.0) - min((span[1] for span in spans), default=0.0)) > 0:
        ranks = ", ".join(map(str, chosen))
        _note(f"ranks {ranks} are {gap_s:.3g} s apart: their clocks differ, or two runs wrote to this folder")
    absent = sorted(set(range(timeline.num_stages)) - taken)
    if absent:
        _note(f"no events of stage {', '.join(map(str, absent))}")
    return timeline


def _note(text: str) -> None:
    print(f"terapipe: note: {text}", file=sys.stderr)
