"""Measure the engine's own time in an F and a B: its bookkeeping, and DeepSpeed's wrappers around layers and autograd.

The planner makes a plan before the first batch, from costs that a timer has measured with the layers alone. So the
engine measures its own time in the second training batch (the first one warms up), and the planner adds it. This is the
processor time of this thread, without waits and other programs. With a device it hardly matters: the host prepares a
slice while the device computes another one.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.accelerator import get_accelerator

from terapipe_ds.schedule.action import Action, Kind


class OwnTime:
    """Measure the own time of one stage, by part, without the time between `layers_begin` and `layers_end`."""

    def __init__(self) -> None:
        self.is_on = False
        self._num_batches = 0
        self._begin_s = self._layers_begin_s = self._layers_s = 0.0
        self._taken: dict[tuple[int, Kind], list[float]] = defaultdict(list)

    def open_batch(self, training: bool) -> None:
        """Start measuring if this is the second training batch."""
        self._num_batches += training
        self.is_on = training and self._num_batches == 2 and get_accelerator().is_synchronized_device()

    def close_batch(self) -> None:
        self.is_on = False

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        self.input_is_here()
        self._layers_begin_s, self._layers_s = self._begin_s, 0.0
        yield
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            self._taken[action.part_id, action.kind].append(time.thread_time() - self._begin_s - self._layers_s)

    def input_is_here(self) -> None:
        """Begin now: the links' measurements cover the time that a message takes."""
        if self.is_on:
            self._begin_s = time.thread_time()

    def layers_begin(self) -> None:
        """Stop counting: the time from now on belongs to the layers."""
        if self.is_on:
            self._layers_begin_s = time.thread_time()

    def layers_end(self) -> None:
        if self.is_on:
            self._layers_s += time.thread_time() - self._layers_begin_s

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Count the block as time of the layers."""
        self.layers_begin()
        yield
        self.layers_end()

    def of_parts(self) -> dict[int, tuple[float, float]] | None:
        """Return the median seconds of F and of B for each part of this stage; None before the second batch is over.

        All ranks return None before the same batches.
        """
        if self._num_batches < 2 or self.is_on:
            return None
        return {
            part_id: (statistics.median(taken), statistics.median(self._taken[part_id, Kind.BACKWARD] or [0.0]))
            for (part_id, kind), taken in list(self._taken.items())
            if kind is Kind.FORWARD
        }
