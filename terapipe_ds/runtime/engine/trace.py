"""Measure timelines: the actions of each stage in seconds of the wall clock, which the ranks of a machine share.

The tracer reads the wall clock once per recorded step, and from there uses a clock that cannot be set. A trace that
cannot be written causes only a warning: nothing that merely observes a training may end it.

On an accelerator the tracer synchronises after every action of a traced step, which costs some of the overlap. For
monitors, which record every step, events of the device tell the time instead, and the host waits once per step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd.profiler import record_function

from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.schedule.action import COMPUTE_KINDS, Action
from terapipe_ds.timeline import Timeline, TimelineEvent, timeline_file_name


def is_traced(step: int, count: int) -> bool:
    """Return whether a training step is written: the first five of this run, by `count`, then each hundredth."""
    return count <= 5 or step % 100 == 0


class Tracer:
    """Record the computations of one rank: some steps if there is a directory, all steps if there are monitors.

    While it `listens`, the engine calls `measure` for each action. A benchmark may give an engine a tracer of its own.
    """

    last: tuple[TimelineEvent, ...] | None = None  # of the batch that has ended, if it was recorded

    def __init__(
        self, trace_dir: str | None, rank: int, stage_id: int, num_stages: int, is_monitored: bool = False
    ) -> None:
        self._dir, self._is_monitored = Path(trace_dir) if trace_dir else None, is_monitored
        self._rank, self._stage_id, self._num_stages = rank, stage_id, num_stages
        self.listens = False  # this step is recorded
        self._on_device = False  # events of the device tell the time
        self._zero_s = 0.0  # of the monotonic clock, as seconds since 1970
        self._marks: list[tuple[Action, Any, Any]] = []
        self._start: Any = None
        self._is_written, self._count = False, 0
        self._writing = Diagnostic(f"terapipe.trace_dir: cannot write to {trace_dir}")

    def begin(self, step: int | None) -> None:
        """Start recording if `step`, counted from 1, is to be recorded; None: an evaluation."""
        self._count += step is not None  # a run that resumes begins with a later step
        self._is_written = self._dir is not None and step is not None and is_traced(step, self._count)
        self.listens = self._is_written or (self._is_monitored and step is not None)
        # if only monitors record, the device notes the times, so that the host does not wait for each action
        self._on_device = not (self._is_written or get_accelerator().is_synchronized_device())
        self._zero_s, self._marks, self.last = time.time() - time.monotonic(), [], None

    def _mark(self, waits: bool = True) -> Any:
        """Return a mark of this moment: seconds since 1970, once the device is here if it `waits`, or an event."""
        if self._on_device:
            event = get_accelerator().Event(enable_timing=True)
            event.record()
            return event
        if waits:
            wait_for_computation()
        return self._zero_s + time.monotonic()

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Record one action, if it computes and its step is recorded."""
        if not self.listens or action.kind not in COMPUTE_KINDS:
            yield
            return
        self._start = self._mark(waits=False)
        yield
        self._marks.append((action, self._start, self._mark()))

    def input_is_here(self) -> None:
        """Let the computation of the current action start now: its wait for a message is over."""
        if self.listens:
            self._start = self._mark()

    def write(self, step: int) -> None:
        """Write `timeline-step{step}-rank{rank}.json` under the trace directory, whole or not at all."""
        if not self.listens:
            return
        self.listens, now_s = False, 0.0
        last = self._mark() if self._on_device else None
        if last is not None:  # the times of all events count back from the last one
            last.synchronize()
            now_s = time.time()
        events = []
        for action, *marks in self._marks:
            unit = action.micro_batch_id, action.slice_id
            start_s, end_s = (mark if last is None else now_s - mark.elapsed_time(last) / 1e3 for mark in marks)
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
