"""The texts of a matplotlib figure, and which of them a reader cannot read."""

import itertools
from typing import Any


def texts_of(figure: Any) -> list[Any]:
    """Return all texts, but no labels of ticks outside the limits: matplotlib keeps these and does not draw them."""
    from matplotlib.text import Text

    found = [text for legend in figure.legends for text in legend.get_texts()]
    for ax in figure.axes:
        found += [*(child for child in ax.get_children() if isinstance(child, Text)), ax.xaxis.label, ax.yaxis.label]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_text() and text.get_visible()]


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Return the pairs of texts that run into one another; a text that leaves the picture comes alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts_of(figure)]
    (width, height), found = canvas.get_width_height(), []
    for text, box in boxes:
        if not (box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height):
            found.append((text, ""))
    for (text, box), (other_text, other) in itertools.combinations(boxes, 2):
        if box.x0 < other.x1 and other.x0 < box.x1 and box.y0 < other.y1 and other.y0 < box.y1:
            found.append((text, other_text))
    return found
