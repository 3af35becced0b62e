"""Replace an attribute of one object, a module or a class for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
