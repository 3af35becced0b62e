"""Let the `number`-th system call for a file fail, like a disk that fails once, or like a kill."""

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

WRITES = [(os, name) for name in ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")]
WRITES += [(io, "open"), (builtins, "open")]
LOOKS = [(os, name) for name in ("stat", "lstat", "listdir", "scandir")]


class Killed(BaseException):
    """Act like a kill: no handler of errors sees it."""


@contextlib.contextmanager
def failing_at(
    number: int | None, *faults: str, calls: list[tuple[Any, str]] = WRITES, folder: str = ""
) -> Iterator[list[str]]:
    """Let the `number`-th of `calls` for a path in `folder` fail, and after a kill all later ones; with None, none.

    Yield the calls that were tried. The faults, names of errors or "killed", take turns.
    """
    tried: list[str] = []

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if folder and name != "fsync" and not str(args[0]).startswith(folder):
                return function(*args, **kwargs)
            tried.append(f"{name} {args[0] if args else ''}")
            fault = faults[len(tried) % len(faults)]
            if fault == "killed" and len(tried) > number:
                raise Killed
            if len(tried) == number + 1:
                raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), *args[:1])
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in calls if number is not None else ():
            stack.enter_context(mock.patch.object(owner, name, failing(name, getattr(owner, name))))
        yield tried
