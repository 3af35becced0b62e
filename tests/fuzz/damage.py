"""Strategies that spoil valid documents and files: structure first, then bytes."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

DEPTHS = {"deep": 100_000, "nearly too deep": 900}
"""Far beyond what any parser follows; what json.loads still reads, and a recursive walk over the result may not."""

wholes = [0, 1, -1, 2, 7, 10, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400]
reals = [0.0, -0.0, 0.5, 1.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
texts = st.sampled_from(
    ["", " ", "auto", "1", "null", "true", "F0.0", "seq1f1b", "x" * 5000, "\0", "\ud800", "é\u202e", "../x", "a.json"]
)
leaves = st.none() | st.booleans() | st.sampled_from([*wholes, *reals]) | texts | st.text(max_size=4)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LIKE: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-3, 40) | st.integers(),
    float: st.floats(),
    str: texts | st.text(max_size=8),
}
"""Values of the same type, so that the reader gets past the types."""


@st.composite
def spoilt(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """``valid`` (plain JSON data) with up to ``most`` changes: a key deleted, renamed or added, a type changed, an
    entry doubled or cut off, the whole replaced."""
    document = [copy.deepcopy(valid)]  # so that the root has a holder too
    for _ in range(draw(st.integers(0, most))):
        holder, place = document, 0
        while (
            isinstance(holder[place], dict | list) and holder[place] and (holder is document or draw(st.integers(0, 3)))
        ):
            holder = holder[place]
            place = draw(st.sampled_from([*holder] if isinstance(holder, dict) else range(len(holder))))
        _change(draw, holder, place, "replace" if holder is document else None)
    return document[0]


def _change(draw: st.DrawFn, holder: Any, place: Any, how: str | None) -> None:
    how = how or draw(st.sampled_from(["replace", "replace", "like", "delete", "add", "double", "wrap"]))
    old = holder[place]
    if how == "delete":
        del holder[place]
    elif how in ("add", "double") and isinstance(holder, dict):
        holder[draw(st.sampled_from([f"{place}s", str(place).upper(), "unknown", ""]))] = draw(values | st.just(old))
    elif how in ("add", "double"):
        holder.insert(place, old if how == "double" else draw(values))
    else:
        wrapped = st.sampled_from([[old], {"value": old}, [old, old]])
        holder[place] = draw({"replace": values, "like": LIKE.get(type(old), values), "wrap": wrapped}[how])


@st.composite
def spoilt_bytes(draw: st.DrawFn, valid: bytes, most: int = 2) -> bytes:
    """``valid`` with up to ``most`` changes of bytes: cut short, a hole, flipped, not UTF-8, NULs, a BOM, ..."""
    data = valid
    signs = st.sampled_from([b"\xff", b"\xc3", b"{", b"]", b",", b'"', b"\r", b";", b"-"])
    for _ in range(draw(st.integers(0, most))):
        place, end = sorted(draw(st.integers(0, len(data))) for _ in range(2))
        before, after = data[:place], data[place:]
        changes: list[Callable[[], bytes]] = [
            lambda b=before: b,
            lambda b=before, rest=data[end:]: b + rest,
            lambda b=before, a=after: b + bytes([draw(st.integers(0, 255))]) + a[1:],
            lambda b=before, a=after: b + draw(st.binary(max_size=4) | signs) + a,
            lambda b=before, a=after: b + b"\0" * draw(st.integers(1, 64)) + a,
            lambda d=data: b"\xef\xbb\xbf" + d,
            lambda d=data: d.decode("utf-8", "replace").encode("utf-16", "surrogatepass"),
            lambda: draw(st.sampled_from([b"", b" ", b"\n\n"])),
            lambda d=data: d + d,
        ]
        data = draw(st.sampled_from(changes))()
    return data


@st.composite
def json_files(draw: st.DrawFn, valid: Any) -> bytes:
    """The bytes of a JSON file: ``valid`` spoilt in its structure, its text or its bytes, or not at all."""
    text = json.dumps(draw(st.just(valid) | spoilt(valid) | spoilt(valid) | spoilt(valid) | values))
    how = draw(st.sampled_from(["", "", "", "", "double key", *DEPTHS, "digits", "bytes"]))
    if how == "double key":
        other = ": " + draw(st.sampled_from(["1", "2", '"x"', "null", "[]"]))
        pair = r'"\w+": (?:-?[\d.]+|"[^"\\]*"|true|false|null)(?=[,}])'
        twice = draw(st.sampled_from([lambda old: old, lambda old: re.sub(r": .*", other, old)]))
        text = _edited(draw, text, pair, lambda old: f"{twice(old)}, {old}", text)
    elif how in DEPTHS:
        opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}")]))
        text = _with_scalar(draw, text, opening * DEPTHS[how] + "1" + closing * DEPTHS[how])
    elif how == "digits":
        text = _with_scalar(draw, text, draw(st.sampled_from(["1" * 5000, "1e999", "-1e999", "1." + "3" * 5000])))
    data = text.encode("utf-8", "surrogatepass")
    return draw(spoilt_bytes(data)) if how == "bytes" else data


def _with_scalar(draw: st.DrawFn, text: str, by: str) -> str:
    return _edited(draw, text, r"(?<=: )(?:-?[\d.]+|true|false|null)(?=[,}])", lambda _: by, by)


def _edited(draw: st.DrawFn, text: str, pattern: str, edit: Callable[[str], str], otherwise: str) -> str:
    """Return the text with one match of the pattern edited, or `otherwise` where there is none."""
    matches = list(re.finditer(pattern, text))[:500]
    if not matches:
        return otherwise
    one = draw(st.sampled_from(matches))
    return text[: one.start()] + edit(one.group()) + text[one.end() :]
