"""Write files whole or not at all: under another name first, then put in place in one move.

A process may be killed at any line. A reader of our files sees the old one or the new one, never a half.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

PathLike = str | os.PathLike[str]

_CANNOT_SAY = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that cannot flush the names in a folder. Every other error means that something is lost."""


def write_atomically(path: PathLike, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one move.

    The temporary file is a new one with a random name, so that no other process has it and no link waits there. A
    `path` that is a link is followed. The new file has the permissions and the group of the file that it replaces. A
    path that is no file in a folder (`/dev/stdout`, a pipe) is written in place: nothing may replace it.

    A `durable` file survives a machine that stops, because the disk has it at the end. OSError names `path`; the old
    file is still there then, unless only the flush of the folder failed.
    """
    if _is_special(Path(path)):
        write(Path(path))
        return
    target, temporary = Path(os.path.realpath(path)), _temporary(path)
    try:
        old = target.stat() if target.exists() else None
        descriptor = _create(temporary, 0o666 if old is None else 0o600)  # never wider than the file that it replaces
        try:
            write(temporary)
            if old is not None:
                _take_after(descriptor, old)
            if durable:
                os.fsync(descriptor)  # open since before the writing, this descriptor reports every error since then
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
        if durable:
            sync(target.parent)
    except OSError as error:
        is_other = error.filename is not None and Path(os.fsdecode(error.filename)) not in (temporary, target.parent)
        if is_other or error.errno is None:  # without errno the error has only its own text
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error  # the name that the caller knows
    finally:
        with contextlib.suppress(OSError):  # an error here would hide the one that matters
            temporary.unlink()


def check_writable(path: PathLike) -> None:
    """Raise OSError, naming `path`, where `write_atomically` could not begin. It tries: root has all permissions."""
    if _is_special(Path(path)):
        return
    temporary = _temporary(path)
    try:
        os.close(_create(temporary, 0o600))
        temporary.unlink()
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def _temporary(path: PathLike) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


def _create(temporary: Path, mode: int) -> int:
    """Create a file that must not be there yet, not even as a link, and return its descriptor."""
    return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _take_after(descriptor: int, old: os.stat_result) -> None:
    """Give a new file the group and the permissions of the file whose place it takes."""
    with contextlib.suppress(OSError):  # another group than the process is in, or a file system without owners
        os.fchown(descriptor, -1, old.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _is_special(path: Path) -> bool:
    """Return whether a path is no file, or names an open file of this process (`/dev/stdout`, `/dev/fd/3`)."""
    is_open = str(path.absolute()).startswith(("/dev/fd/", "/dev/std"))
    return is_open or (path.exists() and not path.is_file())


def write_text(path: PathLike, text: str, *, durable: bool = False) -> None:
    """Write `text` as UTF-8 by `write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), durable=durable)


def sync(path: PathLike) -> None:
    """Wait until the disk has a file, or the names in a folder; trust folders whose file system cannot tell.

    Raise OSError, naming `path`, if it has not: a full disk or a quota may show here for the first time.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SAY or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(descriptor)
