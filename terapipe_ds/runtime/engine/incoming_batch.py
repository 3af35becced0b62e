"""Draw a batch: agree on its shape, choose its slices and its schedule, and check the first one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.batch.loss import weights_of
from terapipe_ds.runtime.batch.source import BatchSource, DrawnMicroBatch
from terapipe_ds.runtime.engine.collaborators import Stage
from terapipe_ds.runtime.engine.refused_calls import check_checkpointing, problem_of_device_waits
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.planning.batch_plans import Plans
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.verify import FirstBatchCheck

logger = logging.getLogger("terapipe_ds")


class IncomingBatches:
    """The batches of one stage, up to the point where their actions can run."""

    def __init__(self, to_plan: StageToPlan, plans: Plans, stage: Stage, wires: Wires, verify_only: bool) -> None:
        engine, layout = to_plan.engine, to_plan.layout
        self._engine, self._config, self._plans = engine, to_plan.config, plans
        self._stage_id, self._wires, self._verify_only = stage.stage_id, wires, verify_only
        self._drawing = stage.watchdog.drawing
        places = layout.places(stage.stage_id)
        self._sequence = stage.sequence
        self._has_first = any(place.is_first for place in places)
        self._first_batch = FirstBatchCheck(to_plan, stage.watchdog.note)
        replica_ranks = engine.grid.get_data_parallel_rank(), engine.grid.get_slice_parallel_rank()
        self._source = BatchSource(
            self._config,
            self._next_batch,
            to_plan.groups.place(layout, stage.stage_id),
            layout,
            plans.cuts,
            to_plan.token_multiple,
            # the first part may be on any rank
            tells=layout.owner(0) == stage.stage_id and not any((*replica_ranks, stage.sequence.rank)),
            accept=getattr(engine.module, "check_inputs", lambda inputs, starts: None),
            look_at=self._first_batch.look_at_labels,
            check=self._check_options,
            require=plans.require,
        )
        self._source.also_agree_on("slice_length_multiple", str(to_plan.token_multiple))

    def _next_batch(self) -> Any:
        """Return what the user's iterator gives, which may take longer than a wait for another rank."""
        with self._drawing():
            return self._engine._next_batch()

    def use_slice_plan(self, plan: SlicePlan | Sequence[SlicePlan], schedule: str | None) -> None:
        """Run sequences of that length with `plan`, which the next batch compares over all ranks."""
        self._source.also_agree_on("slices set by hand:", self._plans.use(plan, schedule))

    def next(self, num_micro_batches: int, training: bool) -> BatchInFlight:
        """Draw the next batch. A collective over all ranks; its errors are raised on each of them."""
        engine = self._engine
        self._source.also_agree_on("global_steps", str(engine.global_steps))
        drawn, shapes = self._source.draw(num_micro_batches, training, needs_labels=engine._compute_loss)
        how, plans = self._plans.for_batch(drawn, shapes)
        if self._plans.orders_found:
            self._source.also_agree_on("orders found", self._plans.orders_found)
        schedule = self._plans.schedule(how, training, tuple(plan.num_slices for plan in plans))
        micro_batches = [self._in_flight(d, shape, plan) for d, shape, plan in zip(drawn, shapes, plans, strict=True)]
        self._first_batch.run(micro_batches, training, engine._compute_loss, self._verify_only)
        is_planned = training and len(shapes) == engine.micro_batches and schedule.name == how.schedule
        is_planned = is_planned and {shape.length for shape in shapes} == {how.sequence_length}
        predicted = how.predicted if is_planned else None
        return BatchInFlight(schedule, self._stage_id, training, micro_batches, predicted=predicted)

    def _check_options(self) -> None:
        """Refuse what has been switched on since the last batch: in DeepSpeed, or in the environment."""
        check_checkpointing(self._config.is_stock_order and not self._plans.cut_by_hand)
        problem = problem_of_device_waits(self._wires.post_on_device)
        if problem is not None:
            raise TeraPipeConfigError(problem)

    def _in_flight(self, drawn: DrawnMicroBatch, shape: MicroBatchShape, plan: SlicePlan) -> MicroBatchInFlight:
        inputs = self._source.slice_inputs(drawn.inputs, shape, plan) if self._has_first else None
        labels, loss_fn = drawn.labels, self._engine.module.loss_fn
        size, rank = self._sequence.size, self._sequence.rank
        shares = SlicePlan(tuple(length // size for length in plan.lengths for _ in range(size)))
        weights = () if labels is None else weights_of(labels, shares, self._config, loss_fn)
        if labels is not None and not any(weights):
            logger.warning(
                "a micro-batch has no valid label at all: its loss and its gradients are zero (the mean over no labels "
                "has no value; stock loss functions give NaN here)"
            )
        own = tuple(weight * size for weight in weights[rank::size])  # the ranks are averaged, and have to be summed
        return MicroBatchInFlight(plan, shape, inputs, labels, own, weights)
