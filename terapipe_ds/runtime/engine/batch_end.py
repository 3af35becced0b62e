"""End a training batch after its last backward: what comes around DeepSpeed's sums of gradients and optimizer step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.engine.deepspeed_faults import mark_gradients
from terapipe_ds.runtime.engine.stage import Stage
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import complete_gradients, copies_may_differ, take_owners_weights
from terapipe_ds.schedule.action import Kind

CLOSING = (Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP)


class BatchEnd:
    """The actions that each stage has once per batch, and their time.

    `closing_s` is what they took in the last batch on this rank, in seconds.
    """

    def __init__(self, engine: PipelineEngine, layout: Layout, stage: Stage) -> None:
        self.closing_s = 0.0
        self._engine, self._layout, self._stage = engine, layout, stage

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `closing_s`."""
        begin_s = time.perf_counter()
        yield
        self.closing_s += time.perf_counter() - begin_s

    def before_sums(self) -> None:
        """Let all ranks agree that their numbers are finite, and run the module's own hook `before_reduce`."""
        engine, stage = self._engine, self._stage
        if stage.finite is not None:
            with stage.watchdog.waiting("the check of all ranks for numbers that are not finite"):
                stage.links.close_batch()  # a caller may go on after the error
                stage.finite.agree(engine.global_steps + 1)
        if self._layout.has_copies:
            complete_gradients(engine.module, engine.optimizer)
        before_reduce = getattr(engine.module, "before_reduce", None)
        if before_reduce is not None:
            before_reduce(engine)

    def before_step(self) -> None:
        """Mark gradients for the norm, and report the operations of the batch."""
        mark_gradients(self._engine.module, self._engine.optimizer)
        if self._stage.flops is not None:
            self._stage.flops.report()

    def after_step(self) -> None:
        """Bring the copies of a part back to one value, where an optimizer may update them differently."""
        if copies_may_differ(self._layout, self._engine.basic_optimizer, self._engine.dp_world_size):
            take_owners_weights(self._engine.module)
