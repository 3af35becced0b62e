"""What is asked of every input: it is accepted, or refused in words of our own."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

FULL = os.environ.get("TERAPIPE_TEST_FULL", "") not in ("", "0")

_Result = TypeVar("_Result")

INSIDE = re.compile(
    r"Traceback|NoneType|has no attribute|not subscriptable|index out of range|unhashable|unexpected keyword|"
    r"not supported between|missing \d+ required|cannot unpack|not iterable|object at 0x|recursion depth exceeded|"
    r"terapipe_ds/\w+"
)
"""What an error from the inside says, and a message for users does not."""
NEXT_STEP = re.compile(
    r"\b(give|gives|must|expected|measure|update|choose|write|known|did you mean|number them|set|remove|install|it has|"
    r"it holds|reads|make|ask|drop|leave|needs|use|holds|keep|add|see terapipe|simulate|convert|let|end the name|"
    r"replace|swap|move|try|plan again|every stage computes)\b",
    re.I,
)

counts: collections.Counter[str] = collections.Counter()
"""(format, outcome) -> cases, for the report of a full run."""


def cases(default: int, full: int) -> Callable[[Any], Any]:
    """How many inputs a test takes: few and always the same, or thousands of new ones with TERAPIPE_TEST_FULL."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    if FULL:
        return settings(max_examples=full, deadline=None, suppress_health_check=quiet)
    return settings(max_examples=default, deadline=None, suppress_health_check=quiet, derandomize=True, database=None)


def accepted(format_name: str, ours: type[Exception], call: Callable[[], _Result], place: str = "") -> _Result | None:
    """The result of ``call``, or None where it raised ``ours`` with a message fit for users, ``place`` in it."""
    try:
        result = call()
    except ours as error:
        counts[f"{format_name}: refused"] += 1
        check_message(str(error), place)
        return None
    counts[f"{format_name}: accepted"] += 1
    return result


def check_message(text: str, place: str = "") -> None:
    """A message that names the place and a next step, and nothing from the inside."""
    assert place in text, text[:300]
    assert not INSIDE.search(text), text[:500]
    assert NEXT_STEP.search(text), text[:500]
    assert len(text) < 5000, text[:300]
    text.encode()  # a lone surrogate cannot be printed
