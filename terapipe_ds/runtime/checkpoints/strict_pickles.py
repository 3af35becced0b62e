"""Read files of states without running what is in them.

A pickle is a program. torch reads tensors and plain values of it without running it (`weights_only`), and these few
classes of DeepSpeed are allowed besides, which hold numbers alone. Everything else needs the user's permission.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from terapipe_ds.messages import show_key
from terapipe_ds.runtime.checkpoints.manifest import CheckpointError

_ALLOWED = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler)  # in the states of ZeRO stage 1
_ALWAYS = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}  # read by `torch.load`
_REFUSED = re.compile(r"GLOBAL \S+|more than .*")
_ANOTHER = "Load another checkpoint, by its tag"
_MOST_OPERATIONS, _MOST_WORK = 2_000_000, 10**8  # of a pickle; 60,000 tensors take the former
_HASHED = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ")
_LEGACY_PICKLES = 5  # at the head of a file that is no archive


class PickleRefused(CheckpointError):
    """Say that the file `path` holds more than tensors and plain values."""

    def __init__(self, text: str, path: Path | None = None) -> None:
        super().__init__(text)
        self.path = path


@contextmanager
def strict_loading(is_strict: bool = True) -> Iterator[None]:
    """Let every `torch.load` of this process, DeepSpeed's too, read as `read_strictly` does."""
    if not is_strict:
        yield
        return
    before = {name: os.environ.get(name) for name in _ALWAYS}
    known = set(torch.serialization.get_safe_globals())
    os.environ.update(_ALWAYS)
    try:
        with torch.serialization.safe_globals([each for each in _ALLOWED if each not in known]):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_strictly(path: Path) -> Any:
    """Return what `torch.save` has written in a file; tensors stay on the disk until they are used.

    Raises:
        PickleRefused: the file holds more than tensors, plain values and the classes that are allowed.
        CheckpointError: the file cannot be read; unpickling raises errors of any kind, without the file's name.
    """
    try:
        _refuse_bombs(path)
        with strict_loading():
            return _load(path)
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
        what = found[0].removeprefix("GLOBAL ") if found else "a pickle that torch does not read as such"
        raise PickleRefused(
            f"{_shown(path)} cannot be read as tensors and plain values: it holds {what}, and reading it otherwise "
            f'would run code of whoever wrote it. {_ANOTHER}. Or, if you trust the file: "terapipe": {{"checkpoints": '
            '{"allow_pickle": true}}; a client_state of plain values needs no such permission',
            path,
        ) from error
    except Exception as error:
        raise CheckpointError(f"{_shown(path)} cannot be read ({_first_line(error)}). {_ANOTHER}") from error


def read_any(path: Path) -> Any:
    """Return what is in a file that `torch.save` has written; `strict_loading` decides whether its code may run.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return _load(path)
    except Exception as error:
        raise CheckpointError(f"{_shown(path)} cannot be read ({_first_line(error)}). {_ANOTHER}") from error


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except RuntimeError:  # of a writer whose files cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=False)


def _refuse_bombs(path: Path) -> None:
    """Refuse a file that would fill the memory or take for ever, though no code of it runs: torch has no limits."""
    if not path.is_file():  # a pipe would be waited for
        raise OSError("it is no file")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
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
                _refuse_endless(io.BufferedReader(archive.open(entry)))  # type: ignore[arg-type]


def _is_dangerous(name: str) -> bool:
    """Return whether torch would take minutes over a long name, or make an array as long as a number says."""
    return len(name) > 200 or not name.isprintable() or name.endswith("bytearray")


def _refuse_endless(file: io.BufferedReader) -> None:
    """Refuse a pickle with too many operations, or with tuples of tuples that take too long to hash."""
    stack, marks, memo, work = list[int](), list[list[int]](), dict[Any, int](), 0  # of values: how much to hash
    for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
        name, takes, items = operation.name, operation.stack_before, list[int]()
        if name == "GLOBAL" and _is_dangerous(str(argument)):
            raise pickle.UnpicklingError(f"GLOBAL {show_key(str(argument).replace(' ', '.'))}")
        if count > _MOST_OPERATIONS or work > _MOST_WORK:
            raise pickle.UnpicklingError(f"more than {_MOST_OPERATIONS:,} values")
        if name == "MARK":
            marks.append(stack)
            stack = []
            continue
        if pickletools.markobject in takes:
            items, stack = stack, marks.pop()
            takes = takes[: takes.index(pickletools.markobject)]
        items += [stack.pop() for _ in takes]
        work += sum(items)
        size = memo[argument] if "GET" in name else 1 + (sum(items) if name in _HASHED else 0)
        stack += [size] * len(operation.stack_after)
        if "PUT" in name:
            memo[argument] = stack[-1]


def _shown(path: Path) -> str:
    return show_key(str(path), 4096)


def _first_line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {show_key(text[:300], 300)}"
