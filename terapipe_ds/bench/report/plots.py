"""Draw the plots of the report with matplotlib: one colour and marker per system, the legend below the data.

Figures have the colours of the light theme; `inline_svg` turns these into variables of the page's style sheet, so that
a figure follows the theme of the page.
"""

# ruff: noqa: RUF001 - signs for times, minus and dashes are meant
from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from terapipe_ds.bench.report.data import Result, Run, RunGroup
from terapipe_ds.bench.report.text import bytes_unit, digits, percent, time_unit
from terapipe_ds.timeline.picture import INK, LINE, MUTED, WAIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = "#d9e6cf"  # of errors within 5 %
COLOURS = {"deepspeed": "#c2610c", "terapipe": "#0068b5", "torch": "#00806a"}
MARKERS = {"deepspeed": "s", "terapipe": "o", "torch": "^"}
_VARIABLES = {**COLOURS, "ink": INK, "muted": MUTED, "line": LINE, "wait": WAIT, "band": BAND}
_MOST_LETTERS = 46  # characters of a row's label; longer ones are cut
_SMALL: dict[str, Any] = {"fontsize": 8.5, "color": MUTED}
_NO_EDGE: dict[str, Any] = {"markeredgewidth": 0, "linestyle": "none"}

Rows = list[tuple[RunGroup, list[Run]]]  # a panel per group, and in it a row per run, the first on top
_Some = Sequence[float | None]


def inline_svg(figure: Figure, key: str, description: str) -> str:
    """Return the figure as an `<svg>` element without a ground, which shrinks to the width of its frame.

    `key` is unique in the page: matplotlib derives from it the ids that references need. The other ids are removed.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    svg = re.sub(r".*?<svg[^>]*>", "", text.getvalue(), count=1, flags=re.DOTALL)
    svg = re.sub(r' id="[^"]*_\d{1,4}"|<!--.*?-->', "", svg)
    for name, colour in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = svg.replace("stroke: #ffffff", "stroke: var(--paper)")
    width, height = figure.get_size_inches()
    return (
        f'<svg viewBox="0 0 {72 * width:g} {72 * height:g}" role="img" aria-label="{escape(description)}" '
        f'style="width:100%;max-width:{96 * width:.0f}px">{svg}'
    )


def inline_png(figure: Figure, description: str) -> str:
    """Return the figure as an `<img>` on white, for pictures whose many boxes would make an SVG larger."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    width = 96 * figure.get_figwidth()
    return f'<img alt="{escape(description)}" style="width:{width:.0f}px" src="data:image/png;base64,{data}">'


def step_times(result: Result) -> Figure | None:
    """Draw a bar per run: every step a dot (the first on top), median, bound, and stock as a line."""
    rows = _rows(result, lambda run: True)
    if not rows:
        return None
    units = [time_unit([max(run.step_s_all) for run in runs]) for _, runs in rows]
    figure, panels = _stack(rows, [f"step time in {unit}" for unit, _ in units])
    for ax, (group, runs), (_, scale) in zip(panels, rows, units, strict=True):
        for row, run in enumerate(runs):
            _draw_steps(ax, row, run, scale)
        ratios = ["–" if ratio is None else f"{ratio:.2f}×" for ratio in map(group.ratio, runs)]
        has_mfu = any(run.mfu is not None for run in runs)
        shares = [f"  {percent(run.mfu)}" if has_mfu else "" for run in runs]
        beside = [ratio + share for ratio, share in zip(ratios, shares, strict=True)]
        _beside(ax, "× stock" + "  MFU" * has_mfu, beside, bold_row=0)
        ax.plot([], [], "|", color=MUTED, markersize=9, markeredgewidth=2.4, label="median")
        if any(run.bound_s is not None for run in runs):
            ax.plot([], [], "|", color=INK, markersize=9, markeredgewidth=1.3, label="bound")
        if stock := group.stock():
            style: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (1, 2)), "zorder": 0, "label": "stock median"}
            ax.axvline(stock.step_s * scale, color=COLOURS["deepspeed"], **style)
        ends = [value for run in runs for value in (*run.step_s_all, run.step_s, run.bound_s or 0.0)]
        ax.set_xlim(0, 1.03 * max(ends) * scale)
    return _with_legend(figure)


def _draw_steps(ax: Axes, row: int, run: Run, scale: float) -> None:
    colour, marker, median, count = COLOURS[run.system], MARKERS[run.system], run.step_s * scale, len(run.step_s_all)
    ax.barh(row, median, 0.66, color=colour, alpha=0.22, linewidth=0)
    if run.replayed:
        ax.barh(row, median, 0.66, facecolor="none", edgecolor=colour, hatch="/////", linewidth=0, label="replayed")
    ax.vlines(median, row - 0.33, row + 0.33, color=colour, linewidth=2.4)
    heights = [row + 0.24 * (2 * (i + 0.5) / count - 1) for i in range(count)]
    ax.plot([step_s * scale for step_s in run.step_s_all], heights, marker, color=colour, markersize=2.9, **_NO_EDGE)
    ax.plot([], [], marker, color=colour, markersize=6.5, label=run.system, **_NO_EDGE)
    if run.bound_s is not None:
        ax.vlines(run.bound_s * scale, row - 0.42, row + 0.42, color=INK, linewidth=1.3)


def prediction_errors(result: Result) -> Figure | None:
    """Draw how far each prediction is from the single steps, a thin bar each, and as a tick from the median."""
    rows = _rows(result, lambda run: run.predicted_s is not None)
    if not rows:
        return None
    figure, panels = _stack(rows, ["predicted / measured − 1, in percent"] * len(rows))
    for ax, (_, runs) in zip(panels, rows, strict=True):
        ax.axvspan(-5, 5, color=BAND, linewidth=0, zorder=0, label="within 5 %")
        for row, run in enumerate(runs):
            singles = [(run.predicted_s or step_s) / step_s - 1 for step_s in run.step_s_all]
            _grouped_bars(ax, row, run, singles, [run.prediction_error], "of the median", 100)
        _beside(ax, "", [percent(run.prediction_error, "+.1f") for run in runs])
    limit = max(8, *(abs(end) for ax in panels for end in ax.get_xlim()))
    for ax in panels:
        ax.set_xlim(-limit, limit)
    return _with_legend(figure)


def memory(result: Result) -> Figure | None:
    """Draw the peak of every stage, a thin bar each from stage 0 down, with the predicted peak as a tick."""
    rows = _rows(result, lambda run: bool(run.largest_peak_bytes))
    if not rows:
        return None
    unit, scale = bytes_unit([run.largest_peak_bytes for run in result.measured])
    stages = max(run.stages for _, runs in rows for run in runs)
    figure, panels = _stack(rows, [f"peak {unit} per stage"] * len(rows), row_height=0.14 + min(0.115 * stages, 0.55))
    for ax, (_, runs) in zip(panels, rows, strict=True):
        for row, run in enumerate(runs):
            _grouped_bars(ax, row, run, run.peak_bytes or (), run.predicted_peak_bytes or (), "predicted", scale)
        _beside(ax, "largest", [digits(run.largest_peak_bytes, 3, scale) for run in runs])
    return _with_legend(figure)


def _grouped_bars(ax: Axes, row: int, run: Run, values: _Some, ticks: _Some, meaning: str, scale: float) -> None:
    """Draw thin bars that share the height of a row, the first on top, and ticks that share it likewise."""
    thick, tall = (0.82 / max(len(each), 1) for each in (values, ticks))
    middles, ends = [row - 0.41 + thick * (i + 0.5) for i in range(len(values))], [scale * (v or 0) for v in values]
    ax.barh(middles, ends, 0.78 * thick, color=COLOURS[run.system], alpha=0.55, linewidth=0, label=run.system)
    for top, tick in zip([row - 0.41 + tall * i for i in range(len(ticks))], ticks, strict=True):
        if tick is not None:
            ax.vlines(tick * scale, top, top + tall, color=INK, linewidth=1.5)
            ax.plot([], [], "|", color=INK, markersize=9, markeredgewidth=1.5, label=meaning)
    ax.axhline(row + 0.5, color=LINE, linewidth=0.5, alpha=0.6, zorder=0)


def _rows(result: Result, is_shown: Callable[[Run], bool]) -> Rows:
    """Return the groups that have runs to show, each with these runs."""
    rows = [(group, [run for run in group.runs if is_shown(run)]) for group in result.groups]
    return [(group, runs) for group, runs in rows if runs]


def _stack(rows: Rows, titles: Sequence[str], row_height: float = 0.29) -> tuple[Figure, list[Axes]]:
    """Return a figure with the panels below each other, and their axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    counts = [len(runs) for _, runs in rows]
    layout = ConstrainedLayoutEngine(h_pad=0.1)  # inches above and below each panel
    figure = Figure(figsize=(9.2, row_height * sum(counts) + 0.85 * len(rows) + 0.5), layout=layout)
    panels = figure.subplots(len(rows), squeeze=False, gridspec_kw={"height_ratios": counts})[:, 0]
    for ax, (group, runs), title in zip(panels, rows, titles, strict=True):
        _quiet(ax)
        ax.set_ylim(len(runs) - 0.5, -0.5)
        labels = [run.label for run in runs]
        labels = [text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…" for text in labels]
        ax.set_yticks(range(len(runs)), labels)
        ax.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK)
        ax.set_title(f"{title}, {group.title}", loc="left", fontsize=10, fontweight="bold", color=INK)
    return figure, list(panels)


def _beside(ax: Axes, head: str, texts: Sequence[str], bold_row: int | None = None) -> None:
    """Write a column of figures right of the rows, with a head."""
    ax.text(1.01, 1, head, transform=ax.transAxes, va="bottom", **_SMALL)
    for row, text in enumerate(texts):
        place: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
        ax.text(1.01, row, text, color=INK, fontweight="bold" if row == bold_row else "normal", **place)


def _quiet(ax: Axes) -> None:
    """Leave only the marks that reading values needs: a pale grid, no frame."""
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)
    ax.tick_params(labelsize=8, labelcolor=MUTED, color=LINE, length=3)
    ax.grid(axis="x", color=LINE, linewidth=0.5, alpha=0.6)
    ax.set_axisbelow(True)


def _with_legend(figure: Figure) -> Figure:
    """Add one legend below everything, with each label once."""
    items: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            items.setdefault(label, handle)
    spacing = {"handlelength": 1.8, "columnspacing": 1.4, "handletextpad": 0.5}
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, **spacing}
    figure.legend(items.values(), items, loc="outside lower left", ncols=min(9, len(items)), **style)
    return figure
