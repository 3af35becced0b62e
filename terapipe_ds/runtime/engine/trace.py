"""Measure timelines: the actions of each stage in seconds of the wall clock, which the ranks of a machine share.

The tracer reads the wall clock once per recorded step, and from there uses a clock that cannot be set. A trace that
cannot be written causes only a warning: nothing that merely observes a training may end it.

On an accelerator the tracer synchronises after every action of a traced step, which costs some of the overlap. For
monitors, which record every step, events of the device tell the time instead, and the host waits once per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd.profiler import record_function

from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.schedule.action import COMPUTE_KINDS, Action
from terapipe_ds.timeline import Timeline, TimelineEvent, timeline_file_name


def is_traced(step: int, count: int) -> bool:
    """Return whether a training step is written: the first five of this run, by `count`, then each hundredth."""
    return count <= 5 or step % 100 == 0


class ActionTracer(Protocol):
    """Define the interface of `TeraPipeEngine.tracer`, which learns of each computation of a rank and its time."""

    @property
    def listens(self) -> bool:
        """Tell whether actions are recorded now; the engine calls `measure` only then."""

    def begin(self, step: int | None) -> None:
        """Begin a batch: a training step, counted from 1, or an evaluation (None)."""

    def measure(self, action: Action) -> AbstractContextManager[None]:
        """Return a context in which `action` runs."""

    def input_is_here(self) -> None:
        """Note that the current action has waited for its message, and computes from now on."""

    def write(self, step: int) -> None:
        """End the batch."""


class HostClock:
    """Tell the time of this rank's thread, as seconds since 1970; a mark waits for the device first."""

    def __init__(self) -> None:
        self._zero_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the mark of a computation that begins, which `seconds` turns into a time."""
        return self._zero_s + time.monotonic()

    def mark(self) -> float:
        """Return the mark of a computation that ends, or whose input has arrived."""
        wait_for_computation()
        return self.now()

    def seconds(self, mark: float) -> float:
        """Return the time of a mark."""
        return mark


class DeviceClock:
    """Tell the time by events that the device records in its stream when it reaches them; no thread waits.

    Args:
        new_event: returns an event with `record`, `synchronize` and `elapsed_time` (milliseconds), like torch's.
    """

    def __init__(self, new_event: Callable[..., Any]) -> None:
        self._new_event = new_event
        self._last: Any = None
        self._last_s = 0.0

    def now(self) -> Any:
        event = self._new_event(enable_timing=True)
        event.record()
        return event

    mark = now

    def end(self) -> None:
        """Wait until the device is here, and read the wall clock: the times of all marks count back from this one."""
        self._last = self.mark()
        self._last.synchronize()
        self._last_s = time.time()

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark, after `end`."""
        return self._last_s - float(mark.elapsed_time(self._last)) / 1e3


class Tracer:
    """Record the computations of one rank: some steps if there is a directory, all steps if there are monitors."""

    def __init__(
        self, trace_dir: str | None, rank: int, stage_id: int, num_stages: int, is_monitored: bool = False
    ) -> None:
        self._dir, self._is_monitored = Path(trace_dir) if trace_dir else None, is_monitored
        self._rank, self._stage_id, self._num_stages = rank, stage_id, num_stages
        self._clock: HostClock | DeviceClock | None = None  # the clock of a recorded step
        self._marks: list[tuple[Action, Any, Any]] = []
        self._start: Any = None
        self._is_written, self._count = False, 0
        self._writing = Diagnostic(f"terapipe.trace_dir: cannot write to {trace_dir}")
        self.last: tuple[TimelineEvent, ...] | None = None  # of the batch that has ended, if it was recorded

    @property
    def listens(self) -> bool:
        return self._clock is not None

    def begin(self, step: int | None) -> None:
        """Start recording if `step`, counted from 1, is to be recorded; None: an evaluation."""
        self._count += step is not None  # a run that resumes begins with a later step
        self._is_written = self._dir is not None and step is not None and is_traced(step, self._count)
        self._clock, self._marks, self.last = None, [], None
        if self._is_written or (self._is_monitored and step is not None):
            # if only monitors record, the device notes the times, so that the host does not wait for each action
            on_host = self._is_written or get_accelerator().is_synchronized_device()
            self._clock = HostClock() if on_host else DeviceClock(get_accelerator().Event)

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Record one action, if it computes and its step is recorded."""
        if self._clock is None or action.kind not in COMPUTE_KINDS:
            yield
            return
        self._start = self._clock.now()
        yield
        self._marks.append((action, self._start, self._clock.mark()))

    def input_is_here(self) -> None:
        """Let the computation of the current action start now: its wait for a message is over."""
        if self._clock is not None:
            self._start = self._clock.mark()

    def write(self, step: int) -> None:
        """Write `timeline-step{step}-rank{rank}.json` under the trace directory, whole or not at all."""
        clock, self._clock = self._clock, None
        if clock is None:
            return
        if isinstance(clock, DeviceClock):
            clock.end()
        events = []
        for action, *marks in self._marks:
            (start_s, end_s), unit = map(clock.seconds, marks), (action.micro_batch_id, action.slice_id)
            times = start_s, max(start_s, end_s)
            kind = action.kind.value
            events.append(TimelineEvent(self._stage_id, str(action), *unit, kind, *times, action.chunk_id))
        self.last, self._marks = tuple(events), []
        if not self._is_written or self._dir is None:
            return
        with self._writing.attempt():
            self._dir.mkdir(parents=True, exist_ok=True)
            timeline = Timeline(num_stages=self._num_stages, events=self.last)
            timeline.save(self._dir / timeline_file_name(step, self._rank))


@contextmanager
def named_range(action: Action) -> Iterator[None]:
    """Name an action for profilers, "F0.3 part 2": for torch's where it runs, and on a device by NVTX."""
    accelerator, name = get_accelerator(), f"{action} part {action.part_id}"
    accelerator.range_push(name)
    try:
        with record_function(name) if torch.autograd._profiler_enabled() else nullcontext():
            yield
    finally:
        accelerator.range_pop()


def names_ranges() -> bool:
    """Return whether anything can show the names of actions: torch's profiler, or a device, whose tools may come."""
    return torch.autograd._profiler_enabled() or not get_accelerator().is_synchronized_device()


def wait_for_computation() -> None:
    """Wait until this rank's computation is done: on an accelerator, wait for its current stream only.

    A receive that is posted ahead has a stream of its own; its message may depend on this computation.
    """
    if not get_accelerator().is_synchronized_device():
        get_accelerator().current_stream().synchronize()
