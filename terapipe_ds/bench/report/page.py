"""Write the report of `terapipe bench`: one HTML file that needs nothing else and no network, with scripts on request.

From the top: the outcome, the tables, the plots, how it was measured, and all data. `page.html` is the template.
"""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import terapipe_ds.bench.report.plots as plots
import terapipe_ds.bench.report.text as text
import terapipe_ds.timeline.interactive as interactive_pages
from terapipe_ds.bench.report.data import GIVE, SYSTEMS, ReportError, Result, Run, RunGroup, read_result
from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.bounded import read_bytes, unpacked
from terapipe_ds.files.strict_json import JsonError, parse_json
from terapipe_ds.timeline import TimelineError
from terapipe_ds.timeline.picture import build_figure

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
}
"""How matplotlib draws for the page: text stays text, a `$` is a dollar."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MOST_BOXES = 1500  # of a timeline as SVG, about 400 bytes each; one with more becomes a PNG


def write_report(result: dict[str, Any], path: str | os.PathLike[str], interactive: bool = False) -> None:
    """Write the report of a result, the dict of `terapipe bench --json`, as one file; readers see all of it or nothing.

    With `interactive`, and if plotly is installed, a timeline to zoom, hover and filter follows below each picture.
    Raises `ReportError` if the result lacks something, or matplotlib or jinja2 is missing; nothing is written then.
    """
    write_text(path, render_page(result, interactive))


def load_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a saved result: the JSON file, or the `.json.gz` that a report offers."""
    try:
        data = parse_json(unpacked(read_bytes(path), path))
    except (JsonError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReportError(f"{os.fspath(path)}: no JSON ({error}); {GIVE}") from error
    if not isinstance(data, dict):
        raise ReportError(f"{os.fspath(path)}: holds no object; {GIVE}")
    return data


def check_packages() -> None:
    """Raise `ReportError` if a package that a report needs is missing or broken."""
    try:
        importlib.import_module("matplotlib")
        importlib.import_module("jinja2")
    except ImportError as error:
        raise ReportError(f"the report needs matplotlib and jinja2 ({error}): pip install matplotlib jinja2") from error


def render_page(data: object, interactive: bool = False) -> str:
    result = read_result(data)
    scripts, note = "", "--interactive adds timelines that can be zoomed, hovered and filtered."
    if interactive:
        try:
            scripts, note = interactive_pages.scripts(), ""
        except TimelineError as error:  # a missing package fails nothing: the benchmark may have taken hours
            note = f"The timelines are pictures alone: {error}"
    check_packages()
    import matplotlib
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {name: getattr(text, name) for name in ("digits", "seconds", "percent", "slices_text", "peaks")}
    with matplotlib.rc_context(SETTINGS):
        figures, timelines = _figures(result), list(_timelines(result, bool(scripts)))
    assert isinstance(data, dict)
    slim = data | {"runs": [{k: v for k, v in run.items() if k != "timeline"} for run in data["runs"]]}
    return page.get_template("page.html").render(
        result=result,
        systems=SYSTEMS,
        text=text,
        figures=figures,
        policy=interactive_pages.POLICY if scripts else _POLICY,
        scripts=scripts,
        interactive_note=note,
        timelines=timelines,
        activations=[(group, shares) for group in result.groups if (shares := group.activations())],
        facts=list(_flat({"preset": result.preset, **(result.model_extra or {}), **result.machine})),
        packed=base64.b64encode(gzip.compress(json.dumps(data).encode(), mtime=0)).decode(),
        slim=json.dumps(slim, indent=1),
    )


def timeline_pair(group: RunGroup) -> list[Run]:
    """Return the runs whose timelines are drawn: one like stock (if there is one), then the fastest."""
    traced = [run for run in group.runs if run.timeline and run.timeline.computations()]
    best = min(traced, key=lambda run: (run.replayed, run.step_s), default=None)

    def likeness(run: Run) -> tuple[bool, bool, bool]:
        is_1f1b, is_whole = run.schedule.lower() == "1f1b", len(run.slices) == 1
        return is_1f1b and run.system == "deepspeed", is_1f1b and is_whole, is_whole

    others = [run for run in traced if run is not best and any(likeness(run))]
    return [run for run in (max(others, key=likeness, default=None), best) if run is not None]


def _figures(result: Result) -> dict[str, str]:
    """Return the pictures that the result has figures for, by their names in the template."""
    drawn = (
        ("steps", plots.step_times, "Step times of all runs"),
        ("errors", plots.prediction_errors, "Errors of the predictions, run by run"),
        ("memory", plots.memory, "Peak memory per stage"),
    )
    return {key: plots.inline_svg(figure, key, words) for key, draw, words in drawn if (figure := draw(result))}


def _timelines(result: Result, interactive: bool) -> Iterator[tuple[str, str, str]]:
    """Yield a title, a picture and a zoomable version (or "") per group; the group that gains most comes first."""
    pairs = [(group, pair) for group in result.groups if (pair := timeline_pair(group))]
    pairs.sort(key=lambda each: -(each[0].ratio(each[1][-1]) or 0.0))
    for index, (group, runs) in enumerate(pairs):
        titled = [(run.label, run.timeline) for run in runs if run.timeline is not None]
        title = f"{group.title.capitalize()}: {' and '.join(label for label, _ in titled)}"
        figure, words = build_figure(titled), f"Timelines, {title}"
        has_many = sum(len(timeline.events) for _, timeline in titled) > _MOST_BOXES
        still = plots.inline_png(figure, words) if has_many else plots.inline_svg(figure, f"timeline{index}", words)
        zoomed = ""
        if interactive:
            try:
                zoomed = interactive_pages.interactive_timeline(titled, f"interactive{index}", compares=False)
            except TimelineError as error:  # too many actions
                zoomed = f'<p class="note">{escape(str(error))}</p>'
        yield title, still, zoomed


def _flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values; an object inside an object gets a dotted name."""
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "–"  # noqa: RUF001 - a dash is meant
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)  # noqa: RUF001
