"""Open, end, close and forget the batch that a stage runs, in every object that keeps something of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import GuardCapturedNames, guard_plain_attention
from terapipe_ds.runtime.batch.in_flight import BatchInFlight
from terapipe_ds.runtime.batch.loss import SliceLossError
from terapipe_ds.runtime.engine.collaborators import Stage
from terapipe_ds.runtime.engine.deepspeed_faults import mark_gradients, may_overflow
from terapipe_ds.runtime.engine.part_runner import PartRunner
from terapipe_ds.runtime.layers.compiled import layers_as_they_are
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import complete_gradients, copies_may_differ, take_owners_weights
from terapipe_ds.schedule.action import Action, Kind

logger = logging.getLogger("terapipe_ds")
CLOSING = (Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP)


class OpenBatch:
    """The batch of one stage, or none."""

    def __init__(self, stage: Stage, parts: Sequence[PartRunner], intercept: bool) -> None:
        self._stage, self._parts, self._intercept = stage, parts, intercept
        self._batch: BatchInFlight | None = None
        self.is_observed = False  # the actions of the batch are traced, or their operations counted
        self._modes_run: set[bool] = set()  # training, evaluation: of which a batch has run under the closer guard

    @property
    def current(self) -> BatchInFlight:
        assert self._batch is not None, "no batch is open"
        return self._batch

    @property
    def is_training(self) -> bool:
        return self._batch is not None and self._batch.training

    @property
    def is_first_of_its_mode(self) -> bool:
        return self.current.training not in self._modes_run

    @contextmanager
    def observed(self, action: Action) -> Iterator[None]:
        """Let those observe `action` who do."""
        stage = self._stage
        with stage.tracer.measure(action), nullcontext() if stage.flops is None else stage.flops.around(action):
            yield

    def begin(self, batch: BatchInFlight, step: int) -> None:
        """Begin `batch`, whose training step is `step`, counted from 1."""
        stage = self._stage
        self._set(batch)
        stage.deepspeed.open_batch()
        stage.links.open_batch(batch)
        stage.tracer.begin(step if batch.training else None)
        if stage.flops is not None:
            stage.flops.open_batch(batch.training)
        self.is_observed = stage.flops is not None or getattr(stage.tracer, "listens", True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Intercept or refuse plain attention in the actions of the batch, and look for numbers that are not finite.

        The closer guard of the first batch sees no operations inside of a graph, so that nothing is compiled there.
        """
        finite, training = self._stage.finite, self.current.training
        is_first = self.is_first_of_its_mode
        captured, plain = (GuardCapturedNames(), layers_as_they_are()) if is_first else (nullcontext(), nullcontext())
        watching = finite.watching() if finite is not None and training else nullcontext()
        with guard_plain_attention(self._intercept), captured, plain, watching:
            yield
        self._modes_run.add(training)

    def close(self, peak_live_slices: int, step: int) -> None:
        """Close the batch, and check that its books are closed: nothing of it is left anywhere."""
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
        if self._stage.offload is not None:
            self._stage.offload.open_batch(batch)
        for part in self._parts:
            part.open_batch(batch)


class BatchEnd:
    """What a stage does before and after DeepSpeed sums gradients and steps the optimizer, once per training batch."""

    def __init__(self, engine: PipelineEngine, layout: Layout, stage: Stage) -> None:
        self.closing_s = 0.0  # of the actions in `CLOSING`, in the last batch on this rank
        self._engine, self._layout, self._stage = engine, layout, stage
        self._had_nan = False  # a loss of the training batch before

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `closing_s`."""
        begin_s = time.perf_counter()
        yield
        self.closing_s += time.perf_counter() - begin_s

    def before_sums(self) -> None:
        """Refuse losses of NaN, let ranks agree that all is finite, and run the module's own hook `before_reduce`.

        The loss is read here, where no receive is on its way that the host could keep waiting.
        """
        engine, stage = self._engine, self._stage
        if stage.finite is not None:
            with stage.watchdog.waiting("the check of all ranks for numbers that are not finite"):
                stage.links.close_batch()  # a caller may go on after the error
                stage.finite.agree(engine.global_steps + 1)
        self._refuse_losses_of_nan(engine.global_steps + 1)
        if self._layout.has_copies:
            complete_gradients(engine.module, engine.optimizer)
        before_reduce = getattr(engine.module, "before_reduce", None)
        if before_reduce is not None:
            before_reduce(engine)

    def _refuse_losses_of_nan(self, step: int) -> None:
        """Raise an error for a loss of NaN; warn where a large input may have overflowed in fp16.

        The loss scale has no part in a loss. So under a dynamic one as well NaN is an error where `loss_fn` makes it of
        finite outputs, or where it comes in two steps on end: DeepSpeed would skip all steps without a word.
        """
        had_nan, found = self._had_nan, self._stage.results.loss_of_nan()
        self._had_nan = found is not None
        if found is None:
            return
        if had_nan or found.is_of_loss_fn or not may_overflow(self._engine):
            again = ". The step before had such a loss as well" if had_nan else ""
            raise SliceLossError(f"step {step}: {found.problem}{again}. Nothing was updated in this step")
        logger.warning("step %d: %s. DeepSpeed skips this step; the next one with NaN is an error", step, found.problem)

    def before_step(self) -> None:
        """Mark gradients for the norm, and report the operations of the batch."""
        mark_gradients(self._engine.module, self._engine.optimizer)
        if self._stage.flops is not None:
            self._stage.flops.report()

    def after_step(self) -> None:
        """Bring the copies of a part back to one value, where an optimizer may update them differently."""
        if copies_may_differ(self._layout, self._engine.basic_optimizer, self._engine.dp_world_size):
            take_owners_weights(self._engine.module)
