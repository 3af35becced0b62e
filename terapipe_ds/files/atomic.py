"""Files that are written whole or not at all: under another name first, then put in place in one move.

A process may be killed in any line. Whoever reads a file of ours sees the old one or the new one, never a half.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

PathLike = str | os.PathLike[str]


def write_atomically(path: PathLike, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one move.

    A link is followed. What is no file (`/dev/stdout`, a pipe) is written as it is: nothing may take its place.

    Args:
        durable: wait until the disk has it, so that the file survives a machine that stops as well as a killed process.

    Raises:
        OSError: naming `path`; what was there before is there still.
    """
    if _is_special(Path(path)):
        write(Path(path))
        return
    target, temporary = Path(os.path.realpath(path)), _temporary(path)
    try:
        write(temporary)
        if durable:
            sync(temporary)
        os.replace(temporary, target)
        if durable:
            sync(target.parent)
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)) != temporary:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error  # the name that the caller knows
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: PathLike) -> None:
    """Raise OSError, naming `path`, where `write_atomically` could not begin: it tries, as root has all permissions."""
    if _is_special(Path(path)):
        return
    temporary = _temporary(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def _temporary(path: PathLike) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _is_special(path: Path) -> bool:
    return path.absolute().is_relative_to("/dev") or (path.exists() and not path.is_file())


def write_text(path: PathLike, text: str, *, durable: bool = False) -> None:
    """Write `text` as UTF-8 by `write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), durable=durable)


def sync(path: PathLike) -> None:
    """Wait until the disk has a file, or the names in a folder. A file system that cannot tell is trusted."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of a folder on some network file systems
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
