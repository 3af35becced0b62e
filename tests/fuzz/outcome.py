"""What is asked of every input: it is accepted, or refused in words of our own."""

import collections
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.damage import json_files

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
    always: dict[str, Any] = {} if FULL else {"derandomize": True, "database": None}
    return settings(max_examples=full if FULL else default, deadline=None, suppress_health_check=quiet, **always)


def files_of(
    valid: Any, ours: Any, read: Callable[[Path], Any], default: int, full: int, named: bool = True
) -> Callable[[Callable[[Any, bytes], None]], Any]:
    """Decorate what checks (result, bytes of the file): a test that reads a spoilt file of `valid` in each case.

    `read` takes the path and raises `ours`, whose message has the path if it is `named`.
    """

    def decorate(check: Callable[[Any, bytes], None]) -> Any:
        def test(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
            path = tmp_path_factory.getbasetemp() / f"{check.__name__}.json"
            path.write_bytes(data)
            result = accepted(check.__name__, ours, lambda: read(path), path.name if named else "")
            if result is not None:
                check(result, data)

        test.__name__ = test.__qualname__ = check.__name__
        return cases(default, full)(given(data=json_files(valid))(test))

    return decorate


def accepted(format_name: str, ours: Any, call: Callable[[], _Result], place: str = "") -> _Result | None:
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


def no_key_twice(data: bytes) -> Any:
    """The document by the standard library, which must have every key once."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(data, object_pairs_hook=check)
