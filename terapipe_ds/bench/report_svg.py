"""Matplotlib figures as inline SVG: no outside names, ids of their own, colours that follow the page's theme."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A figure is drawn in the colours of the light theme; in the SVG each becomes a variable of the style sheet.
INK, MUTED, LINE, WAIT, PAPER = "#1f2933", "#66727f", "#b8c1ca", "#f1f3f5", "#ffffff"
SYSTEM_COLOURS = {"deepspeed": "#c2610c", "terapipe": "#0068b5", "torch": "#00806a"}
BAND = "#d9e6cf"
"""Within 5 % of the measurement."""
_VARIABLES = {
    INK: "ink", MUTED: "muted", LINE: "line", WAIT: "wait", BAND: "band",
    **{colour: system for system, colour in SYSTEM_COLOURS.items()},
}  # fmt: skip

_REFERENCE = re.compile(r'(?:xlink:)?href="#([^"]+)"|url\(#([^)]+)\)')
_NUMBER = re.compile(r"\d+\.\d{3,}")
_BOX = re.compile(r'd="M (\S+) (\S+) L \1 (\S+) L (\S+) \3 L \4 \2 z ?"')
_ROOT = re.compile(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>')


@contextmanager
def drawing() -> Iterator[None]:
    """Settings for drawing and for ``inline_svg``: text stays text, a ``$`` is a dollar, equal input, equal output."""
    import matplotlib

    settings: dict[str, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "terapipe_ds.report", "font.family": "DejaVu Sans",
        "text.parse_math": False, "hatch.linewidth": 0.6, "axes.unicode_minus": True,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def inline_svg(figure: Figure, key: str, description: str) -> str:
    """The figure as an ``<svg>`` element for a page that holds several.

    ``key`` is unique in the page (letters): it prefixes ids. ``description`` is read out in place of the picture.
    It shrinks to the page's width, down to the least width of its frame, which scrolls then.
    """
    for ground in (figure.patch, *(axes.patch for axes in figure.axes)):
        ground.set_visible(False)  # the page's shows through
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", text, flags=re.S)
    match = _ROOT.match(text)
    if match is None:
        raise RuntimeError("matplotlib wrote an SVG without a viewBox")
    width, height = (float(size) * 4 / 3 for size in match.groups())  # points to CSS pixels
    size = f"width:100%;max-width:{width:.0f}px"
    root = (
        f'<svg viewBox="0 0 {match[1]} {match[2]}" role="img" aria-label="{escape(description)}" '
        f'style="{size};aspect-ratio:{width:.0f}/{height:.0f}">'
    )
    return root + _shrunk(_themed(_prefixed(text[match.end() :], key)))


def inline_png(figure: Figure, description: str) -> str:
    """The figure as an ``<img>`` on white, for pictures of so many boxes that an SVG would be larger."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    width = figure.get_figwidth() * 96
    return f'<img alt="{escape(description)}" style="width:{width:.0f}px" src="data:image/png;base64,{data}">'


def _prefixed(text: str, key: str) -> str:
    """Ids that nothing refers to go, the others get the prefix: the page holds several pictures."""
    used = {first or second for first, second in _REFERENCE.findall(text)}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{key}-\1"', text)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", text)


def _themed(text: str) -> str:
    for colour, name in _VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    text = text.replace(f"stroke: {PAPER}", "stroke: var(--paper)")
    return text.replace("font-family: 'DejaVu Sans'; ", "")  # the style sheet names the fonts


def _shrunk(text: str) -> str:
    text = _NUMBER.sub(lambda match: f"{float(match[0]):.2f}", text)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
    text = _BOX.sub(r'd="M\1 \2V\3H\4V\2z"', text)
    while "<g></g>" in text:
        text = text.replace("<g></g>", "")
    return text.strip()
