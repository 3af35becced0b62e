"""What the plots of the report share: stacked panels of labelled rows, quiet axes, legends below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from terapipe_ds.bench.report_data import SYSTEMS, Group, Run
from terapipe_ds.bench.report_svg import BAND, INK, LINE, MUTED, SYSTEM_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_SIZE = 8.5
MARKERS = {"deepspeed": "s", "terapipe": "o", "torch": "^"}
"""A system has its own marker beside its colour."""
_LETTER, _MOST_LETTERS = 0.073, 46  # inches of a letter at LABEL_SIZE; longer row labels are cut
_TITLE, _AXIS, _LEGEND_ROW = 0.5, 0.3, 0.22


@dataclass(frozen=True)
class Panel:
    """One stacked axes: a title and a row per run, the first on top."""

    title: str
    runs: tuple[Run, ...]
    group: Group


def stack(
    panels: Sequence[Panel], *, right: float, width: float = 9.2, row_height: float = 0.29, shared_label: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure with the panels below each other, all of one width, ``right`` inches free beside them."""
    from matplotlib.figure import Figure

    labels = [[_short(run.label) for run in panel.runs] for panel in panels]
    left = 0.15 + _LETTER * max(len(label) for each in labels for label in each)
    heights = [row_height * len(panel.runs) for panel in panels]
    height = sum(heights) + (_TITLE + _AXIS) * len(panels) + 2 * _LEGEND_ROW + 0.1
    figure = Figure(figsize=(width, height))
    top, found = height, []
    for panel, mine, body in zip(panels, labels, heights, strict=True):
        top -= _TITLE + body
        ax = figure.add_axes((left / width, top / height, (width - left - right) / width, body / height))
        top -= _AXIS
        ax.set_ylim(len(panel.runs) - 0.5, -0.5)
        quiet(ax, grid="x")
        ax.set_yticks(range(len(panel.runs)), mine)
        ax.tick_params(axis="y", length=0, labelsize=LABEL_SIZE, labelcolor=INK)
        title_of(ax, panel.title)
        found.append(ax)
    if shared_label:
        found[-1].set_xlabel(shared_label, fontsize=LABEL_SIZE, color=MUTED)
    return figure, found


def _short(label: str) -> str:
    return label if len(label) <= _MOST_LETTERS else label[: _MOST_LETTERS - 1] + "…"


def quiet(ax: Axes, grid: Literal["x", "y", "both"]) -> None:
    """Only what is needed to read values: a pale grid, no frame."""
    for side in ("left", "right", "top", "bottom"):
        ax.spines[side].set_visible(side == "bottom")
        ax.spines[side].set_color(LINE)
    ax.tick_params(labelsize=8, labelcolor=MUTED, color=LINE, length=3)
    if grid in ("y", "both"):
        ax.tick_params(axis="y", length=0)
    ax.grid(axis=grid, color=LINE, linewidth=0.5, alpha=0.6)
    ax.set_axisbelow(True)


def title_of(ax: Axes, text: str) -> None:
    """A heading above the axes, on its left edge."""
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    ax.annotate(text, (0, 1), (0, 7), fontsize=10, fontweight="bold", color=INK, **style)


def legend_items(names: Iterable[str], *, bars: bool = False) -> list[tuple[Any, str]]:
    """Handles and words of systems (in their order) and of the marks that plots share (in the order given).

    ``bars``: the systems are drawn as bars, not as markers.
    """
    from matplotlib.patches import Patch

    given = list(names)
    systems = [name for name in SYSTEMS if name in given]
    if bars:
        return [(Patch(facecolor=SYSTEM_COLOURS[name], alpha=0.55, linewidth=0), name) for name in systems]
    return [_item(name) for name in systems] + [_item(name) for name in given if name not in SYSTEMS]


def _item(name: str) -> tuple[Any, str]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    none: dict[str, Any] = {"linestyle": "none"}
    upright: dict[str, Any] = {"marker": "|", "markersize": 9, "linestyle": "none"}
    blue, orange, green = (SYSTEM_COLOURS[system] for system in ("terapipe", "deepspeed", "torch"))
    if name in SYSTEMS:
        colour = SYSTEM_COLOURS[name]
        return Line2D([], [], marker=MARKERS[name], color=colour, markersize=6.5, markeredgewidth=0, **none), name
    marks: dict[str, tuple[Any, str]] = {
        "step": (Line2D([], [], marker=".", color=MUTED, markersize=6, **none), "one step"),
        "median": (Line2D([], [], color=MUTED, markeredgewidth=2.4, **upright), "median"),
        "bound": (Line2D([], [], color=INK, markeredgewidth=1.3, **upright), "bound"),
        "bound level": (Line2D([], [], color=INK, marker="_", markersize=9, markeredgewidth=1.3, **none), "bound"),
        "stock": (Line2D([], [], color=orange, linewidth=1.1, linestyle=(0, (1, 2))), "stock median"),
        "best torch": (Line2D([], [], color=green, linewidth=1.1, linestyle=(0, (5, 2))), "best of torch"),
        "planned": (Line2D([], [], marker="*", color=blue, markersize=11, markeredgewidth=0, **none), "planned slices"),
        "replayed": (Patch(facecolor="none", edgecolor=MUTED, hatch="/////", linewidth=0), "replayed"),
        "within": (Patch(facecolor=BAND, linewidth=0), "within 5 %"),
        "predicted peak": (Line2D([], [], color=INK, markeredgewidth=1.5, **upright), "predicted"),
    }
    return marks[name]


def bottom_legend(figure: Figure, items: Sequence[tuple[Any, str]], columns: int = 9) -> None:
    """One legend below everything, from the left edge."""
    handles, words = [handle for handle, _ in items], [text for _, text in items]
    figure.legend(
        handles, words, loc="lower left", bbox_to_anchor=(0.08 / figure.get_figwidth(), 0.06 / figure.get_figheight()),
        ncols=min(columns, len(items)), frameon=False, fontsize=LABEL_SIZE, labelcolor=INK, handlelength=1.8,
        columnspacing=1.4, handletextpad=0.5, borderpad=0, borderaxespad=0, labelspacing=0.35,
    )  # fmt: skip
