"""A stand-in for a device that runs behind its host: counts where the host waits for it within a batch."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe_ds.runtime.engine.batch_end import CLOSING
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.schedule.action import Action

_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")
"""What brings numbers to the host: `item()`, `float()` and `bool()` of a tensor, masks as indices."""


class Event:
    """An event of a stream that is always done."""

    def __init__(self, **options: Any) -> None:
        self.recorded = False

    def record(self, *stream: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        """Wait for the stream that it is of, and no other."""
        assert self.recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.recorded and end.recorded
        return 2.0


@dataclass
class Waits:
    """Where the host waited while receives may have been posted: the action, and the call."""

    device: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    actions: int = 0


@contextlib.contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count for the block, in the actions of batches before their gradients are summed: receives are posted then."""
    waits, running = Waits(), [None]
    run = TeraPipeEngine._exec_action

    def run_counted(engine: TeraPipeEngine, action: Action) -> None:
        if action.kind in CLOSING:
            return run(engine, action)
        waits.actions += 1
        running[0] = action  # type: ignore[call-overload]
        try:
            with _Reads(lambda: waits.reads.append(_caller(action))):
                return run(engine, action)
        finally:
            running[0] = None

    def synchronize(*device: Any) -> None:
        if running[0] is not None:
            waits.device.append(_caller(running[0]))

    accelerator = get_accelerator()
    stand_in = {
        "is_synchronized_device": lambda: False,
        "Event": Event,
        "current_stream": lambda *device: mock.Mock(spec_set=["synchronize", "wait_event"]),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": synchronize,
    }
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(TeraPipeEngine, "_exec_action", run_counted))
        instructions = {**TeraPipeEngine._INSTRUCTION_MAP, Action: run_counted}
        patches.enter_context(mock.patch.object(TeraPipeEngine, "_INSTRUCTION_MAP", instructions))
        for name, value in stand_in.items():
            patches.enter_context(_property_patch(accelerator, name, value))
        yield waits


def _property_patch(accelerator: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """`Event` and its kind are properties of the class, the others methods."""
    if isinstance(getattr(type(accelerator), name, None), property):
        return mock.patch.object(type(accelerator), name, property(lambda self: value))
    return mock.patch.object(accelerator, name, value)


class _Reads(TorchDispatchMode):
    """Tells of each operation that brings numbers to the host."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in _READS:
            self._tell()
        return func(*args, **(kwargs or {}))


def _caller(action: Any) -> str:
    """The nearest lines that are neither torch's nor this file's."""
    frames = traceback.extract_stack(sys._getframe(1))
    lines = [f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in frames if frame.filename != __file__]
    return f"{action}: {' < '.join(lines[:-4:-1])}"
