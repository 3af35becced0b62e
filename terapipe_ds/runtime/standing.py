"""Where a thread stands, read from outside: its innermost calls, and whether it waits inside torch.distributed."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

import torch.distributed as torch_dist

_SHOWN_CALLS = 6
_LAYERS_OF_COMMUNICATION = ("torch.distributed", "deepspeed.comm")
_DECORATORS = ("wrapper", "log_wrapper")  # both packages wrap their calls, to log or to time them
_SEES_THROUGH = ("deepspeed.utils", "deepspeed.accelerator", "contextlib", "functools", "torch.utils")


class Standing(NamedTuple):
    """``collective``: the call of torch.distributed it is in and from where; "" elsewhere."""

    stack: str = ""
    collective: str = ""


def standing_of(thread_id: int) -> Standing:
    """Where the thread is now. Without a lock: it may go on meanwhile."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return Standing()
    return Standing("".join(traceback.format_stack(frame)[-_SHOWN_CALLS:]), collective_of(frame))


def collective_of(frame: FrameType) -> str:
    """The communication that ``frame`` waits in, as "all_reduce, called in layers.py:12 (forward)"; "" for none."""
    called = ""
    inner: FrameType | None = frame
    while inner is not None and _is_in(inner, (*_LAYERS_OF_COMMUNICATION, *_SEES_THROUGH)):
        if _is_in(inner, _LAYERS_OF_COMMUNICATION) and inner.f_code.co_name not in _DECORATORS:
            called = inner.f_code.co_name
        inner = inner.f_back
    if not called:
        return _wait_for_work(frame)
    return f"{called}{_place(inner)}"


def _wait_for_work(frame: FrameType) -> str:
    """The frame waits for a call that it began earlier, with ``async_op=True``."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if ".wait(" not in line or not any(_has_work(value) for value in frame.f_locals.values()):
        return ""
    return f"the end of a call{_place(frame)}"


def _has_work(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(each, torch_dist.Work) for each in value)
    return isinstance(value, torch_dist.Work)


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f", called in {PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_in(frame: FrameType, packages: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == package or name.startswith(f"{package}.") for package in packages)
