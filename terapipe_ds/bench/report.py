"""The report of ``terapipe bench``: one HTML file that needs nothing else, neither network nor scripts.

From the top: what came out, the tables, the plots, how it was measured, and all data.
"""

# ruff: noqa: RUF001 - signs for times, minus and dashes are meant
from __future__ import annotations

import base64
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.bench.report_data import Group, ReportError, Result, Run, read_result
from terapipe_ds.bench.report_style import STYLE
from terapipe_ds.bench.report_table import activations_table, definitions_table, facts_table, runs_table, systems_legend
from terapipe_ds.bench.report_text import EQUAL_WITHIN, headline, notes, seconds, torch_sentence
from terapipe_ds.files import write_text
from terapipe_ds.json_text import JsonError, parse_json
from terapipe_ds.timeline import COMPUTE_KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ReportError", "load_result", "write_report"]

_MOST_BOXES = 1500  # of a timeline as SVG, about 250 bytes each; one with more becomes a PNG
_MOST_PICTURE_BYTES = 500_000  # of all timelines together; what does not fit is left out, and the page says so
_MOST_DATA_BYTES = 400_000  # of the compressed result in the page; beyond it goes without timelines
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # browsers then load nothing else


def write_report(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the report of a benchmark as one HTML file; readers see all of it or nothing.

    ``result``: the dict that ``terapipe bench --json`` writes.

    Raises:
        ReportError: ``result`` lacks something or matplotlib is not there; nothing is written then.
        OSError: the file cannot be written.
    """
    page = render_page(read_result(result))
    write_text(path, page)


def load_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a result that was kept: the JSON file, or the ``.json.gz`` that a report offers."""
    try:
        raw = Path(path).read_bytes()
        data = parse_json(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (JsonError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReportError(f"{os.fspath(path)}: no JSON ({error}); give a file of `terapipe bench --json`") from error
    if not isinstance(data, dict):
        raise ReportError(f"{os.fspath(path)}: holds no object; give a file of `terapipe bench --json`")
    return data


def render_page(result: Result) -> str:
    """The whole page as text."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError("plots need matplotlib: pip install matplotlib") from error
    title = escape(f"terapipe bench: {result.preset}")
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
            *_summary(result),
            *_tables(result),
            *_plots(result),
            *_origin(result),
            "</body>\n</html>\n",
        )
    )


def _summary(result: Result) -> Iterator[str]:
    systems = len({run.system for run in result.runs})
    count = f"{len(result.runs)} run{'s' * (len(result.runs) > 1)} of {systems} system{'s' * (systems > 1)}"
    stages = ", ".join(map(str, sorted({run.stages for run in result.runs})))
    when = f", {result.facts['date']}" if isinstance(result.facts.get("date"), str) else ""
    yield f"<header>\n<h1>Token slices against stock schedules: {escape(result.preset)}</h1>\n"
    yield f'<p class="sub">{count} on {stages} stages{escape(when)}</p>\n'
    yield f'<p class="headline">{escape(headline(result))}</p>\n</header>\n<div class="cards">\n'
    yield from (_card(result, group) for group in result.groups)
    yield "</div>\n"
    yield from (f'<p class="warn">{escape(note)}</p>\n' for note in notes(result))


def _card(result: Result, group: Group) -> str:
    best = group.fastest("terapipe")
    ratio = group.ratio(best) if best is not None else None
    big = "–" if ratio is None else f"{ratio:.2f}×"
    slower = " slower" if ratio is not None and ratio < 1 - EQUAL_WITHIN else ""
    lines = [] if best is None else [f"{best.label}: {seconds(best.step_s)} a step"]
    if best is not None and best.bound_s is not None:
        lines.append(f"{100 * best.bound_s / best.step_s:.0f} % of the bound")
    other = torch_sentence(group)
    details = "".join(f'<span class="sub">{escape(text)}</span>' for text in (*lines, *([other] if other else [])))
    head = "no stock run to compare with" if ratio is None else "the speed of stock"
    return f'<div class="card{slower}"><b>{big}</b><span>{head}, {escape(result.title(group))}</span>{details}</div>\n'


def _tables(result: Result) -> Iterator[str]:
    yield f'<h2>Runs</h2>\n<p class="sub">{systems_legend()}</p>\n'
    for group in result.groups:
        yield f"<h3>{escape(result.title(group).capitalize())}</h3>\n{runs_table(group)}"
    yield '<p class="note">What the columns mean stands <a href="#definitions">below</a>.</p>\n'


_STEPS = "Bars end at the median; dots are the single steps, the first on top. No schedule of its kind beats the bound."
_SLICES = "Step time against the number of slices. The vertical axes do not start at 0."
_MEMORY = "A thin bar per stage, stage 0 on top. The tick is what the memory model predicts."


def _plots(result: Result) -> Iterator[str]:
    from terapipe_ds.bench import report_plots
    from terapipe_ds.bench.report_svg import drawing

    with drawing():
        yield from _plot("Step time", "steps", _STEPS, report_plots.step_times(result))
        yield from _plot("Step time and number of slices", "slices", _SLICES, report_plots.slice_counts(result))
        yield from _timelines(result)
        yield from _prediction(result)
        yield from _plot("Memory per stage", "memory", _MEMORY, report_plots.memory(result))
    yield from _activations(result)


def _activations(result: Result) -> Iterator[str]:
    tables = [(group, table) for group in result.groups if (table := activations_table(group))]
    if tables:
        yield "<h2>Activations</h2>\n<p>What a stage keeps for its backward, of the stage with most: without "
        yield "parameters, their gradients and optimizer states. Beside it its share of the stock engine’s, and the "
        yield "share that the schedule and the memory model predict.</p>\n"
    for group, table in tables:
        yield f"<h3>{escape(result.title(group).capitalize())}</h3>\n{table}"


def _plot(title: str, key: str, caption: str, figure: Figure | None) -> Iterator[str]:
    if figure is not None:
        yield f"<h2>{title}</h2>\n{_figure(key, caption, figure)}"


def _figure(key: str, caption: str, figure: Figure, frame: str = "shrinks") -> str:
    from terapipe_ds.bench.report_svg import inline_svg

    picture = inline_svg(figure, key, caption)
    return f'<figure><div class="scroll {frame}">{picture}</div><figcaption>{escape(caption)}</figcaption></figure>\n'


def _prediction(result: Result) -> Iterator[str]:
    from terapipe_ds.bench import report_plots

    against, errors = report_plots.predictions(result), report_plots.prediction_errors(result)
    if against is not None and errors is not None:
        yield '<h2>Predicted against measured</h2>\n<div class="side">\n'
        yield _figure("predicted", "Both axes are logarithmic. The band is 5 % to either side.", against, "small")
        yield _figure(
            "errors", "Above 0: predicted slower than measured. Lines span the single steps; the band is 5 %.", errors,
            "small",
        )
        yield "</div>\n"


def _timelines(result: Result) -> Iterator[str]:
    """The group that gains most is open, the others are folded."""
    pairs = [(group, pair) for group in result.groups if (pair := timeline_pair(group))]
    pairs.sort(key=lambda each: -(each[0].ratio(each[1][-1]) or 0.0))
    if pairs:
        yield "<h2>Where the time goes</h2>\n<p>A row per stage, measured in the step of median length; light is "
        yield "forward, dark is backward, the colour tells the micro-batch, the pale ground shows waiting.</p>\n"
    left = _MOST_PICTURE_BYTES
    for index, (group, runs) in enumerate(pairs):
        shown = " open" * (index == 0)
        name = escape(f"{result.title(group).capitalize()}: {' and '.join(run.label for run in runs)}")
        picture = _timeline_picture(f"timeline{index}", runs)
        if len(picture) > left:
            picture = '<p class="note">This timeline has too many boxes for the page.</p>'
        left -= len(picture)
        yield f'<details{shown}><summary>{name}</summary>\n<div class="scroll wide">{picture}</div></details>\n'


def timeline_pair(group: Group) -> list[Run]:
    """The runs whose timelines are drawn: one like stock (where there is one), then the fastest."""
    traced = [run for run in group.runs if run.timeline and any(e.kind in COMPUTE_KINDS for e in run.timeline.events)]
    if not traced:
        return []
    best = min(traced, key=lambda run: (run.replayed, run.step_s))
    tests: tuple[Callable[[Run], bool], ...] = (
        lambda run: (run.system, run.schedule.lower()) == ("deepspeed", "1f1b"),
        lambda run: run.schedule.lower() == "1f1b" and len(run.slices) == 1,
        lambda run: len(run.slices) == 1,
    )
    stock = next((run for test in tests for run in traced if test(run) and run is not best), None)
    return [run for run in (stock, best) if run is not None]


def _timeline_picture(key: str, runs: list[Run]) -> str:
    from terapipe_ds.bench.report_svg import inline_png, inline_svg
    from terapipe_ds.timeline_picture import build_figure

    titled = [(run.label, run.timeline) for run in runs if run.timeline is not None]
    description = "Timelines of " + " and ".join(label for label, _ in titled)
    figure = build_figure(titled)
    if sum(len(timeline.events) for _, timeline in titled) > _MOST_BOXES:
        return inline_png(figure, description)
    return inline_svg(figure, key, description)


def _origin(result: Result) -> Iterator[str]:
    """How it was measured, and all the data."""
    yield f"<h2>Machine and command</h2>\n{facts_table({'preset': result.preset, **result.facts, **result.machine})}"
    yield f'<h2 id="definitions">What the columns mean</h2>\n{definitions_table()}'
    slim = result.raw | {"runs": [{k: v for k, v in run.items() if k != "timeline"} for run in result.raw["runs"]]}
    link, complete = _packed(result.raw), True
    if len(link) > _MOST_DATA_BYTES:
        link, complete = _packed(slim), False
    what = "with the timelines" if complete else "without the timelines, which are too large for this page"
    text = escape(json.dumps(slim, indent=1))
    yield '<section class="raw"><h2>Data</h2>\n<p><a download="bench.json.gz" href="data:application/gzip;base64,'
    yield f'{link}">bench.json.gz</a> ({what}); <code>terapipe report bench.json.gz --out report.html</code> makes '
    yield "this page again.</p>\n<details><summary>The same as text, without timelines</summary>\n"
    yield f"<pre>{text}</pre></details></section>\n"


def _packed(data: dict[str, Any]) -> str:
    return base64.b64encode(gzip.compress(json.dumps(data).encode(), mtime=0)).decode()
