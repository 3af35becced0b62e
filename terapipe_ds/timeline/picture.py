"""Draw timelines: one row per stage, slices coloured by micro-batch, forwards light and backwards dark."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from terapipe_ds.files.atomic import write_atomically
from terapipe_ds.timeline.timeline import COMPUTE_KINDS, FORMAT, Timeline, TimelineError, TimelineEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One hue per micro-batch, in its light shade for forward and its dark one for backward. Sizes are in inches.
_HUES = ("#2b6cb0", "#c96a12", "#2f855a", "#7e57b8", "#c53d43", "#128a96", "#b3477d", "#8a6d1d", "#4f5b93", "#5f7f2b")
INK, MUTED, LINE, WAIT = "#1f2933", "#66727f", "#b8c1ca", "#f1f3f5"
_ON_LIGHT = "#1f2932"  # the ink on a light box: a page with a dark ground swaps INK, and this must stay
CLOSING_KINDS = ("RT", "RD", "ST")
_UPRIGHT = 0.077  # the width of an upright label, so that nine boxes of ten have room for theirs
_LEFT, _RIGHT, _TOP, _AXIS, _LEGEND = 0.85, 0.65, 0.62, 0.45, 0.4
_MOST_PIXELS, _MOST_ACROSS = 1.2e8, 65_000  # a PNG of hundreds of stages is coarser: matplotlib takes 2**16 pixels
_NOTE: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}


def draw_timelines(titled: Sequence[tuple[str, Timeline]], path: str | os.PathLike[str]) -> None:
    """Draw timelines one above the other on one time axis, to a `.png`, `.svg` or `.pdf` file.

    A row per stage; the colour tells the micro-batch, light is forward and dark is backward, the pale ground
    shows through where a stage waits. The right end of a row shows the stage's idle share.
    """
    save_figure(lambda: build_figure(titled), path)


def save_figure(build: Callable[[], Figure], path: str | os.PathLike[str]) -> None:
    """Write a figure to a `.png`, `.svg` or `.pdf` file; it is built under the settings of all our pictures."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise TimelineError(f"cannot draw to {os.fspath(path)!r}: end the name in .png, .svg or .pdf")
    try:
        import matplotlib
    except ImportError as error:
        raise TimelineError("drawing needs matplotlib: pip install matplotlib") from error
    # A fixed salt and no date: the same timeline gives the same file.
    settings = {"svg.hashsalt": FORMAT, "font.family": "DejaVu Sans", "hatch.linewidth": 0.6}
    with matplotlib.rc_context({**settings, "text.parse_math": False}):  # a name may hold two dollar signs
        figure = build()
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
        width, height = figure.get_size_inches()
        dpi = min(160.0, math.sqrt(_MOST_PIXELS / (width * height)), _MOST_ACROSS / max(width, height))
        options: dict[str, Any] = {"format": suffix[1:], "dpi": dpi, "metadata": metadata}
        drawn = io.BytesIO()  # a full disk must not stop matplotlib midway: its PDFs then fail with another error
        figure.savefig(drawn, **options)
    write_atomically(path, lambda temporary: temporary.write_bytes(drawn.getvalue()))


class Above(Protocol):
    """Draw a picture above timelines, in the same width."""

    def height(self, width: float) -> float:
        """Return its height in inches on a figure that is `width` inches across."""

    def draw(self, axes: Axes, width: float, height: float) -> None:
        """Draw on axes without ticks whose limits are these inches, the origin at the upper left."""


def build_figure(titled: Sequence[tuple[str, Timeline]], above: Above | None = None) -> Figure:
    """Return the picture of `draw_timelines` as a matplotlib figure, for a page that holds several."""
    if not any(timeline.computations() for _, timeline in titled):
        raise TimelineError("there is nothing to draw: the timelines hold no F, B or W; give those of a step")
    from matplotlib.figure import Figure

    timelines = [timeline for _, timeline in titled]
    span_s = max(map(_span_s, timelines))
    row_height = 0.5 if max(timeline.num_stages for timeline in timelines) <= 8 else 0.36
    boxes = max(span_s / _typical_s(timeline) for timeline in timelines)
    short = max(span_s / _typical_s(timeline, among=0.05) for timeline in timelines)
    body_width = max(min(max(0.32 * boxes, 8.5), 16.0), min(_UPRIGHT * short, 24.0))
    width = _LEFT + _RIGHT + body_width
    bodies = [row_height * timeline.num_stages for timeline in timelines]
    head = 0.0 if above is None else above.height(width - 0.4)
    height = sum(bodies) + _TOP * len(bodies) + _AXIS + _LEGEND + 0.1 + head
    figure = Figure(figsize=(width, height), facecolor="white")
    if above is not None:
        axes = figure.add_axes((0.2 / width, 1 - head / height, 1 - 0.4 / width, head / height))
        axes.set(xlim=(0, width - 0.4), ylim=(head, 0))
        axes.axis("off")
        above.draw(axes, width - 0.4, head)
    top = height - head
    unit, scale = time_unit(span_s)
    points_per_s = 72 * body_width / (1.012 * span_s)
    for (title, timeline), body in zip(titled, bodies, strict=True):
        top -= _TOP + body
        axes = figure.add_axes((_LEFT / width, top / height, body_width / width, body / height))
        axes.set_xlim(0, 1.012 * span_s * scale)
        axes.set_ylim(timeline.num_stages - 0.5, -0.5)
        _draw_boxes(axes, timeline, scale, points_per_s)
        _write_labels(axes, timeline, scale, points_per_s, along=0.95 * 72 * 0.82 * row_height)
        _decorate(axes, timeline, title, f"{timeline.makespan_s * scale:.4g} {unit}")
    axes.tick_params(axis="x", labelbottom=True)
    axes.set_xlabel(f"time ({unit})", fontsize=9, color=MUTED)
    _legend(figure, timelines)
    return figure


def _draw_boxes(axes: Axes, timeline: Timeline, scale: float, points_per_s: float) -> None:
    """Draw the pale ground of every stage, and a box per computation, reduce and optimizer step."""
    zero_s = timeline.start_s
    style: dict[str, Any] = {"linewidth": min(0.8, 0.06 * points_per_s * _typical_s(timeline)), "edgecolor": "white"}
    rows: dict[tuple[int, str], list[TimelineEvent]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS + CLOSING_KINDS:
            rows.setdefault((event.stage_id, event.kind), []).append(event)
    for stage_id in range(timeline.num_stages):
        ground = (stage_id - 0.41, 0.82)
        axes.broken_barh([(0, timeline.makespan_s * scale)], ground, facecolor=WAIT, linewidth=0, zorder=1)
    for (stage_id, kind), events in rows.items():
        spans = [((event.start_s - zero_s) * scale, (event.end_s - event.start_s) * scale) for event in events]
        colours = [shade(event.micro_batch_id, kind) for event in events]
        hatch = "//////" if kind == "W" else None
        axes.broken_barh(spans, (stage_id - 0.41, 0.82), facecolors=colours, hatch=hatch, zorder=2, **style)


def _write_labels(axes: Axes, timeline: Timeline, scale: float, points_per_s: float, along: float) -> None:
    """Write micro-batch and slice in one size of type, upright if level labels do not fit into nine boxes of ten.

    A box without room for its label has none. `along`: the height of a box in points.
    """
    from matplotlib.textpath import TextPath

    zero_s, drawn = timeline.start_s, timeline.computations()
    texts = [f"{e.micro_batch_id}.{e.slice_id}" + (f"c{e.chunk_id}" if e.chunk_id else "") for e in drawn]
    lengths = {text: TextPath((0, 0), text, size=100).get_extents().width / 100 for text in set(texts)}  # at size 1
    across = [0.95 * points_per_s * (event.end_s - event.start_s) for event in drawn]
    tenth = len(drawn) // 10
    size = min(0.86 * sorted(room / lengths[text] for room, text in zip(across, texts, strict=True))[tenth], 9.0)
    upright = size < 5.2
    if upright:
        size = min(max(0.89 * sorted(across)[tenth], 5.0), 6.5)
    style: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "center_baseline", "zorder": 3}
    style |= {"rotation": 90, "va": "center"} if upright else {}
    for event, text, room in zip(drawn, texts, across, strict=True):
        length = size * lengths[text]
        if (size <= room and length <= along) if upright else (length <= room and size <= along):
            middle = ((event.start_s + event.end_s) / 2 - zero_s) * scale
            colour = "white" if event.kind == "B" else _ON_LIGHT
            axes.text(middle, event.stage_id + 0.02, text, color=colour, **style)


def _decorate(axes: Axes, timeline: Timeline, title: str, makespan: str) -> None:
    axes.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=8.5, labelcolor=MUTED, color=LINE, labelbottom=False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    summary = f"makespan {makespan}, bubble {100 * timeline.bubble_fraction:.1f} %"
    axes.annotate(title, (0, 1), (0, 21), fontsize=11.5, fontweight="bold", color=INK, **_NOTE)
    axes.annotate(summary, (0, 1), (0, 7), fontsize=9.5, color=MUTED, **_NOTE)
    axes.annotate("idle", (1, 1), (38, 7), fontsize=8.5, color=MUTED, ha="right", **_NOTE)
    for stage_id, idle in enumerate(timeline.bubbles()):
        at = (1, 1 - (stage_id + 0.5) / timeline.num_stages)
        axes.annotate(f"{100 * idle:.0f} %", at, (38, -3), fontsize=8.5, color=MUTED, ha="right", **_NOTE)


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    kinds = {event.kind for timeline in timelines for event in timeline.events}
    count = 1 + max(event.micro_batch_id for timeline in timelines for event in timeline.computations())
    items: list[tuple[Any, str]] = []
    for m in range(min(count, len(_HUES))):
        more = f", {m + len(_HUES)}" + (", ..." if m + 2 * len(_HUES) < count else "")
        words = ("micro-batch " if m == 0 else "") + str(m) + (more if m + len(_HUES) < count else "")
        items.append((tuple(Patch(facecolor=shade(m, kind)) for kind in ("F", "B")), words))
    greys = {"F": ("forward", "#d5dae0"), "B": ("backward", "#5a6673"), "W": ("weight gradient", "#9aa5b1")}
    for kind, (words, grey) in greys.items():
        if kind in kinds:
            hatch = "//////" if kind == "W" else None
            items.append((Patch(facecolor=grey, edgecolor="white", linewidth=0, hatch=hatch), words))
    if kinds & set(CLOSING_KINDS):
        items.append((Patch(facecolor=shade(0, "ST"), linewidth=0), "reduce, optimizer"))
    items.append((Patch(facecolor=WAIT, edgecolor=LINE, linewidth=0.6), "waiting"))
    figure.legend(
        *zip(*items, strict=True),
        loc="lower left",
        bbox_to_anchor=(_LEFT / figure.get_figwidth() - 0.004, 0.08 / figure.get_figheight()),
        ncols=len(items),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=2.0,
        columnspacing=1.3,
        handletextpad=0.5,
    )


def shade(micro_batch_id: int, kind: str) -> tuple[float, float, float]:
    """Return the colour of an action, as red, green and blue of at most 1."""
    hue = _HUES[micro_batch_id % len(_HUES)] if kind in COMPUTE_KINDS else "#8d99a6"
    white = {"F": 0.62, "W": 0.35}.get(kind, 0.0)
    red, green, blue = (int(hue[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _span_s(timeline: Timeline) -> float:
    """Return the seconds from the first computation to the end of the last drawn event."""
    drawn = (event.end_s for event in timeline.events if event.kind in COMPUTE_KINDS + CLOSING_KINDS)
    return max(drawn, default=0.0) - timeline.start_s or 1e-9


def _typical_s(timeline: Timeline, among: float = 0.5) -> float:
    """Return the length that a share `among` of the computations stays below, for the width of the picture."""
    lengths = sorted(event.end_s - event.start_s for event in timeline.computations())
    return (lengths[int(len(lengths) * among)] if lengths else 0.0) or 1e-9


def time_unit(span_s: float) -> tuple[str, float]:
    """Return the unit in which a span reads well, and its number per second."""
    return ("s", 1.0) if span_s >= 2 else ("ms", 1e3) if span_s >= 2e-3 else ("µs", 1e6)
