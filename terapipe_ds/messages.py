"""Share code among messages and checks of arguments: values cut short, counts, and look-ups of names."""

from __future__ import annotations

import difflib
import itertools
import logging
import operator
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

logger = logging.getLogger("terapipe_ds")  # of the whole package

T = TypeVar("T")
Item = TypeVar("Item", bound=Hashable)


def show_value(value: Any, limit: int = 80) -> str:
    """Return `repr` for a message: cut short, and safe for values without one (an int of thousands of digits)."""
    try:
        text = repr(value[: limit + 1] if isinstance(value, str) else value)
    except Exception:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def text_of(error: BaseException) -> str:
    """Return `str` of an error, or a note that `str` raises, so that the message can still name the error."""
    try:
        return str(error)
    except Exception as raised:
        return f"(its str() raises {type(raised).__name__})"


def colored(text: str, color: str, stream: TextIO) -> str:
    """Return the text for a stream: in color on a terminal, unless NO_COLOR (no-color.org) or TERM=dumb forbids it."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{ {'red': 31, 'green': 32, 'yellow': 33, 'cyan': 36}[color] }m{text}\x1b[0m"


def gib(size_bytes: float) -> str:
    """Return a size as results print it, in GiB."""
    return f"{size_bytes / 2**30:.4g} GiB"


def bytes_of_gb(size: float) -> float:
    """Return a size in 10^9 bytes as whole bytes: 2.048769856 * 1e9 is below 2,048,769,856."""
    return round(1e9 * size, 0)


def limit_text(size_bytes: float) -> str:
    """Return a limit in GiB, and in the 10^9 bytes of the key and the option `memory_limit_gb`."""
    return f"{gib(size_bytes)} ({size_bytes / 1e9:.4g} GB)"


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `name`; None if none is by the share `cutoff`."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name that is nearest, or "" where none is near."""
    close = closest(name, known)
    return "" if close is None else f"; did you mean {close}?"


def unknown(what: str, name: Any, known: Iterable[str], listed: Iterable[str]) -> str:
    """Return an error about a name that is not among the `known` ones, with the nearest one and those to list."""
    close = closest(name.lower() if isinstance(name, str) else "", known)
    hint = "known" if close is None else f"did you mean {close!r}? Known"
    return f"unknown {what} {show_value(name)}; {hint}: {', '.join(listed)}"


def describe(error: BaseException) -> str:
    """Return the class and the text of an error."""
    return f"{type(error).__name__}: {text_of(error)}"


def show_key(key: Any, limit: int = 80) -> str:
    """Return a key for messages: bare where it is an ordinary word."""
    return key if isinstance(key, str) and key.isprintable() and len(key) <= limit else show_value(key, limit)


def in_runs(values: Iterable[object]) -> str:
    """Return values with equal neighbours written once: `12, 3 x 11`."""
    counts = [(text, len(list(group))) for text, group in itertools.groupby(map(str, values))]
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in counts)


def in_short(texts: Sequence[str]) -> str | None:
    """Return the first four texts in one line, with the number of the others; None if there are none."""
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more if texts else None


def first_repeated(items: Iterable[Item]) -> Item | None:
    """Return the first item that occurs a second time, or None."""
    seen: set[Item] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def check_count(name: str, value: Any, error: type[ValueError] = ValueError) -> int:
    """Return `value` as an int >= 1, or raise `error`; numpy's integers are welcome, bool and float are not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise error(f"{name} = {show_value(value)}: give an integer >= 1")
    return number


def look_up(name: str, known: Mapping[str, T], what: str, listed: Iterable[str], error: type[ValueError]) -> T:
    """Return the entry called `name`, in any case of its letters, or raise `error` with the nearest name.

    `known` has entries by their names in small letters, `what` is the kind of thing, and the error lists `listed`.
    """
    wanted = name.lower() if isinstance(name, str) else ""
    if wanted in known:
        return known[wanted]
    raise error(unknown(what, name, known, listed))
