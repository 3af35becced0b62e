"""Draw a strategy: the part of the model on each device, the cut of the layers, and one step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from terapipe_ds.schedule.show import many
from terapipe_ds.timeline.picture import INK, MUTED, build_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from terapipe_ds.planner.strategy import Cluster, Strategy

_MOST_BOXES = 4_000  # computations of the timeline; longer steps are drawn with fewer micro-batches
_GAP, _NAME, _TITLE, _STRIP = 0.14, 0.2, 0.34, 0.34  # inches
_LEAST_LABELLED = 0.42  # a device this wide has its stage and replica written in it


def draw_strategy(strategy: Strategy, model: str | Sequence[str], cluster: Cluster, path: str) -> None:
    from terapipe_ds.planner.strategy import simulate_strategy

    most = max(1, _MOST_BOXES // (2 * strategy.grid["pipe"] * strategy.chunks_per_stage * len(strategy.slices)))
    shown = min(strategy.accumulation, most)
    timeline = simulate_strategy(strategy, model, cluster, num_micro_batches=shown)
    of = "" if shown == strategy.accumulation else f", {shown} of {strategy.accumulation} micro-batches"
    slices = many(len(strategy.slices), "slice")
    title = f"{strategy.schedule}, {slices}{of}, simulated without reduction and optimizer"
    save_figure(lambda: build_figure([(title, timeline)], above=_Devices(strategy)), path)


class _Devices:
    """Draw nodes with their devices, coloured by stage, and below them the layers in the same colours."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._coordinates = {place: coordinate for coordinate, place in strategy.placement.items()}
        self._per_node = min(strategy.devices_per_node, len(self._coordinates))

    def height(self, width: float) -> float:
        columns, size = self._columns(width)
        rows = math.ceil(self._strategy.num_nodes / columns)
        return _TITLE + rows * (size + _NAME + _GAP) + _TITLE + _STRIP + 0.25

    def draw(self, axes: Axes, width: float, height: float) -> None:
        title: dict[str, Any] = {"fontsize": 11.5, "fontweight": "bold", "color": INK, "va": "center"}
        axes.text(0, _TITLE / 2, self._heading(), **title)
        columns, size = self._columns(width)
        for node in range(self._strategy.num_nodes):
            row, column = divmod(node, columns)
            left = column * (self._per_node * size + _GAP)
            self._draw_node(axes, node, left, _TITLE + row * (size + _NAME + _GAP), size)
        strip = height - 0.25 - _STRIP
        axes.text(0, strip - _TITLE / 2, "layers of each part", **title)
        self._draw_layers(axes, width, strip)

    def _heading(self) -> str:
        strategy = self._strategy
        nouns = "stage", "replica", f"{strategy.inner_axis} rank"
        sizes = strategy.grid["pipe"], strategy.grid["data"], strategy.dims[2]
        rate = f"; {strategy.model_flops_per_s / 1e12:.4g} TFLOP/s, MFU {strategy.mfu:.1%}" if strategy.mfu else ""
        return "devices: " + " x ".join(many(size, noun) for size, noun in zip(sizes, nouns, strict=True)) + rate

    def _columns(self, width: float) -> tuple[int, float]:
        """Return how many nodes are side by side, and the inches of a device."""
        nodes = self._strategy.num_nodes
        for columns in range(1, nodes + 1):
            size = min(0.62, ((width + _GAP) / columns - _GAP) / self._per_node)
            rows = math.ceil(nodes / columns)
            if rows * (size + _NAME + _GAP) <= 3.2 or size < 0.1:
                break
        return columns, size  # all nodes in one row always fit

    def _draw_node(self, axes: Axes, node: int, left: float, top: float, size: float) -> None:
        from matplotlib.patches import Rectangle

        axes.text(left, top + _NAME / 2, f"node {node}", fontsize=7.5, color=MUTED, va="center")
        for device in range(self._per_node):
            corner = (left + device * size, top + _NAME)
            stage, replica, rank = self._coordinates[node, device]
            colour = self._colour(stage)
            axes.add_patch(Rectangle(corner, size, size, facecolor=colour, edgecolor="white", linewidth=0.8))
            if size >= _LEAST_LABELLED:
                words = f"stage {stage}\nreplica {replica}" + (
                    f"\n{self._strategy.inner_axis} {rank}" if self._strategy.dims[2] > 1 else ""
                )
                middle = corner[0] + size / 2, corner[1] + size / 2
                axes.text(*middle, words, fontsize=5.6, color=_ink_on(colour), ha="center", va="center")
        axes.add_patch(
            Rectangle((left, top + _NAME), self._per_node * size, size, fill=False, edgecolor=MUTED, linewidth=0.7)
        )

    def _draw_layers(self, axes: Axes, width: float, top: float) -> None:
        """Draw a strip with a cell per layer; the first is the embedding, the last the head."""
        from matplotlib.patches import Rectangle

        from terapipe_ds.planner.strategy.candidate import owners_of

        strategy, partition = self._strategy, self._strategy.partition
        cell = width / partition[-1]
        owners = owners_of(strategy.schedule, strategy.grid["pipe"], strategy.chunks_per_stage)
        for stage, (start, stop) in zip(owners, itertools.pairwise(partition), strict=True):
            colour = self._colour(stage)
            for layer in range(start, stop):
                corner = (layer * cell, top)
                axes.add_patch(Rectangle(corner, cell, _STRIP, facecolor=colour, edgecolor="white", linewidth=0.3))
            words = f"stage {stage}: {stop - start}"
            if (stop - start) * cell >= 0.075 * len(words):
                middle = (start + stop) / 2 * cell, top + _STRIP / 2
                axes.text(*middle, words, fontsize=7.5, color=_ink_on(colour), ha="center", va="center")
            axes.plot([start * cell] * 2, [top - 0.04, top + _STRIP + 0.04], color=MUTED, linewidth=0.8)

    def _colour(self, stage: int) -> tuple[float, float, float]:
        """Return a colour that runs from dark blue to light green with the stages."""
        from matplotlib import colormaps

        stages = self._strategy.grid["pipe"]
        red, green, blue, _ = colormaps["YlGnBu"](0.9 - 0.7 * (stage / max(1, stages - 1)))
        return red, green, blue


def _ink_on(colour: tuple[float, float, float]) -> str:
    red, green, blue = colour
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "#1f2932"
