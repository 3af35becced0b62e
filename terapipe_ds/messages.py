"""What messages and checks of arguments share: values cut short, and counts."""

from __future__ import annotations

import operator
from typing import Any


def show_value(value: Any, limit: int = 80) -> str:
    """Return `repr` for a message: cut short, and safe for what has none (an int of thousands of digits)."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_count(name: str, value: Any, error: type[ValueError] = ValueError) -> int:
    """Return `value` as an int >= 1, or raise `error`; numpy's integers are welcome, bool and float are not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise error(f"{name} = {show_value(value)}: give an integer >= 1")
    return number
