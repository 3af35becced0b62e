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
    """Be an array that gets its content from a pickle, and is saved as numpy's own."""

    def __new__(cls) -> Array:
        return np.empty(0, np.uint8).view(cls)

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, is_fortran, content = state
        if not (isinstance(kind, Kind) and isinstance(content, bytes)):
            raise pickle.UnpicklingError("GLOBAL numpy.ndarray of something else than numbers")
        super().__setstate__((version, shape, np.dtype(kind.order + kind.code), is_fortran, content))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


class Kind:
    """Hold the code of a dtype and its order of bytes, in the place of the dtype."""

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
