"""Measure timelines: what each stage did when, in seconds of the wall clock, which the ranks of a machine share.

The wall clock is read once per traced step, and a clock that cannot be set tells the time from there. A trace that
cannot be written is a warning: nothing that only observes a training ends it.

On an accelerator every action is synchronised while its step is traced, which costs some of the overlap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from deepspeed.accelerator import get_accelerator

from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.schedule.action import Action, Kind
from terapipe_ds.timeline import Timeline, TimelineEvent, timeline_file_name

_COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


def is_traced(step: int) -> bool:
    """Return whether a training step, counted from 1, is written: the first five are, then each hundredth."""
    return step <= 5 or step % 100 == 0


class ActionTracer(Protocol):
    """The interface of `TeraPipeEngine.tracer`, which is told what a rank computes, and when."""

    @property
    def listens(self) -> bool:
        """Whether actions are recorded now; `measure` is called only then."""

    def begin(self, step: int | None) -> None:
        """Begin a batch: a training step, counted from 1, or an evaluation (None)."""

    def measure(self, action: Action) -> AbstractContextManager[None]:
        """Return a context in which `action` runs."""

    def input_is_here(self) -> None:
        """Note that the action in hand has waited for its message, and computes from now on."""

    def write(self, step: int) -> None:
        """End the batch."""


class Tracer:
    """Record the computations of one rank, if a directory is given."""

    def __init__(self, trace_dir: str | None, rank: int, stage_id: int, num_stages: int) -> None:
        self._dir = Path(trace_dir) if trace_dir else None
        self._rank, self._stage_id, self._num_stages = rank, stage_id, num_stages
        self._events: list[TimelineEvent] | None = None
        self._start_s = self._clock_s = 0.0
        self._writing = Diagnostic(f"terapipe.trace_dir: cannot write to {trace_dir}")

    @property
    def listens(self) -> bool:
        return self._events is not None

    def begin(self, step: int | None) -> None:
        """Start recording if `step`, counted from 1, is one of those that are written; None: an evaluation."""
        traced = self._dir is not None and step is not None and is_traced(step)
        self._events = [] if traced else None
        self._clock_s = time.time() - time.monotonic()

    def _now_s(self) -> float:
        return self._clock_s + time.monotonic()

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Record one action, if it computes and its step is traced."""
        if self._events is None or action.kind not in _COMPUTATIONS:
            yield
            return
        self._start_s = self._now_s()
        yield
        wait_for_computation()
        self._events.append(
            TimelineEvent(
                stage_id=self._stage_id,
                action=str(action),
                micro_batch_id=action.micro_batch_id,
                slice_id=action.slice_id,
                kind=action.kind.value,
                start_s=self._start_s,
                end_s=self._now_s(),
                chunk_id=action.chunk_id,
            )
        )

    def input_is_here(self) -> None:
        """Let the computation of the action in hand start now: its wait for a message is over."""
        if self._events is not None:
            wait_for_computation()
            self._start_s = self._now_s()

    def write(self, step: int) -> None:
        """Write `timeline-step{step}-rank{rank}.json` under the trace directory, whole or not at all."""
        events, self._events = self._events, None
        if events is None or self._dir is None:
            return
        with self._writing.attempt():
            self._dir.mkdir(parents=True, exist_ok=True)
            timeline = Timeline(num_stages=self._num_stages, events=tuple(events))
            timeline.save(self._dir / timeline_file_name(step, self._rank))


def wait_for_computation() -> None:
    """Wait until what this rank computes is done: on an accelerator for its current stream alone.

    A receive that is posted ahead has a stream of its own; its message may need what is computed here first.
    """
    if not get_accelerator().is_synchronized_device():
        get_accelerator().current_stream().synchronize()
