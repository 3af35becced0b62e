"""End a training batch after its last backward: sum the gradients and step the optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.engine.deepspeed_faults import mark_gradients, tied_copies_left_out
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import StageFlops
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import (
    complete_gradients,
    copies_may_differ,
    sum_gradients,
    take_owners_weights,
)
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.schedule.action import Action, Kind

CLOSING = (Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP)


class ClosingOfBatches(PipelineEngine):
    """A base of `TeraPipeEngine`: the actions that each stage has once per batch."""

    closing_s: float = 0.0  # reduce and optimizer of the last batch, on this rank
    _layout: Layout
    _links: StageLinks
    _watchdog: Watchdog
    _finite: FiniteCheck | None
    _flops: StageFlops | None

    @contextmanager
    def _timed_closing(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.closing_s += time.perf_counter() - begin_s

    def _reduce_tied_grads(self, action: Action) -> None:
        """Run the model's own sums over ranks, then those of tied layers."""
        if self._finite is not None:
            with self._watchdog.waiting("the check of all ranks for numbers that are not finite"):
                self._links.close_batch()  # a caller may go on after the error
                self._finite.agree(self.global_steps + 1)
        if self._layout.has_copies:
            complete_gradients(self.module, self.optimizer)
        before_reduce = getattr(self.module, "before_reduce", None)
        if before_reduce is not None:
            before_reduce(self)
        self._exec_reduce_tied_grads()

    def _exec_reduce_tied_grads(self) -> None:
        if self._layout.has_copies:
            sum_gradients(self.module, self.optimizer)
        else:
            super()._exec_reduce_tied_grads()

    def _optimizer_step(self, action: Action) -> None:
        mark_gradients(self.module, self.optimizer)
        if self._flops is not None:
            self._flops.report()
        self._exec_optimizer_step()
        if copies_may_differ(self._layout, self.basic_optimizer, self.dp_world_size):
            take_owners_weights(self.module)

    def clip_fp32_gradients(self) -> None:
        """Clip as DeepSpeed where no optimizer of its own does it; tied weights count once."""
        with tied_copies_left_out(self.module):
            super().clip_fp32_gradients()
