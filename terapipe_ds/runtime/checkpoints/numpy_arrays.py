"""Read arrays of numpy's numbers from pickles, such as `numpy.random.get_state()`, without numpy's own unpickling.

numpy fills arrays of any dtype from bytes of the file, also those that hold pointers. Stand-ins take the places of the
three names that such a pickle has, and accept the dtypes of numbers alone.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")


class Array(np.ndarray[Any, Any]):
    """Be an array that gets its content from a pickle, once."""

    is_filled = False

    def __new__(cls) -> Array:
        return np.empty(0, np.uint8).view(cls)

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, is_fortran, content = state
        # a second content would free the memory of the first, which a tensor of the file may share by then
        if self.is_filled or not (isinstance(kind, Kind) and isinstance(content, bytes)):
            raise pickle.UnpicklingError("GLOBAL numpy.ndarray of something else than numbers")
        self.is_filled = True
        super().__setstate__((version, shape, np.dtype(kind.order + kind.code), is_fortran, content))


class Kind:
    """Hold the code of a dtype and its order of bytes, in the place of the dtype."""

    __slots__ = "code", "order"  # else a file could make one of another object, by its `__class__`, with any code

    def __init__(self, code: str, align: object = False, copy: object = False) -> None:
        if not (isinstance(code, str) and _NUMBERS.fullmatch(code)):
            raise pickle.UnpicklingError(f"GLOBAL numpy.dtype of {str(code)[:20]!r}")
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = {"<": "<", ">": ">"}.get(state[1], "=")


def _array(*_: object) -> Array:
    return Array()


def _no_bytes() -> bytes:
    """Stand for `bytes`, by which pickles without content are written; the real one makes as many as it is told."""
    return b""


def _ndarray(*_: object) -> None:
    raise pickle.UnpicklingError("GLOBAL numpy.ndarray outside of an array's own pickle")


STAND_INS: tuple[tuple[Callable[..., Any], str], ...] = (
    (_array, "numpy._core.multiarray._reconstruct"),
    (_array, "numpy.core.multiarray._reconstruct"),  # numpy 1
    (_ndarray, "numpy.ndarray"),
    (Kind, "numpy.dtype"),
    (_no_bytes, "builtins.bytes"),
    (Array, "terapipe_ds.Array"),  # which no file needs to name; torch asks whether it may give it its content
)

_NAMED = {id(stand_in): name for stand_in, name in STAND_INS}


def plain(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return a value that was read, with numpy's arrays in place of `Array`; lists, dicts and objects stay the same.

    Raises:
        UnpicklingError: the value has another stand-in: the file holds what it stands for, such as a dtype.
    """
    if type(value) in (int, float, str, bytes, bool):
        return value
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, Kind) or id(value) in _NAMED:
        raise pickle.UnpicklingError(f"GLOBAL {_NAMED.get(id(value), 'numpy.dtype')}")
    done[id(value)] = value, value.view(np.ndarray) if isinstance(value, Array) else value
    plain(getattr(value, "__dict__", None), done)
    is_many, changed = isinstance(value, list | tuple | set), dict[Any, Any]()
    for key, item in value.items() if isinstance(value, dict) else enumerate(value if is_many else ()):
        plain(key, done)
        if (new := plain(item, done)) is not item:
            changed[key] = new
    if changed and isinstance(value, tuple):
        new = tuple.__new__(type(value), [changed.get(index, item) for index, item in enumerate(value)])
        done[id(value)] = value, new
    elif changed:
        for key, new in changed.items():
            value[key] = new
    return done[id(value)][1]
