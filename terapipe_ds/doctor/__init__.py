"""Examine an installation, a machine and a DeepSpeed JSON; report faults and how to fix them.

A check is a function that returns lines. It imports inside its body, so that a failed import becomes a line as well.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from terapipe_ds.compat.versions import is_there
from terapipe_ds.messages import show_key, text_of

Verdict = Literal["ok", "note", "warning", "fail"]
VERDICTS: tuple[Verdict, ...] = ("ok", "note", "warning", "fail")


@dataclass(frozen=True)
class Line:
    """State a finding, its verdict, and the fix, "" where none is needed."""

    verdict: Verdict  # "note": nothing is wrong, but worth knowing; "warning": it may fail or be slow; "fail": it will
    name: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """Check one thing; `needs` are packages without which there is nothing to check."""

    name: str
    look: Callable[[], Iterable[Line]]
    needs: tuple[str, ...] = ()


def look(check: Check) -> list[Line]:
    """Return the lines of a check; where it cannot run, or fails midway, the last line says why."""
    missing = [name for name in check.needs if not is_there(name)]
    if missing:
        verb = "are" if missing[1:] else "is"
        return [Line("note", check.name, f"not looked at: {' and '.join(missing)} {verb} not installed")]
    found: list[Line] = []
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # DeepSpeed prints during its import
            warnings.simplefilter("ignore")
            if broken := next(filter(import_problem, check.needs), None):  # `installation.required` says why
                return [Line("note", check.name, f"not looked at: {broken} cannot be imported")]
            found.extend(check.look())
    except Exception as error:
        found.append(Line("fail", check.name, _in_a_line(error), "see whether it imports and runs by itself"))
    return found


def import_problem(name: str) -> str:
    """Return the error of the import of a package; "" where it has none."""
    try:
        importlib.import_module(name)
    except Exception as error:  # its dependencies fail in many ways
        return _in_a_line(error)
    return ""


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {show_key(' '.join(text_of(error).split()), 300)}"
