"""The plots of the report, as matplotlib figures: one colour per system, legends outside the data."""

# ruff: noqa: RUF001 - signs for times, minus and dashes are meant
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from terapipe_ds.bench.report_axes import (
    LABEL_SIZE,
    MARKERS,
    Panel,
    bottom_legend,
    legend_items,
    quiet,
    stack,
    title_of,
)
from terapipe_ds.bench.report_data import Group, Result, Run
from terapipe_ds.bench.report_svg import BAND, INK, LINE, MUTED, PAPER, SYSTEM_COLOURS
from terapipe_ds.bench.report_text import bytes_unit, digits, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITHIN = 0.05
"""The band in which a prediction counts as right."""
_SCHEDULE_STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))


def step_times(result: Result) -> Figure | None:
    """A panel per group, a bar per run: every step a dot (the first on top), median, bound, and stock as a line."""
    chosen = [(group, tuple(run for run in group.runs if run.ok)) for group in result.groups]
    panels = [Panel(f"step time in {_unit_of_steps(runs)[0]}, {result.title(group)}", runs, group)
              for group, runs in chosen if runs]  # fmt: skip
    if not panels:
        return None
    figure, axes = stack(panels, right=0.75)
    for ax, panel in zip(axes, panels, strict=True):
        _draw_steps(ax, panel)
    items = legend_items({run.system for panel in panels for run in panel.runs})
    items += legend_items(("step", "median", "bound", "stock"))
    items += legend_items(("replayed",) if any(run.replayed for run in result.runs) else ())
    bottom_legend(figure, items)
    return figure


def _unit_of_steps(runs: Sequence[Run]) -> tuple[str, float]:
    return time_unit([max(run.step_s_all) for run in runs])


def _draw_steps(ax: Axes, panel: Panel) -> None:
    _, scale = _unit_of_steps(panel.runs)
    ends = [value for run in panel.runs for value in (*run.step_s_all, run.step_s, run.bound_s or 0.0)]
    for row, run in enumerate(panel.runs):
        colour = SYSTEM_COLOURS[run.system]
        ax.barh(row, run.step_s * scale, 0.66, color=colour, alpha=0.22, linewidth=0)
        if run.replayed:
            ax.barh(row, run.step_s * scale, 0.66, facecolor="none", edgecolor=colour, hatch="/////", linewidth=0)
        ax.plot([run.step_s * scale] * 2, [row - 0.33, row + 0.33], color=colour, linewidth=2.4, solid_capstyle="butt")
        heights = [row + 0.24 * (2 * (i + 0.5) / len(run.step_s_all) - 1) for i in range(len(run.step_s_all))]
        ax.plot([t * scale for t in run.step_s_all], heights, MARKERS[run.system], color=colour, markersize=2.9,
                markeredgewidth=0, alpha=0.9)  # fmt: skip
        if run.bound_s is not None:
            ax.plot([run.bound_s * scale] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=1.3)
        ratio = panel.group.ratio(run)
        _beside(ax, row, len(panel.runs), "–" if ratio is None else f"{ratio:.2f}×", bold=row == 0)
    _beside(ax, -1, len(panel.runs), "× stock")
    stock = panel.group.stock(replayed=False) or panel.group.stock(replayed=True)
    if stock is not None:
        style: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 0}
        ax.axvline(stock.step_s * scale, color=SYSTEM_COLOURS["deepspeed"], **style)
    ax.set_xlim(0, 1.03 * max(ends) * scale)


def _beside(ax: Axes, row: int, num_rows: int, text: str, *, bold: bool = False) -> None:
    """A figure in the column right of the rows; row -1 is its head."""
    at = (1, 1 - (row + 0.5) / num_rows if row >= 0 else 1)
    style: dict[str, Any] = {"ha": "right", "fontsize": LABEL_SIZE, "annotation_clip": False}
    style |= {"fontweight": "bold" if bold else "normal", "color": INK if row >= 0 else MUTED}
    ax.annotate(text, at, (50, -3 if row >= 0 else 5), xycoords="axes fraction", textcoords="offset points", **style)


def slice_counts(result: Result) -> Figure | None:
    """Step time against the number of slices, a panel per group that has several; None where no group has."""
    shown = [group for group in result.groups if len({len(run.slices) for run in _sliced(group)}) > 1]
    if not shown:
        return None
    from matplotlib.figure import Figure

    columns = min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)
    width, height = 9.2 if columns > 1 else 5.6, 2.75 * rows + 0.75
    figure = Figure(figsize=(width, height))
    names = sorted({run.schedule for group in shown for run in _sliced(group)})
    styles = {name: _SCHEDULE_STYLES[i % len(_SCHEDULE_STYLES)] for i, name in enumerate(names)}
    each = (width - 0.1) / columns
    for index, group in enumerate(shown):
        left, bottom = 0.62 + each * (index % columns), height - 2.75 * (index // columns) - 2.3
        ax = figure.add_axes((left / width, bottom / height, (each - 0.78) / width, 1.9 / height))
        _draw_slices(ax, group, styles)
        title_of(ax, result.title(group))
    items = legend_items(("planned", "bound level", "stock", "best torch"))
    bottom_legend(figure, _schedule_items(styles) + items, columns=6 if columns > 1 else 3)
    return figure


def _sliced(group: Group) -> list[Run]:
    return [run for run in group.runs if run.ok and run.system == "terapipe" and run.slices]


def _draw_slices(ax: Axes, group: Group, styles: dict[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    runs, colour = _sliced(group), SYSTEM_COLOURS["terapipe"]
    unit, scale = time_unit([run.step_s for run in group.runs if run.ok])
    for name, (marker, line) in styles.items():
        equal = sorted((run for run in runs if run.schedule == name and not run.planned), key=lambda r: len(r.slices))
        ax.plot([len(run.slices) for run in equal], [run.step_s * scale for run in equal], marker=marker,
                linestyle=line, color=colour, linewidth=1.4, markersize=5, markeredgewidth=0)  # fmt: skip
    for run in runs:
        if run.planned:
            ax.plot(len(run.slices), run.step_s * scale, "*", color=colour, markersize=11, markeredgewidth=0)
        if run.bound_s is not None:
            ax.plot(len(run.slices), run.bound_s * scale, "_", color=INK, markersize=9, markeredgewidth=1.3)
    for other, dashes in ((group.stock(False) or group.stock(True), (1, 2)), (group.fastest("torch"), (5, 2))):
        if other is not None:
            style: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, dashes), "zorder": 0}
            ax.axhline(other.step_s * scale, color=SYSTEM_COLOURS[other.system], **style)
    counts = sorted({len(run.slices) for run in runs})
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(_apart(counts)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
    ax.margins(y=0.1)
    quiet(ax, grid="y")
    ax.set_xlabel("slices", fontsize=LABEL_SIZE, color=MUTED)
    ax.set_ylabel(f"step time, {unit}", fontsize=LABEL_SIZE, color=MUTED)


def _apart(counts: Sequence[int]) -> list[int]:
    """Those counts whose tick labels do not touch on a log axis; powers of two go first."""
    kept: list[int] = []
    for count in sorted(counts, key=lambda c: (c & (c - 1) != 0, c)):
        if all(abs(math.log2(count / other)) > 0.35 for other in kept):
            kept.append(count)
    return sorted(kept)


def _schedule_items(styles: dict[str, tuple[str, str]]) -> list[tuple[Any, str]]:
    from matplotlib.lines import Line2D

    colour = SYSTEM_COLOURS["terapipe"]
    return [
        (Line2D([], [], color=colour, marker=marker, linestyle=line, linewidth=1.4, markersize=5, markeredgewidth=0),
         f"terapipe {name}")
        for name, (marker, line) in styles.items()
    ]  # fmt: skip


def predictions(result: Result) -> Figure | None:
    """Predicted against measured on equal log axes, with the 5 % band round the diagonal."""
    runs = [run for run in result.runs if run.ok and run.predicted_s is not None]
    if not runs:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(4.4, 4.55))
    ax = figure.add_axes((0.66 / 4.4, 1.0 / 4.55, 3.3 / 4.4, 3.3 / 4.55))
    values = [value for run in runs for value in (run.step_s, run.predicted_s or run.step_s)]
    unit, scale = time_unit(values)
    low, high = min(values) * scale / 1.12, max(values) * scale * 1.12
    ax.fill_between([low, high], [low * (1 - WITHIN), high * (1 - WITHIN)], [low * (1 + WITHIN), high * (1 + WITHIN)],
                    color=BAND, linewidth=0, zorder=0)  # fmt: skip
    ax.plot([low, high], [low, high], color=MUTED, linewidth=0.8, zorder=1)
    for run in runs:
        colour = SYSTEM_COLOURS[run.system]
        face, edge = ("none", colour) if run.replayed else (colour, PAPER)
        ax.plot(run.step_s * scale, (run.predicted_s or 0.0) * scale, MARKERS[run.system], markersize=6.5,
                markerfacecolor=face, markeredgecolor=edge, markeredgewidth=0.8)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis, limit in ((ax.xaxis, ax.set_xlim), (ax.yaxis, ax.set_ylim)):
        limit(low, high)
        axis.set_major_locator(FixedLocator(_round_numbers(low, high)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    quiet(ax, grid="both")
    ax.set_xlabel(f"measured, {unit}", fontsize=LABEL_SIZE, color=MUTED)
    ax.set_ylabel(f"predicted, {unit}", fontsize=LABEL_SIZE, color=MUTED)
    bottom_legend(figure, legend_items({run.system for run in runs}) + legend_items(("within",)), columns=4)
    return figure


def _round_numbers(low: float, high: float) -> list[float]:
    """Ticks that read well between two numbers: 1, 2, 5, ... or finer where fewer than three of these fit."""
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(n / 10 for n in range(10, 100, 2))):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 7)] if found else [low, high]


def prediction_errors(result: Result) -> Figure | None:
    """A row per predicted run: how far the prediction is from the median, and (small) from every single step."""
    chosen = [(group, tuple(r for r in group.runs if r.prediction_error is not None)) for group in result.groups]
    panels = [Panel(f"prediction error, {result.title(g)}", runs, g) for g, runs in chosen if runs]
    if not panels:
        return None
    shown = [run for panel in panels for run in panel.runs]
    widest = max(abs(run.prediction_error or 0.0) for run in shown)
    limit = max(0.08, 1.15 * widest)
    figure, axes = stack(panels, right=0.75, width=6.4, shared_label="predicted / measured − 1, percent")
    for ax, panel in zip(axes, panels, strict=True):
        ax.axvspan(-100 * WITHIN, 100 * WITHIN, color=BAND, linewidth=0, zorder=0)
        ax.axvline(0, color=MUTED, linewidth=0.8, zorder=1)
        for row, run in enumerate(panel.runs):
            _draw_error(ax, row, run, len(panel.runs))
        ax.set_xlim(-100 * limit, 100 * limit)
    return figure


def _draw_error(ax: Axes, row: int, run: Run, num_rows: int) -> None:
    assert run.predicted_s is not None and run.prediction_error is not None
    colour = SYSTEM_COLOURS[run.system]
    singles = [100 * (run.predicted_s / step_s - 1) for step_s in run.step_s_all]
    ax.plot([min(singles), max(singles)], [row, row], color=colour, linewidth=1.2, alpha=0.6)
    face = "none" if run.replayed else colour
    ax.plot(100 * run.prediction_error, row, MARKERS[run.system], markersize=6, markerfacecolor=face,
            markeredgecolor=colour, markeredgewidth=1.0)  # fmt: skip
    _beside(ax, row, num_rows, f"{100 * run.prediction_error:+.1f} %".replace("-", "−"))


def memory(result: Result) -> Figure | None:
    """Peak bytes of every stage, a thin bar each from stage 0 down, with the predicted peak as a tick."""
    known: Callable[[Run], bool] = lambda run: run.largest_peak_bytes is not None  # noqa: E731
    unit, scale = bytes_unit([peak for run in result.runs for peak in run.peak_bytes or ()])
    panels = [Panel(f"peak {unit} per stage, {result.title(group)}", tuple(filter(known, group.runs)), group)
              for group in result.groups if any(map(known, group.runs))]  # fmt: skip
    if not panels:
        return None
    stages = max(panel.group.stages for panel in panels)
    figure, axes = stack(panels, right=0.75, row_height=0.14 + min(0.115 * stages, 0.55))
    for ax, panel in zip(axes, panels, strict=True):
        for row, run in enumerate(panel.runs):
            _draw_peaks(ax, row, run, scale)
            _beside(ax, row, len(panel.runs), digits((run.largest_peak_bytes or 0.0) * scale, 3))
        _beside(ax, -1, len(panel.runs), "largest")
        ends = [peak for run in panel.runs for peak in (*(run.peak_bytes or ()), *(run.predicted_peak_bytes or ()))]
        ax.set_xlim(0, 1.03 * max(peak for peak in ends if peak is not None) * scale or 1.0)
    items = legend_items({run.system for panel in panels for run in panel.runs}, bars=True)
    if any(run.predicted_peak_bytes for panel in panels for run in panel.runs):
        items += legend_items(("predicted peak",))
    bottom_legend(figure, items)
    return figure


def _draw_peaks(ax: Axes, row: int, run: Run, scale: float) -> None:
    peaks = run.peak_bytes or ()
    predicted = run.predicted_peak_bytes or (None,) * len(peaks)
    thick = 0.82 / len(peaks)
    for stage_id, (peak, expected) in enumerate(zip(peaks, predicted, strict=True)):
        middle = row - 0.41 + thick * (stage_id + 0.5)
        if peak is not None:
            ax.barh(middle, peak * scale, 0.78 * thick, color=SYSTEM_COLOURS[run.system], alpha=0.55, linewidth=0)
        if expected is not None:
            ax.plot([expected * scale] * 2, [middle - 0.48 * thick, middle + 0.48 * thick], color=INK, linewidth=1.5,
                    solid_capstyle="butt")  # fmt: skip
    ax.axhline(row + 0.5, color=LINE, linewidth=0.5, alpha=0.6, zorder=0)
