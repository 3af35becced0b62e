"""Read files of states without running what is in them.

A pickle is a program. torch reads tensors and plain values of it without running it (`weights_only`), and these few
classes of DeepSpeed are allowed besides, which hold numbers alone. Everything else needs the user's permission.
"""

from __future__ import annotations

import pickle
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from terapipe_ds.runtime.checkpoints.manifest import CheckpointError
from terapipe_ds.runtime.log import first_line

_ALLOWED = (fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler)  # in the states of ZeRO stage 1
_REFUSED = re.compile(r"GLOBAL (\S+)")
_ANOTHER = "Load another checkpoint, by its tag"


class PickleRefused(CheckpointError):
    """Say that the file `path` holds more than tensors and plain values."""

    def __init__(self, text: str, path: Path | None = None) -> None:
        super().__init__(text)
        self.path = path


@contextmanager
def strict_loading(is_strict: bool = True) -> Iterator[None]:
    """Let every `torch.load`, DeepSpeed's too, read as `read_strictly` does; other threads that run go on as before."""
    if not is_strict:
        yield
        return
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    load, known = torch.load, set(torch.serialization.get_safe_globals())

    def load_strictly(*args: Any, **options: Any) -> Any:
        is_other = threading.get_ident() in others
        return load(*args, **(options if is_other else {**options, "weights_only": True}))

    torch.load = load_strictly
    try:
        with torch.serialization.safe_globals([each for each in _ALLOWED if each not in known]):
            yield
    finally:
        torch.load = load


def read_strictly(path: Path) -> Any:
    """Return what `torch.save` has written in a file; tensors stay on the disk until they are used.

    Raises:
        PickleRefused: the file holds more than tensors, plain values and the classes that are allowed.
        CheckpointError: the file cannot be read; unpickling raises errors of any kind, without the file's name.
    """
    try:
        _refuse_compressed(path)
        with strict_loading():
            return _load(path)
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
        what = found[1] if found else "a pickle that torch does not read as such"
        raise PickleRefused(
            f"{path} cannot be read as tensors and plain values: it holds {what}, and reading it otherwise would run "
            f'code of whoever wrote it. {_ANOTHER}. Or, if you trust the file: "terapipe": {{"checkpoints": '
            '{"allow_pickle": true}}; a client_state of plain values needs no such permission',
            path,
        ) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}). {_ANOTHER}") from error


def read_any(path: Path) -> Any:
    """Return what is in a file that `torch.save` has written; `strict_loading` decides whether its code may run.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return _load(path)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}). {_ANOTHER}") from error


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except RuntimeError:  # of a writer whose files cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=False)


def _refuse_compressed(path: Path) -> None:
    """Refuse entries that `torch.save` would not have compressed: a small file could fill the memory."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, as torch.save never does")
