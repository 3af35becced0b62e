"""What the records of a profile may hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from terapipe_ds.plan import show_value

MEASURE_AGAIN = "measure again and replace it"

_Record = TypeVar("_Record")


class ProfileError(ValueError):
    """A file that is no usable profile, or a profile of something else than what is asked for."""


def check_fields(record: Any, where: str) -> None:
    """Types and ranges by the names: ``*_s`` are positive seconds, ``*spread`` >= 0, the rest what they are."""
    for field in dataclasses.fields(record):
        value, kind = getattr(record, field.name), str(field.type)
        if value is None and kind.endswith("| None"):
            continue
        name = f"{where}: {field.name}"
        if kind.startswith("float"):
            check_float(name, value, zero=not field.name.endswith("_s"))
        elif kind.startswith("int"):
            least = 0 if field.name in ("prefix", "part_id") else 1
            if type(value) is not int or value < least:
                raise bad(name, value, f"an integer >= {least}")
        elif kind.startswith(("str", "bool")) and type(value).__name__ != kind.removesuffix(" | None"):
            raise bad(name, value, "text" if kind.startswith("str") else "true or false")


def check_float(name: str, value: Any, zero: bool) -> None:
    """A finite number >= 0, or > 0."""
    number = type(value) in (int, float)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        wanted = "a finite number >= 0" if zero else "a finite, positive number of seconds"
        raise bad(name, value, wanted)


def records(record: type[_Record], values: Any, where: str) -> tuple[_Record, ...]:
    records: tuple[_Record, ...] = tuple(values)
    for value in records:
        if not isinstance(value, record):
            raise bad(where, value, f"{record.__name__} objects")
    return records


def refuse_twice(items: Sequence[Any], what: str) -> None:
    """No item stands twice."""
    for item in items:
        if items.count(item) > 1:
            raise ProfileError(f"{what} {item} stands twice: {MEASURE_AGAIN}, or drop one of the two")


def bad(name: str, value: Any, wanted: str) -> ProfileError:
    """The error for a value that is not what is wanted."""
    return ProfileError(f"{name} = {show_value(value)}: expected {wanted}; {MEASURE_AGAIN}")
