"""Process one batch after the other: draw it, open it for the actions of a stage, and close it or forget it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import GuardCapturedNames, guard_plain_attention
from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.config.combinations import compile_problems, recompute_problems
from terapipe_ds.messages import logger, show_value
from terapipe_ds.plan import PlanError, SlicePlan
from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.batch.loss_weights import SliceLossError, counts_of, weights_of
from terapipe_ds.runtime.batch.source import BatchSource, DrawnMicroBatch
from terapipe_ds.runtime.checkpoints.save import finish_decoupled
from terapipe_ds.runtime.engine.deepspeed_faults import right_norm, skips_nan
from terapipe_ds.runtime.engine.part_runner import PartRunner, Stage
from terapipe_ds.runtime.engine.refused_calls import (
    problem_of_checkpointing,
    problem_of_device_waits,
    problem_of_instructions,
    problem_of_split,
)
from terapipe_ds.runtime.engine.trace import named_range, names_ranges
from terapipe_ds.runtime.layers.compiled import layers_as_they_are
from terapipe_ds.runtime.layers.sliceable import ModelChanges, problem_of_layers
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import (
    complete_gradients,
    copies_may_differ,
    join_copies,
    problem_of_left_gradients,
    take_owners_weights,
    tied_may_differ,
)
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.planning.plans import Plans
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.verify import FirstBatchCheck
from terapipe_ds.schedule.action import Action, Kind
from terapipe_ds.schedule.show import many

CLOSING = (Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP)


class IncomingBatches:
    """Prepare the batches of one stage, up to the point where their actions can run."""

    def __init__(
        self,
        to_plan: StageToPlan,
        plans: Plans,
        stage: Stage,
        wires: Wires,
        verify_only: bool,
        guard_again: Callable[[], None],
    ) -> None:
        engine, layout = to_plan.engine, to_plan.layout
        self._engine, self._config, self._plans, self._layout = engine, to_plan.config, plans, layout
        self._stage, self._wires, self._verify_only = stage, wires, verify_only
        self._guard_again, self._world = guard_again, to_plan.groups.world
        self._has_first = any(place.is_first for place in layout.places(stage.stage_id))
        self._num_micro_batches = 0  # of the batch that is drawn
        self._problem_of_layers: str | None = None  # why layers of this stage cannot run slices that were set by hand
        self.announces_again = False  # set it on any rank, and all announce the shapes of their messages again
        self.evaluates_with = ""  # the arguments of `eval_batch` that must be equal on all ranks
        self._first_batch = FirstBatchCheck(to_plan, stage.watchdog.note)
        replica_ranks = engine.grid.get_data_parallel_rank(), engine.grid.get_slice_parallel_rank()
        self._changes, self._optimizer = ModelChanges(engine.module), _described(engine.basic_optimizer)
        self._source = BatchSource(
            self._config,
            self._next_batch,
            to_plan.groups.place(layout, stage.stage_id),
            layout,
            plans.cuts,
            to_plan.token_multiple,
            # the first part may be on any rank
            tells=layout.owner(0) == stage.stage_id and not any((*replica_ranks, stage.sequence.rank)),
            accept=self._check_inputs,
            look_at=self._first_batch.look_at_labels,
            check=self._check_options,
            require=plans.require,
            of_stage=self._settings_of_stage,
            model_change=lambda: max(self._changes.since_the_last_batch(), self.announces_again),
            when_changed=self._renew,
        )
        self._source.also_agree_on("slice_length_multiple", str(to_plan.token_multiple))
        layers = [getattr(layer, "check_inputs", None) for layer in engine.module.modules()]
        self._layers_checks = [check for check in layers if callable(check)]

    def _renew(self, is_new: bool) -> None:
        """Treat the next batch as the first one, because the model is another one on some rank."""
        # stages may hand on tensors that require gradients, where they did not before
        self._stage.links.forget_announced()
        if is_new:
            try:
                if self._layout.has_copies:
                    join_copies(self._engine.module, self._world)
            except TeraPipeConfigError as error:
                raise RaisedEverywhere(error) from None
            self._first_batch.renew()
            self._guard_again()
            self._stage.links.expect_new_kernels()  # gradients of weights that were frozen, for example

    def _check_inputs(self, inputs: Any, starts: Starts | None) -> None:
        """Let the module and its layers refuse the inputs of whole rows, before any slice runs."""
        for check in self._layers_checks:
            check(inputs, starts)

    def _next_batch(self) -> Any:
        """Return the next batch of the user's iterator, which may take longer than a wait for another rank."""
        with self._stage.watchdog.drawing():
            return self._engine._next_batch()

    def use_slice_plan(self, plan: SlicePlan | Sequence[SlicePlan], schedule: str | None) -> None:
        """Run sequences of that length with `plan`. At the next batch all ranks agree on it and on the layers."""
        wanted = self._config.model_copy(update={"schedule": schedule or self._config.schedule})
        of_layers = problem_of_split(self._engine.module, wanted.schedule)
        problem = next(filter(None, (of_layers, *compile_problems(wanted), *recompute_problems(wanted))), None)
        if problem is not None:
            raise PlanError(f"use_slice_plan: {problem}")
        could_cut, (module, has_moe) = self._plans.may_cut, (self._engine.module, self._engine.has_moe_layers)
        self._source.also_agree_on("slices set by hand:", self._plans.use(plan, schedule))
        self._problem_of_layers = problem_of_layers(module, self._config, has_moe, self._plans.may_cut)
        if self._plans.may_cut > could_cut:  # the first batches have shown what layers do with whole sequences
            self._guard_again()

    def next(self, num_micro_batches: int, training: bool) -> BatchInFlight:
        """Draw the next batch. A collective over all ranks; its errors are raised on each of them."""
        # draw, and agree with all ranks on the data
        engine, self._num_micro_batches = self._engine, num_micro_batches
        self._source.also_agree_on("global_steps", str(engine.global_steps))
        kind = torch.device(engine.device).type
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        self._source.also_agree_on("torch.autocast", autocast)
        self._source.also_agree_on("eval_batch with", None if training else self.evaluates_with)
        wants_logits = bool(engine.eval_return_logits or not engine._compute_loss)
        drawn, shapes = self._source.draw(num_micro_batches, training, engine._compute_loss, wants_logits)
        # every stage computes the same slices and the same schedule, which are kept for batches of these lengths
        choice, plans = self._plans.for_batch(drawn, shapes)
        schedule = self._plans.schedule(choice.schedule, training, tuple(plan.num_slices for plan in plans))
        scales = self._scales(drawn)
        of_each = zip(drawn, shapes, plans, scales, strict=True)
        micro_batches = [self._in_flight(*each) for each in of_each]
        # the prediction holds for a step that runs as planned
        is_planned = training and len(shapes) == engine.micro_batches and schedule.name == choice.schedule
        is_planned = is_planned and {shape.length for shape in shapes} == {choice.sequence_length}
        predicted = choice.predicted if is_planned else None
        batch = BatchInFlight(schedule, self._stage.stage_id, training, micro_batches, predicted=predicted)
        # this returns at once unless the batch shows something that was not checked yet
        self._first_batch.run(batch, engine._compute_loss, self._verify_only)
        self._changes.batch_came()
        self.announces_again = False
        return batch

    def _check_options(self) -> None:
        """Refuse what a program has switched on or replaced since the last batch, in DeepSpeed or the environment."""
        module = self._engine.module
        # a program has set it by hand, and DeepSpeed would run no layer at all
        if module.activation_checkpoint_interval not in (0, module.is_checkpointable_results_interval):
            module.set_checkpoint_interval(module.activation_checkpoint_interval)
        problem = (
            problem_of_checkpointing(self._config.is_stock_order and not self._plans.may_cut)
            or problem_of_device_waits(self._wires.post_on_device)
            or problem_of_instructions(self._engine)
            or self._problem_of_layers
            or self._problem_of_label_counts()
        )
        if module.training:
            problem = problem or problem_of_left_gradients(module, self._layout, self._engine.optimizer)
        if problem is not None:
            raise TeraPipeConfigError(problem)

    def _settings_of_stage(self) -> str:
        """Return the settings that a program may change on one rank alone: replicas would train apart, or hang."""
        groups = getattr(self._engine.optimizer, "param_groups", ())
        rates = [f"{rate:.6g}" for group in groups if isinstance(rate := group.get("lr"), int | float)]
        is_counted = self._config.loss_reduction != "mean_of_step" or self._engine.step_label_counts is None
        settings = f"{many(self._changes.num_trained, 'trained parameter')}, learning rates [{', '.join(rates)}]"
        return settings + self._optimizer + ("" if is_counted else ", with step_label_counts")

    def _problem_of_label_counts(self) -> str | None:
        """Return what is wrong with `engine.step_label_counts`, which a program sets before each batch."""
        counts, number = self._engine.step_label_counts, self._num_micro_batches
        if self._config.loss_reduction != "mean_of_step" or counts is None:
            return None
        if len(counts) == number and all(0.0 <= count < math.inf for count in counts):
            return None
        return (
            f'engine.step_label_counts = {show_value(list(counts))}: with loss_reduction "mean_of_step" it must have '
            f"one finite count for each of the {number} micro-batches of the next batch, or be None, so that the "
            "engine counts labels itself"
        )

    def _scales(self, drawn: Sequence[DrawnMicroBatch]) -> list[float]:
        """Return the factor of each micro-batch's mean loss: 1.0, unless the labels of a step weigh alike.

        DeepSpeed divides by micro-batches and replicas, so the factor multiplies by both. A collective over the
        replicas of a stage with labels.
        """
        engine, replicas = self._engine, self._engine.grid.get_data_parallel_world_size()
        if self._config.loss_reduction != "mean_of_step" or not all(each.labels is not None for each in drawn):
            return [1.0] * len(drawn)
        counts = [counts_of(each.labels, self._config, engine.module.loss_fn) for each in drawn]
        divisors = engine.step_label_counts
        if divisors is None:
            total = torch.tensor(sum(counts), dtype=torch.float64, device=engine.device)
            if replicas > 1:
                torch_dist.all_reduce(total, group=engine.grid.get_data_parallel_group())
            divisors = [float(total)] * len(drawn)
        shares = zip(counts, divisors, strict=True)
        return [count * len(drawn) * replicas / (divisor or 1.0) for count, divisor in shares]

    def _in_flight(
        self, drawn: DrawnMicroBatch, shape: MicroBatchShape, plan: SlicePlan, scale: float
    ) -> MicroBatchInFlight:
        inputs = self._source.slice_inputs(drawn.inputs, shape, plan) if self._has_first else None
        labels, loss_fn = drawn.labels, self._engine.module.loss_fn
        size, rank = self._stage.sequence.size, self._stage.sequence.rank
        shares = plan.divided(size)
        weights = () if labels is None else weights_of(labels, shares, self._config, loss_fn)
        if labels is not None and not any(weights):
            logger.warning(
                "a micro-batch has no valid label at all: its loss and its gradients are zero (the mean over no labels "
                "has no value; stock loss functions give NaN here)"
            )
        weights = tuple(weight * scale for weight in weights) if scale != 1.0 else weights
        own = tuple(weight * size for weight in weights[rank::size])  # DeepSpeed then divides by the sequence ranks
        return MicroBatchInFlight(plan, shape, inputs, labels, own, weights)


def _described(optimizer: Any) -> str:
    """Return the class and the settings of an optimizer that a program may have made. Its steps may change some."""
    plain = (int, float, str, tuple, type(None))
    groups = [
        {key: value for key, value in sorted(group.items()) if key != "lr" and isinstance(value, plain)}
        for group in getattr(optimizer, "param_groups", ())
    ]
    return f", {type(optimizer).__name__} with {groups}"


class OpenBatch:
    """Hold the batch of one stage, or none."""

    def __init__(self, stage: Stage, parts: Sequence[PartRunner], intercept: bool) -> None:
        self._stage, self._parts, self._intercept = stage, parts, intercept
        self._batch: BatchInFlight | None = None
        self.is_observed = False  # the actions of the batch are named, traced or timed, or their operations counted
        self._names_ranges = False
        self._modes_run: set[bool] = set()  # a training (True) or an evaluation has run under the closer guard

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
        """Name, trace, count or time `action`, if any observer needs it."""
        stage = self._stage
        counting = nullcontext() if stage.flops is None else stage.flops.around(action)
        timing = stage.own_time.around(action) if stage.own_time.is_on else nullcontext()
        naming = named_range(action) if self._names_ranges else nullcontext()
        with naming, stage.tracer.measure(action), counting, timing:
            yield

    def guard_again(self) -> None:
        """Run the next batch of each mode under the closer guard, and see anew which layers work in place."""
        self._modes_run.clear()
        for part in self._parts:
            part.handed.renew()

    def begin(self, batch: BatchInFlight, step: int) -> None:
        """Begin `batch`, whose training step is `step`, counted from 1."""
        stage = self._stage
        # each collaborator drops the previous batch and gets this one
        stage.deepspeed.open_batch()  # `_set` reads from it whether layers are checkpointed
        if batch.training and stage.weight_gradients.sums is not None:
            stage.weight_gradients.sums.begin()
        self._set(batch)
        stage.links.open_batch(batch)
        stage.tracer.begin(step if batch.training else None)
        if stage.flops is not None:
            shape = batch.micro_batches[0].shape
            stage.flops.open_batch(batch.training, shape.rows * shape.length)
        stage.own_time.open_batch(batch.training)
        self._names_ranges = names_ranges()
        listens = getattr(stage.tracer, "listens", True)  # of a tracer of the user's own
        self.is_observed = stage.flops is not None or stage.own_time.is_on or listens or self._names_ranges

    @contextmanager
    def running(self) -> Iterator[None]:
        """Intercept or refuse plain attention in the actions of the batch, and look for numbers that are not finite.

        Nothing is compiled in the first batch: its closer guard cannot see operations inside a compiled graph.
        """
        finite, training = self._stage.finite, self.current.training
        is_first = self.is_first_of_its_mode
        captured, plain = (GuardCapturedNames(), layers_as_they_are()) if is_first else (nullcontext(), nullcontext())
        watching = finite.watching() if finite is not None and training else nullcontext()
        with guard_plain_attention(self._intercept), captured, plain, watching, self._stage.links.plans_kept():
            yield
        self._modes_run.add(training)

    def close(self, peak_live_slices: int, step: int) -> None:
        """Close the batch, and check that nothing of it is left anywhere."""
        stage, batch = self._stage, self.current
        # sends are complete, no weight gradient is left, and no slice is live
        stage.links.close_batch()
        stage.weight_gradients.assert_done()
        for part in self._parts:
            part.close_batch()
        if batch.training:
            stage.deepspeed.close_batch(stage.stage_id)
        batch.assert_done(peak_live_slices)
        stage.store.assert_drained()
        stage.own_time.close_batch()
        self._set(None)
        stage.tracer.write(step)

    def forget(self) -> None:
        """Drop the batch after an error, as if it had never begun."""
        self._set(None)
        self._stage.own_time.close_batch()
        self._stage.store.reset()

    def _set(self, batch: BatchInFlight | None) -> None:
        self._batch = batch
        if batch is None:
            self._stage.weight_gradients.open_batch()
        else:
            groups = batch.weight_groups(self._stage.sequence.size)
            if not self._stage.weight_gradients.joins_unsplit(self._stage.deepspeed.checkpoints):
                groups = [group for group in groups if group <= batch.split]
            self._stage.weight_gradients.open_batch(batch.split, groups)
        self._stage.results.begin(batch)
        if self._stage.offload is not None:
            self._stage.offload.open_batch(batch)
        for part in self._parts:
            part.open_batch(batch)


class BatchEnd:
    """Act before and after DeepSpeed sums gradients and steps the optimizer, once per training batch."""

    def __init__(self, engine: PipelineEngine, layout: Layout, stage: Stage) -> None:
        self._engine, self._layout, self._stage = engine, layout, stage
        self._had_nan = False  # a loss of the previous training batch was NaN

    def before_sums(self) -> None:
        """Refuse losses of NaN, let ranks agree that all is finite, and run the module's own hook `before_reduce`.

        The host reads the loss here, because no receive is pending that would have to wait for the host.
        """
        engine, stage = self._engine, self._stage
        if stage.finite is not None:
            with stage.watchdog.waiting("the check of all ranks for numbers that are not finite"):
                stage.links.close_batch()  # a caller may go on after the error
                stage.finite.agree(engine.global_steps + 1)
        if stage.results.problem is not None:
            raise SliceLossError(stage.results.problem)
        self._refuse_losses_of_nan(engine.global_steps + 1)
        # each copy of a part has seen other micro-batches
        if self._layout.has_copies:
            complete_gradients(engine.module, engine.optimizer)
        before_reduce = getattr(engine.module, "before_reduce", None)
        if before_reduce is not None:
            before_reduce(engine)

    def _refuse_losses_of_nan(self, step: int) -> None:
        """Raise an error for a loss of NaN; warn where DeepSpeed skips the step.

        A loss scale does not affect a loss. So NaN is an error even there if `loss_fn` makes it of finite outputs, or
        if it comes in two successive steps: DeepSpeed would skip all steps without a warning.
        """
        had_nan, found = self._had_nan, self._stage.results.loss_of_nan()
        self._had_nan = found is not None
        if found is None:
            return
        if had_nan or found.is_of_loss_fn or not skips_nan(self._engine):
            again = ". The step before had such a loss as well" if had_nan else ""
            raise SliceLossError(f"step {step}: {found.problem}{again}. Nothing was updated in this step")
        logger.warning("step %d: %s. DeepSpeed skips this step; the next one with NaN is an error", step, found.problem)

    def step(self, step: Callable[[], None]) -> None:
        """Let the optimizer step, by the right norm; then copies of weights that it may update apart are equal."""
        if self._stage.flops is not None:
            self._stage.flops.report()
        finish_decoupled(self._engine)
        with right_norm(self._engine):
            step()
        if copies_may_differ(self._layout, self._engine.basic_optimizer, self._engine.dp_world_size):
            take_owners_weights(self._engine.module)
        elif not self._layout.has_copies and tied_may_differ(self._engine.module, self._engine.basic_optimizer):
            with torch.no_grad():
                self._engine.module._synchronize_tied_weights()
