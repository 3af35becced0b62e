"""Read files of states without running the code in them.

A pickle is a program. torch reads tensors and plain values from it without running it (`weights_only`). A few classes
that hold only plain values are also allowed. Everything else needs the user's permission.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.utils._pytree import tree_map

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.messages import show_key
from terapipe_ds.runtime.checkpoints.manifest import CheckpointError
from terapipe_ds.runtime.log import first_line

# In the states of ZeRO stage 1; and a program's arguments, which are as plain as the values in them
_ALLOWED = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler, argparse.Namespace)
_REFUSED = re.compile(r"GLOBAL \S+|more than .*")
_ANOTHER = "Load another checkpoint, by its tag"
_MOST_OPERATIONS, _MOST_WORK = 2_000_000, 10**8  # of a pickle; 60,000 tensors take the former
_HASHED = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "BUILD")
_LEGACY_PICKLES = 5  # at the head of a file that is no archive


class PickleRefused(CheckpointError):
    """Say that a file holds more than tensors and plain values."""


@contextmanager
def strict_loading() -> Iterator[None]:
    """Let every `torch.load`, DeepSpeed's too, read as `read_strictly` does; other running threads are not affected."""
    # A data loader's thread may read pickles of its own at the same time
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    load, allowed = torch.load, set(torch.serialization.get_safe_globals())

    def load_strictly(*args: Any, **options: Any) -> Any:
        is_other = threading.get_ident() in others
        return load(*args, **(options if is_other else {**options, "weights_only": True}))

    named = (_member, "builtins.getattr")
    safe = torch.serialization.safe_globals([kind for kind in (*_ALLOWED, named) if kind not in allowed])
    with replaced(torch, "load", load_strictly), safe:
        yield


def _member(of: Any, name: str) -> object:
    """Stand for `getattr`, by which early versions of Python 3.11 pickle members of an enumeration.

    torch has read `of` from the file before, so it is a class that is allowed, or a value made of such.
    """
    member = of.__members__.get(name) if isinstance(of, EnumType) else None
    if member is None:
        raise pickle.UnpicklingError(f"GLOBAL getattr of {of!r}: not a member of an enumeration")
    return member


def read_strictly(path: Path) -> Any:
    """Return the object that `torch.save` has written to a file; tensors stay on the disk until they are used.

    Raises:
        PickleRefused: the file holds more than tensors, plain values and the allowed classes.
        CheckpointError: the file cannot be read; unpickling raises errors of any kind, without the file's name.
    """
    try:
        _refuse_bombs(path)
        with strict_loading():
            return _load(path)
    except pickle.UnpicklingError as error:
        named = _REFUSED.search(str(error))
        what = named[0].removeprefix("GLOBAL ") if named else "a pickle that torch does not read as such"
        raise PickleRefused(
            f"{show_key(str(path), 4096)} cannot be read as tensors and plain values: it holds {what}, and reading it "
            f"otherwise would run code of whoever wrote it. {_ANOTHER}. Or, if you trust the file: "
            '"terapipe": {"checkpoints": {"allow_pickle": true}}; a client_state of plain values needs no such '
            "permission"
        ) from error
    except Exception as error:
        raise _unreadable(path, error) from error


def read_states(path: Path) -> Mapping[str, Any]:
    """Return the states of a rank that a file holds; `strict_loading` decides whether code in it may run.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        states = _load(path)
    except Exception as error:
        raise _unreadable(path, error) from error
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, not the states of a rank. {_ANOTHER}")
    return states


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{show_key(str(path), 4096)} cannot be read ({first_line(error)}). {_ANOTHER}")


def refusal(path: Path) -> str | None:
    """Say why a load will not read a file that was just saved. Large files of torch's old format are not checked."""
    try:
        if zipfile.is_zipfile(path) or path.stat().st_size < 2**26:
            read_strictly(path)
    except CheckpointError as error:
        return str(error)
    return None


def without_numpy(value: Any) -> Any:
    """Return `value` with Python's numbers in place of equal ones of numpy: only running code loads those again."""

    def number(leaf: Any) -> Any:
        is_exact = isinstance(leaf, np.float64) or (isinstance(leaf, np.generic) and leaf.dtype.kind in "biu")
        return leaf.item() if is_exact else leaf

    return tree_map(number, value, is_leaf=lambda each: type(each) not in (dict, list, tuple))


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except RuntimeError:  # of a writer whose files cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=False)


def _refuse_bombs(path: Path) -> None:
    """Refuse a file that would fill the memory or never end, although no code in it runs: torch has no limits."""
    if not path.is_file():  # a pipe would be waited for
        raise OSError("it is no file")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):  # torch's old format: some pickles, then the numbers
            file.seek(0)
            for _ in range(_LEGACY_PICKLES):
                if file.peek(1):
                    _refuse_endless(file)
            return
        archive = zipfile.ZipFile(file)
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed, as torch.save never does")
            if entry.filename.endswith("/data.pkl"):
                _refuse_endless(io.BufferedReader(archive.open(name=entry, mode="r")))  # type: ignore[arg-type]


def _refuse_endless(file: io.BufferedReader) -> None:
    """Refuse a pickle with too many operations or names that take minutes, or whose tuples take too long to hash.

    A tuple that repeats other tuples may stand for 2**60 values, and Python hashes a key of a dict. So this function
    follows the stack. In place of each value it keeps the number of values in it.
    """
    stack, marks, memo, work = list[int](), list[int](), dict[Any, int](), 0
    for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
        name, takes = operation.name, operation.stack_before
        if name == "GLOBAL":
            kind = str(argument).replace(" ", ".")
            # torch takes minutes over a long name, a number in the file sets the length of a bytearray, and a tensor
            # of XLA from an array shares memory that the file may free, where the program allows arrays
            if len(kind) > 200 or not kind.isprintable() or kind.endswith(("bytearray", "_from_numpy")):
                raise pickle.UnpicklingError(f"GLOBAL {show_key(kind)}")
        if count > _MOST_OPERATIONS or work > _MOST_WORK:
            raise pickle.UnpicklingError(f"more than {_MOST_OPERATIONS:,} values")
        if name == "MARK":
            marks.append(len(stack))
            continue
        # Take the operands off the stack: everything above a mark if the operation takes a mark
        is_marked = pickletools.markobject in takes
        first = marks.pop() - takes.index(pickletools.markobject) if is_marked else len(stack) - len(takes)
        items = sum(stack[first:])
        if name == "REDUCE" and stack[first] == 0 and items > 3:  # text and its encoding have one value each
            raise pickle.UnpicklingError("GLOBAL _codecs.encode of encoded bytes, which doubles them")
        del stack[first:]
        work += items
        # Push the result; only tuples, and values made of them, are as large as their items
        size = memo[argument] if "GET" in name else 1 + items * (name in _HASHED)
        size *= not (name == "GLOBAL" and kind == "_codecs.encode")
        stack += [size] * len(operation.stack_after)
        if "PUT" in name:
            memo[argument] = stack[-1]
