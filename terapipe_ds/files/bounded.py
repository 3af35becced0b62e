"""Read files that others have written, up to a limit: refuse an endless one before it fills the memory."""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 64 * 2**20
"""No file that this package reads whole is nearly as large: results and timelines have a tenth of it."""

_GZIP = b"\x1f\x8b"


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, or raise OSError, naming `path`, if it cannot be read or is far too large.

    Neither `/dev/zero` nor a pipe that waits for its writer blocks the reader.
    """
    with open(Path(path), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        if is_pipe and not os.path.abspath(path).startswith("/dev/"):  # the shell's own pipes are there
            raise OSError(errno.ESPIPE, "a pipe, not a file", os.fspath(path))
        return _read(file, path)


def unpacked(data: bytes, path: str | os.PathLike[str]) -> bytes:
    """Return `data` of `path`, decompressed where gzip has compressed it.

    Raise OSError if it would be too large, and gzip.BadGzipFile, EOFError or zlib.error if it is damaged.
    """
    return _read(gzip.GzipFile(fileobj=io.BytesIO(data)), path) if data.startswith(_GZIP) else data


def _read(file: BinaryIO | gzip.GzipFile, path: str | os.PathLike[str]) -> bytes:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES >> 20} MiB, too large to be meant", os.fspath(path))
    return data
