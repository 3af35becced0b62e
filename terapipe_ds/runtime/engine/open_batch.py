"""Open, close and forget the batch that a stage runs, for all that keep something of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from terapipe_ds.attention import GuardCapturedNames, guard_plain_attention
from terapipe_ds.runtime.batch.in_flight import BatchInFlight
from terapipe_ds.runtime.engine.part_runner import PartRunner
from terapipe_ds.runtime.engine.stage import Stage


class OpenBatch:
    """The batch of one stage, or none."""

    def __init__(self, stage: Stage, parts: Sequence[PartRunner]) -> None:
        self._stage, self._parts = stage, parts
        self._batch: BatchInFlight | None = None
        self._modes_run: set[bool] = set()  # training, evaluation: of which a batch has run under the closer guard

    @property
    def current(self) -> BatchInFlight:
        assert self._batch is not None, "no batch is open"
        return self._batch

    @property
    def is_training(self) -> bool:
        """Whether a training batch is open."""
        return self._batch is not None and self._batch.training

    @property
    def is_first_of_its_mode(self) -> bool:
        """Whether no other training batch, or no other evaluation, has run before."""
        return self.current.training not in self._modes_run

    def begin(self, batch: BatchInFlight, step: int) -> None:
        """Begin `batch`, whose training step is `step`, counted from 1."""
        stage = self._stage
        self._set(batch)
        stage.links.open_batch(batch)
        stage.tracer.begin(step if batch.training else None)
        if stage.flops is not None:
            stage.flops.open_batch(batch.training)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Guard the actions of the batch against plain attention, and look for numbers that are not finite."""
        finite, training = self._stage.finite, self.current.training
        captured = GuardCapturedNames() if self.is_first_of_its_mode else nullcontext()
        watching = finite.watching() if finite is not None and training else nullcontext()
        with guard_plain_attention(), captured, watching:
            yield
        self._modes_run.add(training)

    def close(self, peak_live_slices: int, step: int) -> None:
        """End the batch, and check that its books are closed: nothing of it is left anywhere."""
        stage, batch = self._stage, self.current
        stage.links.close_batch()
        stage.weights.assert_done()
        for part in self._parts:
            part.close_batch()
        batch.assert_done(peak_live_slices)
        stage.store.assert_drained()
        self._set(None)
        stage.tracer.write(step)

    def forget(self) -> None:
        """Drop the batch after an error, as if it had never begun."""
        self._set(None)
        self._stage.store.reset()

    def _set(self, batch: BatchInFlight | None) -> None:
        self._batch = batch
        self._stage.weights.open_batch(() if batch is None else batch.split)
        self._stage.results.begin(batch)
        for part in self._parts:
            part.open_batch(batch)
