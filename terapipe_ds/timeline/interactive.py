"""Build pages with timelines to zoom, hover and filter; a page needs nothing else, since it embeds plotly.

A figure is plain data: columns with a bar per action, in a trace per kind of action and timeline. `data/timeline.js`
gives it its look and hands it to plotly's script, the only part of the Python package `plotly` that is used.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

from terapipe_ds.timeline.picture import CLOSING_KINDS, shade, time_unit
from terapipe_ds.timeline.timeline import COMPUTE_KINDS, Timeline, TimelineError, TimelineEvent
from terapipe_ds.timeline.waits import find_waits

INSTALL = "pip install matplotlib jinja2 plotly"
KINDS = {"F": "forward", "B": "backward", "W": "weight gradient", "wait": "waiting", "other": "reduce and optimizer"}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What the page may do: its own scripts alone, and no network."""
MOST_BOXES = 30_000
"""More bars than these make a browser slow."""
_ORDER = ("wait", "F", "B", "W", "other")
_COLUMNS = ("base", "x", "y", "text", "hovertext", "customdata", "colour")

Titled = tuple[str, Timeline]


def plotly_script() -> str:
    """Return the source of plotly's script. Raise TimelineError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise TimelineError(f"a timeline that can be zoomed needs plotly: {INSTALL}") from error
    return str(get_plotlyjs())


def _data(name: str) -> str:
    return resources.files("terapipe_ds").joinpath("data", name).read_text(encoding="utf-8")


def timeline_page(titled: Sequence[Titled], title: str) -> str:
    """Return a page with one interactive picture; the rows of all timelines of a stage are next to one another."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_data('timeline.css')}</style>\n{scripts()}</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{interactive_timeline(titled, 'timeline')}\n</body>\n</html>\n"
    )


def scripts() -> str:
    """Return the code that a page with interactive timelines needs once: packed plotly, and the script that draws."""
    packed = base64.b64encode(gzip.compress(plotly_script().encode(), mtime=0)).decode()
    own = _data("timeline.js")
    return f'<script type="text/plain" id="plotly-packed">{packed}</script>\n<script>{own}</script>\n'


def interactive_timeline(titled: Sequence[Titled], name: str, *, compares: bool = True) -> str:
    """Return one interactive picture with its filters, as HTML; `name` is unique in the page."""
    figure = build_interactive(titled, compares=compares)
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    kinds = {trace["kind"] for trace in figure["traces"]}
    units = {tuple(unit) for trace in figure["traces"] if trace["kind"] != "other" for unit in trace["customdata"]}
    filters = (
        ("kind", "action", [(kind, words) for kind, words in KINDS.items() if kind in kinds]),
        ("micro_batch", "micro-batch", [(str(m), str(m)) for m in sorted({m for m, _ in units})]),
        ("slice", "slice", [(str(s), str(s)) for s in sorted({s for _, s in units})]),
    )
    summaries = "".join(f"<li>{escape(_summary(title, timeline))}</li>" for title, timeline in titled)
    return (
        f'<div class="interactive" data-figure="{name}-figure">\n<ul class="sums">{summaries}</ul>\n'
        f'<p class="filters">show {" ".join(_select(*each) for each in filters)}</p>\n'
        '<p class="help">The colour tells the micro-batch: light is forward, dark backward. Drag to zoom, scroll to '
        "zoom at the pointer, double-click for the whole step. Hover a bar for its times, a pale one for the cause of "
        "a wait.</p>\n"
        f'<div class="plot"></div>\n<script type="application/json" id="{name}-figure">{data}</script>\n</div>'
    )


def build_interactive(titled: Sequence[Titled], *, compares: bool = True) -> dict[str, Any]:
    """Return traces, the names of rows and the unit of times; every timeline begins at 0 with its first computation.

    With `compares` they have one schedule, and an action of the second shows its duration in the first.
    """
    if not any(timeline.computations() for _, timeline in titled):
        raise TimelineError("there is nothing to draw: the timelines hold no F, B or W; give those of a step")
    boxes = sum(len(timeline.events) for _, timeline in titled)
    if boxes > MOST_BOXES:
        raise TimelineError(
            f"{boxes} actions are more than a browser draws well ({MOST_BOXES}): open the step in ui.perfetto.dev "
            "(--perfetto FILE), or draw a picture (--out FILE.png)"
        )
    unit = time_unit(max(timeline.makespan_s for _, timeline in titled))
    stages = range(max(timeline.num_stages for _, timeline in titled))
    titles = [f" {escape(title)}" for title, _ in titled] if len(titled) > 1 else [""]
    traces: list[dict[str, Any]] = []
    for index, (title, timeline) in enumerate(titled):
        reference = titled[0] if compares and index > 0 else None
        rows = [f"stage {stage_id}{titles[index]}" for stage_id in stages]
        traces += _Bars(timeline, rows, unit, reference).traces(escape(title))
    rows = [f"stage {stage_id}{title}" for stage_id in stages for title in titles]
    return {"traces": traces, "rows": rows, "unit": unit[0]}


class _Bars:
    def __init__(
        self, timeline: Timeline, rows: Sequence[str], unit: tuple[str, float], reference: Titled | None
    ) -> None:
        self._timeline, self._rows, (self._unit, self._scale) = timeline, rows, unit
        self._zero_s = timeline.start_s
        self._reference, self._expected_s = "", dict[tuple[int, str], float]()
        if reference is not None:
            self._reference = escape(reference[0])
            self._expected_s = {(e.stage_id, e.action): e.end_s - e.start_s for e in reference[1].computations()}
        self._columns: dict[str, dict[str, list[Any]]] = {}

    def traces(self, title: str) -> list[dict[str, Any]]:
        """Return a trace per kind, waits first, so that they lie below the others."""
        waits = find_waits(self._timeline)
        before = {(wait.stage_id, wait.before.action): wait for wait in waits}
        for wait in waits:
            lines = [f"<b>waits {self._text(wait.duration_s)}</b>, stage {wait.stage_id}"]
            lines += [f"before {escape(wait.before.action)}, for", escape(wait.reason)]
            self._add("wait", dataclasses.replace(wait.before, start_s=wait.start_s, end_s=wait.end_s), lines)
        for event in self._timeline.events:
            if event.kind in COMPUTE_KINDS + CLOSING_KINDS:
                lines = [f"<b>{escape(event.action)}</b>, stage {event.stage_id}, {title}", *self._words(event)]
                if (gap := before.get((event.stage_id, event.action))) is not None:
                    lines.append(f"after a wait of {self._text(gap.duration_s)} for {escape(gap.reason)}")
                self._add(event.kind if event.kind in COMPUTE_KINDS else "other", event, lines)
        return [{"kind": kind, "name": KINDS[kind], **self._columns[kind]} for kind in _ORDER if kind in self._columns]

    def _text(self, seconds: float) -> str:
        return f"{seconds * self._scale:.4g} {self._unit}"

    def _add(self, kind: str, event: TimelineEvent, lines: Sequence[str]) -> None:
        columns = self._columns.setdefault(kind, {name: [] for name in _COLUMNS})
        text = f"{event.micro_batch_id}.{event.slice_id}" if kind in COMPUTE_KINDS else ""
        start, length = event.start_s - self._zero_s, event.end_s - event.start_s
        unit = [event.micro_batch_id, event.slice_id]
        colour = "#" + "".join(f"{round(255 * part):02x}" for part in shade(event.micro_batch_id, event.kind))
        row, hover = self._rows[event.stage_id], "<br>".join(lines)
        values = (start * self._scale, length * self._scale, row, text, hover, unit, colour)
        for name, value in zip(_COLUMNS, values, strict=True):
            columns[name].append(value)

    def _words(self, event: TimelineEvent) -> Iterator[str]:
        """Yield the lines about a bar: its action, its times, and its expected duration."""
        if event.kind in COMPUTE_KINDS:
            chunk = f", chunk {event.chunk_id}" if event.chunk_id else ""
            yield f"micro-batch {event.micro_batch_id}, slice {event.slice_id}{chunk}"
        duration_s = event.end_s - event.start_s
        start, stop = (self._text(time_s - self._zero_s) for time_s in (event.start_s, event.end_s))
        yield f"{self._text(duration_s)}, from {start} to {stop}"
        expected_s = self._expected_s.get((event.stage_id, event.action))
        if expected_s is not None:
            ratio = f", {duration_s / expected_s:.2f} times as long" if expected_s > 0 else ""
            yield f"{self._reference}: {self._text(expected_s)}{ratio}"


def _summary(title: str, timeline: Timeline) -> str:
    unit, scale = time_unit(timeline.makespan_s)
    return f"{title}: makespan {timeline.makespan_s * scale:.4g} {unit}, bubble {100 * timeline.bubble_fraction:.1f} %"


def _select(name: str, words: str, choices: Sequence[tuple[str, str]]) -> str:
    options = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices)
    return f'<label>{words} <select name="{name}"><option value="">all</option>{options}</select></label>'
