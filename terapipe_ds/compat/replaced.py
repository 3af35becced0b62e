"""Replace an attribute of one object, a module or a class for a while, and see whose function stands there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Make `value` the attribute `name` of `owner` inside the context."""
    is_own, before = name in vars(owner), vars(owner).get(name)  # otherwise its class has the attribute
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def module_of_code(function: Any) -> str:
    """Return the name of the module that has the code of a function or callable object; "" if it was made without one.

    `functools.wraps` copies `__module__` of another function. It leaves the globals alone.
    """
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, (BuiltinFunctionType, type)) else type(function)
    return str(getattr(function, "__globals__", {"__name__": owner.__module__}).get("__name__", ""))
