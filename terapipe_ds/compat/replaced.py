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


def packages_of(function: Any) -> set[str]:
    """Return the package of a function or callable object, and the packages of the functions that it wraps.

    `functools.wraps` copies `__module__` of the wrapped function. It leaves the globals alone.
    """
    packages = set[str]()
    while function is not None:
        if isinstance(function, partial):
            function = function.func
            continue
        owner = function if isinstance(function, (BuiltinFunctionType, type)) else type(function)
        scope = getattr(function, "__globals__", {"__name__": owner.__module__})
        packages.add(str(scope.get("__name__", "")).partition(".")[0])
        function = getattr(function, "__wrapped__", None)
    return packages
