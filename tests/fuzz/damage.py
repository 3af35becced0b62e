"""Strategies that spoil valid documents and files: structure first, then bytes."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import strategies as st

DEPTH = 100_000  # far beyond what any parser follows
NEARLY_TOO_DEEP = 900  # what json.loads still reads, and a recursive walk over the result may not

wholes = [0, 1, -1, 2, 7, 10, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400]
reals = [0.0, -0.0, 0.5, 1.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
numbers = st.sampled_from([*wholes, *reals])
texts = st.sampled_from(
    ["", " ", "auto", "1", "null", "true", "F0.0", "seq1f1b", "x" * 5000, "\0", "\ud800", "é\u202e", "../x", "a.json"]
)
leaves = st.none() | st.booleans() | numbers | texts | st.text(max_size=4)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spoilt(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """``valid`` (plain JSON data) with up to ``most`` changes: a key deleted, renamed or added, a type changed, an
    entry doubled, swapped or cut off, the whole replaced."""
    document = [copy.deepcopy(valid)]  # so that the root has a holder too
    for _ in range(draw(st.integers(0, most))):
        holder: Any = document
        while True:
            places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not places:
                break
            place = draw(st.sampled_from(places))
            inner = holder[place]
            stop = holder is not document and draw(st.integers(0, 3)) == 0
            if stop or not (isinstance(inner, dict | list) and inner):
                break
            holder = inner
        if not places:
            continue
        _change(draw, holder, place, allow_delete=holder is not document)
    return document[0]


def _change(draw: st.DrawFn, holder: Any, place: Any, allow_delete: bool) -> None:
    how = draw(st.sampled_from(["replace", "replace", "like", "delete", "add", "double", "wrap"]))
    old = holder[place]
    if how == "replace" or not allow_delete:
        holder[place] = draw(values)
    elif how == "like":  # of the same type, so that the reader gets past the types
        holder[place] = draw(_like(old))
    elif how == "delete":
        del holder[place]
    elif how == "wrap":
        holder[place] = draw(st.sampled_from([[old], {"value": old}, [old, old]]))
    elif isinstance(holder, dict):
        holder[draw(st.sampled_from([f"{place}s", str(place).upper(), "unknown", ""]))] = draw(values | st.just(old))
    else:
        holder.insert(place, old if how == "double" else draw(values))


def _like(old: Any) -> st.SearchStrategy[Any]:
    if isinstance(old, bool):
        return st.booleans()
    if isinstance(old, int):
        return st.integers(-3, 40) | st.integers()
    if isinstance(old, float):
        return st.floats()
    if isinstance(old, str):
        return texts | st.text(max_size=8)
    return values


@st.composite
def spoilt_bytes(draw: st.DrawFn, valid: bytes, most: int = 2) -> bytes:
    """``valid`` with up to ``most`` changes of bytes: cut short, a hole, flipped, not UTF-8, NULs, a BOM, ..."""
    data = valid
    for _ in range(draw(st.integers(0, most))):
        how = draw(st.sampled_from(["cut", "hole", "flip", "insert", "bom", "utf16", "empty", "twice", "nul"]))
        place = draw(st.integers(0, len(data)))
        if how == "cut":
            data = data[:place]
        elif how == "hole":
            data = data[:place] + data[draw(st.integers(place, len(data))) :]
        elif how == "flip" and place < len(data):
            data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
        elif how == "insert":
            signs = st.sampled_from([b"\xff", b"\xc3", b"{", b"]", b",", b'"', b"\r", b";", b"-"])
            data = data[:place] + draw(st.binary(max_size=4) | signs) + data[place:]
        elif how == "bom":
            data = b"\xef\xbb\xbf" + data
        elif how == "utf16":
            data = data.decode("utf-8", "replace").encode("utf-16", "surrogatepass")
        elif how == "empty":
            data = draw(st.sampled_from([b"", b" ", b"\n\n"]))
        elif how == "twice":
            data = data + data
        elif how == "nul":
            data = data[:place] + b"\0" * draw(st.integers(1, 64)) + data[place:]
    return data


@st.composite
def json_files(draw: st.DrawFn, valid: Any) -> bytes:
    """The bytes of a JSON file: ``valid`` spoilt in its structure, its text or its bytes, or not at all."""
    document = draw(st.just(valid) | spoilt(valid) | spoilt(valid) | spoilt(valid) | values)
    text = json.dumps(document)
    how = draw(st.sampled_from(["", "", "", "", "double key", "deep", "nearly too deep", "digits", "bytes"]))
    if how == "double key":
        text = _with_double_key(draw, text)
    elif how in ("deep", "nearly too deep"):
        depth = DEPTH if how == "deep" else NEARLY_TOO_DEEP
        opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}")]))
        text = _replaced_scalar(draw, text, opening * depth + "1" + closing * depth)
    elif how == "digits":
        text = _replaced_scalar(draw, text, draw(st.sampled_from(["1" * 5000, "1e999", "-1e999", "1." + "3" * 5000])))
    data = text.encode("utf-8", "surrogatepass")
    return draw(spoilt_bytes(data)) if how == "bytes" else data


def _with_double_key(draw: st.DrawFn, text: str) -> str:
    pairs = list(re.finditer(r'"\w+": (?:-?[\d.]+|"[^"\\]*"|true|false|null)(?=[,}])', text))[:500]
    if not pairs:
        return text
    pair = draw(st.sampled_from(pairs))
    other = re.sub(r": .*", ": " + draw(st.sampled_from(["1", "2", '"x"', "null", "[]"])), pair.group())
    return text[: pair.start()] + draw(st.sampled_from([pair.group(), other])) + ", " + text[pair.start() :]


def _replaced_scalar(draw: st.DrawFn, text: str, by: str) -> str:
    scalars = list(re.finditer(r"(?<=: )(?:-?[\d.]+|true|false|null)(?=[,}])", text))[:500]
    if not scalars:
        return by
    scalar = draw(st.sampled_from(scalars))
    return text[: scalar.start()] + by + text[scalar.end() :]
