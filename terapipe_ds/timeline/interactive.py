"""Timelines that can be zoomed, hovered and filtered, as a page that needs nothing else: plotly is embedded in it.

A figure is plain data for plotly's script: a bar per action, in a trace per kind of action and row. Of the Python
package `plotly` (in the extra `plot`) only this script is used.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from terapipe_ds.timeline.picture import shade, time_unit
from terapipe_ds.timeline.timeline import COMPUTE_KINDS, Timeline, TimelineError, TimelineEvent
from terapipe_ds.timeline.waits import Wait, find_waits

INSTALL = "pip install 'terapipe_ds[plot]'"
KINDS = {"F": "forward", "B": "backward", "W": "weight gradient", "wait": "waiting", "other": "reduce and optimizer"}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What the page may do: its own scripts alone, and no network."""
MOST_BOXES = 30_000
"""More bars than these make a browser slow."""
_OTHER_KINDS = ("RT", "RD", "ST")
_ROW_PIXELS = 30
_COLUMNS = ("base", "x", "y", "text", "hovertext", "customdata")

Key = tuple[int, str]


def plotly_script() -> str:
    """Return the source of plotly's script. Raise TimelineError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise TimelineError(f"a timeline that can be zoomed needs plotly: {INSTALL}") from error
    return str(get_plotlyjs())


def timeline_page(titled: Sequence[tuple[str, Timeline]], title: str) -> str:
    """Return a page with one interactive picture; the rows of all timelines of a stage are next to one another."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n{scripts()}</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{interactive_timeline(titled, 'timeline')}\n</body>\n</html>\n"
    )


def scripts() -> str:
    """Return what a page with interactive timelines needs once: plotly, packed, and what draws with it."""
    packed = base64.b64encode(gzip.compress(plotly_script().encode(), mtime=0)).decode()
    own = resources.files("terapipe_ds").joinpath("data/timeline.js").read_text(encoding="utf-8")
    return f'<script type="text/plain" id="plotly-packed">{packed}</script>\n<script>{own}</script>\n'


def interactive_timeline(titled: Sequence[tuple[str, Timeline]], name: str, *, compares: bool = True) -> str:
    """Return one interactive picture with its filters, as HTML; `name` is unique in the page."""
    figure = build_interactive(titled, compares=compares)
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    kinds = {trace["meta"]["kind"] for trace in figure["data"]}
    units = {
        tuple(unit) for trace in figure["data"] for unit in trace["customdata"] if trace["meta"]["kind"] != "other"
    }
    filters = (
        ("kind", "action", [(kind, words) for kind, words in KINDS.items() if kind in kinds]),
        ("micro_batch", "micro-batch", [(str(m), str(m)) for m in sorted({m for m, _ in units})]),
        ("slice", "slice", [(str(s), str(s)) for s in sorted({s for _, s in units})]),
    )
    summaries = "".join(f"<li>{escape(_summary(title, timeline))}</li>" for title, timeline in titled)
    return (
        f'<div class="interactive" data-figure="{name}-figure">\n<ul class="sums">{summaries}</ul>\n'
        f'<p class="filters">show {" ".join(_select(*each) for each in filters)}</p>\n'
        '<p class="help">Drag to zoom, scroll to zoom at the pointer, double-click for the whole step. '
        "Hover a bar for its times, a pale one for what the stage waited for.</p>\n"
        f'<div class="plot"></div>\n<script type="application/json" id="{name}-figure">{data}</script>\n</div>'
    )


def build_interactive(titled: Sequence[tuple[str, Timeline]], *, compares: bool = True) -> dict[str, Any]:
    """Return data and layout for plotly; every timeline begins at 0 with its first computation.

    Args:
        compares: the timelines are of one schedule. An action of the second says how long it took in the first.
    """
    if not any(timeline.computations() for _, timeline in titled):
        raise TimelineError("there is nothing to draw: the timelines hold no F, B or W; give those of a step")
    boxes = sum(len(timeline.events) for _, timeline in titled)
    if boxes > MOST_BOXES:
        raise TimelineError(
            f"{boxes} actions are more than a browser draws well ({MOST_BOXES}): open the step in ui.perfetto.dev "
            "(--perfetto FILE), or draw a picture (--out FILE.png)"
        )
    stages = max(timeline.num_stages for _, timeline in titled)
    unit, scale = time_unit(max(timeline.makespan_s for _, timeline in titled))
    names = _row_names([title for title, _ in titled], stages)
    traces: list[dict[str, Any]] = []
    for index, (title, timeline) in enumerate(titled):
        rows = [name[index] for name in names]
        reference = titled[0] if compares and index > 0 else None
        traces += _traces(title, timeline, rows, (unit, scale), reference)
    rows = [name for of_stage in names for name in of_stage]
    return {"data": traces, "layout": _layout(rows, unit)}


def _row_names(titles: Sequence[str], stages: int) -> list[list[str]]:
    """Return the names of the rows of each stage, one per timeline."""
    if len(titles) == 1:
        return [[f"stage {stage_id}"] for stage_id in range(stages)]
    return [[f"stage {stage_id} {escape(title)}" for title in titles] for stage_id in range(stages)]


def _traces(
    title: str,
    timeline: Timeline,
    rows: Sequence[str],
    unit: tuple[str, float],
    reference: tuple[str, Timeline] | None,
) -> list[dict[str, Any]]:
    """Return the bars of one timeline, a trace per kind."""
    zero_s = min(event.start_s for event in timeline.computations()) if timeline.computations() else 0.0
    waits = find_waits(timeline)
    before = {(wait.stage_id, wait.before.action): wait for wait in waits}
    expected = {} if reference is None else _durations(reference[1])
    by_kind: dict[str, list[TimelineEvent]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS + _OTHER_KINDS:
            by_kind.setdefault(event.kind if event.kind in COMPUTE_KINDS else "other", []).append(event)
    traces = [_wait_trace(waits, rows, unit, zero_s)] if waits else []
    for kind in ("F", "B", "W", "other"):
        events = by_kind.get(kind, [])
        if not events:
            continue
        bars = _Bars(kind, unit, zero_s)
        for event in events:
            key = event.stage_id, event.action
            lines = [f"<b>{escape(event.action)}</b>, stage {event.stage_id}, {escape(title)}", *_words(event, bars)]
            if key in expected and reference is not None:
                lines.append(_against(event, expected[key], reference[0], bars))
            if key in before:
                lines.append(f"after a wait of {bars.text(before[key].duration_s)} for {escape(before[key].reason)}")
            text = f"{event.micro_batch_id}.{event.slice_id}" if kind in COMPUTE_KINDS else ""
            bars.add(event, rows[event.stage_id], text, _colour(event), "<br>".join(lines))
        traces.append(bars.trace())
    return traces


def _wait_trace(waits: Sequence[Wait], rows: Sequence[str], unit: tuple[str, float], zero_s: float) -> dict[str, Any]:
    bars = _Bars("wait", unit, zero_s)
    for wait in waits:
        lines = [
            f"<b>waits {bars.text(wait.duration_s)}</b>, stage {wait.stage_id}",
            f"before {escape(wait.before.action)}, for",
            escape(wait.reason),
        ]
        spanned = TimelineEvent(
            wait.stage_id, "", wait.before.micro_batch_id, wait.before.slice_id, "wait", wait.start_s, wait.end_s
        )
        bars.add(spanned, rows[wait.stage_id], "", "#e4e8ec", "<br>".join(lines))
    return bars.trace()


class _Bars:
    """The bars of one trace."""

    def __init__(self, kind: str, unit: tuple[str, float], zero_s: float) -> None:
        self._kind, (self._unit, self._scale), self._zero_s = kind, unit, zero_s
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("base", "x", "y", "text", "hovertext", "customdata")
        }
        self._colours: list[str] = []

    def text(self, seconds: float) -> str:
        return f"{seconds * self._scale:.4g} {self._unit}"

    def at(self, time_s: float) -> str:
        return self.text(time_s - self._zero_s)

    def add(self, event: TimelineEvent, row: str, text: str, colour: str, hover: str) -> None:
        starts = (event.start_s - self._zero_s) * self._scale
        values = (starts, (event.end_s - event.start_s) * self._scale, row, text, hover)
        for name, value in zip(self._columns, (*values, [event.micro_batch_id, event.slice_id]), strict=True):
            self._columns[name].append(value)
        self._colours.append(colour)

    def trace(self) -> dict[str, Any]:
        is_plain = self._kind == "wait"
        marker: dict[str, Any] = {"color": self._colours[0] if is_plain else self._colours}
        marker["line"] = {"width": 0 if is_plain else 0.5, "color": "rgba(255,255,255,0.7)"}
        return {
            "type": "bar",
            "orientation": "h",
            "name": KINDS[self._kind],
            "meta": {"kind": self._kind},
            "marker": marker,
            "hoverinfo": "text",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": "#ffffff" if self._kind == "B" else "#1f2932"},
            **self._columns,
        }


def _words(event: TimelineEvent, bars: _Bars) -> list[str]:
    unit = f"micro-batch {event.micro_batch_id}, slice {event.slice_id}"
    if event.chunk_id:
        unit += f", chunk {event.chunk_id}"
    times = f"{bars.text(event.end_s - event.start_s)}, from {bars.at(event.start_s)} to {bars.at(event.end_s)}"
    return ([unit] if event.kind in COMPUTE_KINDS else []) + [times]


def _against(event: TimelineEvent, expected_s: float, title: str, bars: _Bars) -> str:
    duration_s = event.end_s - event.start_s
    ratio = f", {duration_s / expected_s:.2f} times as long" if expected_s > 0 else ""
    return f"{escape(title)}: {bars.text(expected_s)}{ratio}"


def _durations(timeline: Timeline) -> dict[Key, float]:
    return {(event.stage_id, event.action): event.end_s - event.start_s for event in timeline.computations()}


def _colour(event: TimelineEvent) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in shade(event.micro_batch_id, event.kind))


def _layout(rows: Sequence[str], unit: str) -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "bargap": 0.14,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
        "height": 90 + _ROW_PIXELS * len(rows),
        "margin": {"l": 10, "r": 10, "t": 30, "b": 45},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "uniformtext": {"mode": "hide", "minsize": 8},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
        "hoverlabel": {"align": "left"},
        "xaxis": {"title": {"text": f"time ({unit})"}, "zeroline": False},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": list(rows),
            "autorange": "reversed",
            "fixedrange": True,
            "automargin": True,
            "showgrid": False,
        },
    }


def _summary(title: str, timeline: Timeline) -> str:
    unit, scale = time_unit(timeline.makespan_s)
    return f"{title}: makespan {timeline.makespan_s * scale:.4g} {unit}, bubble {100 * timeline.bubble_fraction:.1f} %"


def _select(name: str, words: str, choices: Sequence[tuple[str, str]]) -> str:
    options = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices)
    return f'<label>{words} <select name="{name}"><option value="">all</option>{options}</select></label>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #66727f; --line: #d5dae0; --wait: #e4e8ec; --paper: white; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --muted: #9aa5b1; --line: #3a434d; --wait: #303942; --paper: #14181c; }
}
body { margin: 1rem; font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.2rem; } .sums { padding-left: 1.1rem; } .help { color: var(--muted); font-size: 0.85rem; }
.filters label { margin-right: 0.9rem; white-space: nowrap; } .plot { width: 100%; }
"""
