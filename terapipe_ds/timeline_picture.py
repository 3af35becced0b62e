"""Pictures of timelines: one row per stage, slices coloured by micro-batch, forwards light and backwards dark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.files import write_atomically
from terapipe_ds.timeline import COMPUTE_KINDS, FORMAT, Timeline, TimelineError, TimelineEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One hue per micro-batch, in its light shade for forward and its dark one for backward. Sizes are in inches.

_HUES = (
    *("#2b6cb0", "#c96a12", "#2f855a", "#7e57b8", "#c53d43"),
    *("#128a96", "#b3477d", "#8a6d1d", "#4f5b93", "#5f7f2b"),
)
_INK, _GREY, _PALE, _WAIT = "#1f2933", "#66727f", "#b8c1ca", "#f1f3f5"
_ON_LIGHT = "#1f2932"  # the ink on a light box: a page with a dark ground swaps _INK, and this must stay
_CLOSING_KINDS = ("RT", "RD", "ST")
_UPRIGHT = 0.077  # what an upright label needs across, so that nine boxes of ten have room for theirs
_LEFT, _RIGHT, _TOP, _AXIS, _LEGEND = 0.85, 0.65, 0.62, 0.45, 0.4


def draw_many(titled: Sequence[tuple[str, Timeline]], path: str | os.PathLike[str]) -> None:
    """Draw timelines one above the other on one time axis, to a ``.png``, ``.svg`` or ``.pdf`` file.

    A row per stage; the colour tells the micro-batch, light is forward and dark is backward, the pale ground
    shows through where a stage waits. At the right end of a row stands the stage's idle share.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise TimelineError(f"cannot draw to {os.fspath(path)!r}: end the name in .png, .svg or .pdf")
    _check_drawable(titled)
    try:
        import matplotlib
    except ImportError as error:
        raise TimelineError("drawing needs matplotlib: pip install matplotlib") from error
    # A fixed salt and no date: the same timeline gives the same file.
    with matplotlib.rc_context(
        {"svg.hashsalt": FORMAT, "font.family": "DejaVu Sans", "hatch.linewidth": 0.6}
    ):
        figure = _figure(titled)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
        options: dict[str, Any] = {"format": suffix[1:], "dpi": 160, "metadata": metadata}
        write_atomically(path, lambda temporary: figure.savefig(temporary, **options))


def build_figure(titled: Sequence[tuple[str, Timeline]]) -> Figure:
    """The picture of ``draw_many`` as a matplotlib figure, for programs that put it in a page of their own.

    Draw and save it under ``font.family: DejaVu Sans``, by which the labels are measured.
    """
    _check_drawable(titled)
    return _figure(titled)


def _check_drawable(titled: Sequence[tuple[str, Timeline]]) -> None:
    if not any(event.kind in COMPUTE_KINDS for _, timeline in titled for event in timeline.events):
        raise TimelineError("there is nothing to draw: the timelines hold no F, B or W")


def _figure(titled: Sequence[tuple[str, Timeline]]) -> Figure:
    from matplotlib.figure import Figure

    span_s = max(_span_s(timeline) for _, timeline in titled)
    num_rows = max(timeline.num_stages for _, timeline in titled)
    row_height = 0.5 if num_rows <= 8 else 0.36
    boxes = max(span_s / _typical_s(timeline) for _, timeline in titled)
    short = max(span_s / _typical_s(timeline, among=0.05) for _, timeline in titled)
    width = _LEFT + _RIGHT + max(min(max(0.32 * boxes, 8.5), 16.0), min(_UPRIGHT * short, 24.0))
    bodies = [row_height * timeline.num_stages for _, timeline in titled]
    height = sum(bodies) + _TOP * len(bodies) + _AXIS + _LEGEND + 0.1
    figure = Figure(figsize=(width, height), facecolor="white")
    top = height
    unit, scale = _time_unit(span_s)
    for index, ((title, timeline), body) in enumerate(zip(titled, bodies, strict=True)):
        top -= _TOP + body
        box = (_LEFT / width, top / height, (width - _LEFT - _RIGHT) / width, body / height)
        axes = figure.add_axes(box)
        _draw_timeline(axes, timeline, scale, row_height, width - _LEFT - _RIGHT, span_s)
        last = index == len(bodies) - 1
        _decorate(
            axes,
            timeline,
            title,
            f"time ({unit})" if last else "",
            f"{timeline.makespan_s * scale:.4g} {unit}",
        )
    _legend(figure, [timeline for _, timeline in titled], height)
    return figure


def _draw_timeline(
    axes: Axes, timeline: Timeline, scale: float, row_height: float, width: float, span_s: float
) -> None:
    """The boxes of one timeline; ``width`` and ``row_height`` in inches tell which labels fit."""
    zero_s = _zero_s(timeline)
    points_per_s = 72.0 * width / (1.012 * span_s)
    edge = min(0.8, 0.06 * points_per_s * _typical_s(timeline))
    axes.set_xlim(0, 1.012 * span_s * scale)
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    makespan = timeline.makespan_s * scale
    rows: dict[tuple[int, str], list[TimelineEvent]] = {}
    for event in timeline.events:
        rows.setdefault((event.stage_id, event.kind), []).append(event)
    for stage_id in range(timeline.num_stages):
        axes.broken_barh([(0, makespan)], (stage_id - 0.41, 0.82), facecolor=_WAIT, linewidth=0, zorder=1)
    for (stage_id, kind), events in rows.items():
        if kind not in COMPUTE_KINDS and kind not in _CLOSING_KINDS:
            continue
        spans = [((e.start_s - zero_s) * scale, (e.end_s - e.start_s) * scale) for e in events]
        colours = [_shade(e.micro_batch_id, kind) for e in events]
        style: dict[str, Any] = {
            "edgecolor": "white",
            "linewidth": edge,
            "hatch": "//////" if kind == "W" else None,
            "zorder": 2,
        }
        axes.broken_barh(spans, (stage_id - 0.41, 0.82), facecolors=colours, **style)
    sizes = _LabelSizes(timeline, points_per_s, 72.0 * 0.82 * row_height)
    for event in (event for event in timeline.events if event.kind in COMPUTE_KINDS):
        sizes.write(axes, event, ((event.start_s + event.end_s) / 2 - zero_s) * scale)


class _LabelSizes:
    """Which labels fit, level or upright, in one size of type for all boxes of a timeline."""

    def __init__(self, timeline: Timeline, points_per_s: float, row_points: float) -> None:
        self.points_per_s, self.row_points = points_per_s, row_points
        drawn = [e for e in timeline.events if e.kind in COMPUTE_KINDS]
        level = sorted(self.points_per_s * (e.end_s - e.start_s) / self.extent(self.text(e)) for e in drawn)
        # Nine boxes of ten shall have their label; the few shortest ones go without.
        self.size = min(0.84 * level[len(level) // 10], 9.0) if level else 9.0
        self.upright = self.size < 5.2
        if self.upright:
            thick = sorted(self.points_per_s * (e.end_s - e.start_s) for e in drawn)
            self.size = min(max(0.85 * thick[len(thick) // 10], 5.0), 6.5)

    @staticmethod
    def text(event: TimelineEvent) -> str:
        return f"{event.micro_batch_id}.{event.slice_id}" + (f"c{event.chunk_id}" if event.chunk_id else "")

    @staticmethod
    def extent(text: str) -> float:
        """The length of a label in units of its type size (DejaVu Sans)."""
        return sum(0.32 if letter == "." else 0.64 for letter in text)

    def write(self, axes: Axes, event: TimelineEvent, middle: float) -> None:
        text = self.text(event)
        across, along = self.points_per_s * (event.end_s - event.start_s), self.row_points
        need_across, need_along = self.size * self.extent(text), self.size
        if self.upright:
            need_across, need_along = need_along, need_across
        if need_across > 0.95 * across or need_along > 0.95 * along:
            return
        colour = "white" if event.kind == "B" else _ON_LIGHT
        style: dict[str, Any] = {"fontsize": self.size, "color": colour, "ha": "center", "zorder": 3}
        turn: dict[str, Any] = {"rotation": 90} if self.upright else {}
        axes.text(
            middle,
            event.stage_id + 0.02,
            text,
            va="center_baseline" if not turn else "center",
            **style,
            **turn,
        )


def _decorate(axes: Axes, timeline: Timeline, title: str, time_label: str, makespan: str) -> None:
    axes.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
    axes.tick_params(axis="x", labelsize=8.5, labelcolor=_GREY, color=_PALE, labelbottom=bool(time_label))
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_PALE)
    axes.set_xlabel(time_label, fontsize=9, color=_GREY)
    note: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "annotation_clip": False,
    }
    axes.annotate(title, (0, 1), (0, 21), fontsize=11.5, fontweight="bold", color=_INK, **note)
    summary = f"makespan {makespan}, bubble {100 * timeline.bubble_fraction:.1f} %"
    axes.annotate(summary, (0, 1), (0, 7), fontsize=9.5, color=_GREY, **note)
    note["ha"] = "right"
    axes.annotate("idle", (1, 1), (38, 7), fontsize=8.5, color=_GREY, **note)
    for stage_id, busy_s in enumerate(timeline.busy_s()):
        idle = 1 - busy_s / timeline.makespan_s if timeline.makespan_s > 0 else 0.0
        at = (1, 1 - (stage_id + 0.5) / timeline.num_stages)
        axes.annotate(f"{100 * idle:.0f} %", at, (38, -3), fontsize=8.5, color=_GREY, **note)


def _legend(figure: Figure, timelines: Sequence[Timeline], height: float) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    events = [event for timeline in timelines for event in timeline.events]
    kinds = {event.kind for event in events}
    count = 1 + max(event.micro_batch_id for event in events if event.kind in COMPUTE_KINDS)
    handles: list[Any] = []
    labels: list[str] = []
    for m in range(min(count, len(_HUES))):
        handles.append(tuple(Patch(facecolor=_shade(m, kind)) for kind in ("F", "B")))
        more = f", {m + len(_HUES)}" + (", ..." if m + 2 * len(_HUES) < count else "")
        labels.append(("micro-batch " if m == 0 else "") + str(m) + (more if m + len(_HUES) < count else ""))
    names = {"F": "forward", "B": "backward", "W": "weight gradient"}
    for kind in (kind for kind in names if kind in kinds):
        colour = {"F": "#d5dae0", "B": "#5a6673", "W": "#9aa5b1"}[kind]
        hatch = "//////" if kind == "W" else None
        handles.append(Patch(facecolor=colour, edgecolor="white", linewidth=0, hatch=hatch))
        labels.append(names[kind])
    if kinds & set(_CLOSING_KINDS):
        handles.append(Patch(facecolor=_shade(0, "ST"), linewidth=0))
        labels.append("reduce, optimizer")
    handles.append(Patch(facecolor=_WAIT, edgecolor=_PALE, linewidth=0.6))
    labels.append("waiting")
    figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(_LEFT / figure.get_figwidth() - 0.004, 0.08 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=2.0,
        columnspacing=1.3,
        handletextpad=0.5,
    )


def _shade(micro_batch_id: int, kind: str) -> tuple[float, float, float]:
    hue = _HUES[micro_batch_id % len(_HUES)] if kind in COMPUTE_KINDS else "#8d99a6"
    white = {"F": 0.62, "W": 0.35}.get(kind, 0.0)
    red, green, blue = (int(hue[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _zero_s(timeline: Timeline) -> float:
    return min((e.start_s for e in timeline.events if e.kind in COMPUTE_KINDS), default=0.0)


def _span_s(timeline: Timeline) -> float:
    """From the first computation to the end of all that is drawn."""
    drawn = (e.end_s for e in timeline.events if e.kind in COMPUTE_KINDS or e.kind in _CLOSING_KINDS)
    return max(drawn, default=0.0) - _zero_s(timeline) or 1e-9


def _typical_s(timeline: Timeline, among: float = 0.5) -> float:
    """The median length of a computation (or the one that this share of them is shorter than), for the width."""
    lengths = sorted(e.end_s - e.start_s for e in timeline.events if e.kind in COMPUTE_KINDS)
    return (lengths[int(len(lengths) * among)] if lengths else 0.0) or 1e-9


def _time_unit(span_s: float) -> tuple[str, float]:
    """The unit in which a span reads well, and its number per second."""
    return ("s", 1.0) if span_s >= 2 else ("ms", 1e3) if span_s >= 2e-3 else ("µs", 1e6)
