"""TeraPipeEngine: DeepSpeed's pipeline engine, whose unit of work is a slice of tokens.

DeepSpeed keeps owning the optimizer, the loss scale, clipping, ZeRO-1, tied gradients, checkpoints, monitors and
timers; this engine draws the data, picks the schedule and executes its actions. To DeepSpeed a slice looks like one
more micro-batch that is accumulated: one ``forward``, one ``backward``. Reduction and step come once per batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER, PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.attention import SliceStore
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.agreement import ErrorsUnwrapped, refuse_everywhere
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.batch.loss import slice_weights
from terapipe_ds.runtime.batch.sliceable import SliceableTensors
from terapipe_ds.runtime.batch.source import BatchSource, DrawnMicroBatch
from terapipe_ds.runtime.checkpoints.compatibility import warn_of_checkpoints
from terapipe_ds.runtime.checkpoints.engine_methods import SafeCheckpoints
from terapipe_ds.runtime.engine.batch_end import CLOSING, ClosingOfBatches
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.deepspeed_faults import (
    count_every_stage_in_norm,
    count_nothing_as_zero,
    tell_of_clipping,
)
from terapipe_ds.runtime.engine.first_and_last_part import StageEnds
from terapipe_ds.runtime.engine.open_batch import OpenBatch
from terapipe_ds.runtime.engine.own_time import own_seconds
from terapipe_ds.runtime.engine.part_runner import PartRunner
from terapipe_ds.runtime.engine.stage import DeepSpeedCalls, Stage
from terapipe_ds.runtime.engine.trace import ActionTracer, Tracer
from terapipe_ds.runtime.failures.trials import Trials
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.finite import finite_check
from terapipe_ds.runtime.layers.flops import stage_flops
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from terapipe_ds.runtime.layout.cut_module import lay_out
from terapipe_ds.runtime.layout.layout import Place
from terapipe_ds.runtime.layout.parted_module import activate
from terapipe_ds.runtime.layout.tied_and_copied import problem_of_copies
from terapipe_ds.runtime.links.groups import make_pipeline_groups
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.runtime.links.staging import neighbours_staged
from terapipe_ds.runtime.log import show_log
from terapipe_ds.runtime.planning.auto_planner import require_profile
from terapipe_ds.runtime.planning.batch_plans import Plans
from terapipe_ds.runtime.planning.choose_layout import first_layout
from terapipe_ds.runtime.refusals import (
    check_batch_options,
    check_checkpointing,
    check_compile_call,
    check_eval_call,
    check_train_call,
    problem_of_device_waits,
    problem_of_given_slices,
    problem_of_layers,
    slice_length_multiple,
    with_multiple,
)
from terapipe_ds.runtime.verify import FirstBatchCheck, StageToCheck, TensorRanks
from terapipe_ds.schedule.action import Action, Kind

logger = logging.getLogger("terapipe_ds")


def _on_its_part(run: Callable[[PartRunner, Action], None]) -> Callable[[TeraPipeEngine, Action], None]:
    """``run`` as a method of the engine: the part that stands at the action's chunk does it."""

    def execute(engine: TeraPipeEngine, action: Action) -> None:
        part = engine._parts[action.chunk_id]
        engine._place = part.place
        activate(engine.module, action.chunk_id)
        run(part, action)

    return execute


class TeraPipeEngine(StageEnds, ClosingOfBatches, SafeCheckpoints):
    """Built by ``deepspeed.initialize`` for a ``PipelineModule`` whose config has an enabled ``terapipe`` section.

    Everything that DeepSpeed's ``PipelineEngine`` offers is here with the same arguments and results: ``train_batch``,
    ``eval_batch``, ``save_checkpoint``, ``load_checkpoint``, ``set_train_batch_size`` and the rest.
    """

    verify_only: bool = False  # the first batch is checked and then the process ends
    slice_clock: Callable[[], float] | None = None  # by which slices are measured for a plan; None: the wall clock

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.terapipe_config = TeraPipeConfig.from_deepspeed(dict(kwargs["config_class"]._param_dict))
        self.slice_length_multiple = slice_length_multiple(kwargs.get("model"))
        self._place: Place | None = None  # of the part that runs now
        given = kwargs["model"], kwargs.get("model_parameters"), kwargs.get("optimizer")
        self._layout, chosen = first_layout(self.terapipe_config, kwargs["config_class"]._param_dict, *given)
        kwargs["model_parameters"] = lay_out(kwargs["model"], self._layout, chosen, kwargs.get("optimizer"))
        with neighbours_staged():
            super().__init__(*args, **kwargs)
        show_log(self.global_rank)
        check_checkpointing(self.terapipe_config.is_stock_order)
        problem = problem_of_given_slices(self.terapipe_config, self.slice_length_multiple)
        problem = problem or problem_of_copies(self._layout, self.optimizer)
        refuse_everywhere(problem_of_layers(self) or problem)
        self.terapipe_config = with_multiple(self.terapipe_config, self.slice_length_multiple, self.global_rank)
        self._groups = make_pipeline_groups(self.grid, self._layout)
        require_profile(self, self._groups)
        self._wires = self._groups.connect(self._layout, self.stage_id, torch.device(self.device))
        refuse_everywhere(problem_of_device_waits(self._wires.post_on_device))
        announce_each = self.module.dynamic_shape and self.terapipe_config.is_stock_order
        self._links = StageLinks(self._wires, self._layout, self.stage_id, announce_each)
        self._source = BatchSource(
            self.terapipe_config,
            self._next_batch,
            self._groups.place(self._layout, self.stage_id),
            self.slice_length_multiple,
            self._layout,
            is_cut=lambda length: self._plans.cuts(length),
            tells=self._tells_of_inputs(),
            check=self._check_options,
            look_at=lambda labels: self._first_batch.look_at_labels(labels),
        )
        self._source.also_agree_on("slice_length_multiple", str(self.slice_length_multiple))
        self._store = SliceStore()
        self._watchdog = Watchdog(
            self.global_rank,
            self.stage_id,
            self.terapipe_config.stall_timeout_s,
            asynchronous=not get_accelerator().is_synchronized_device(),
            trace_dir=self.terapipe_config.trace_dir,
        )
        self._links.waiting = self._watchdog.waiting
        self._plans = Plans(self, self._groups, self._watchdog.note)
        self._first_batch = FirstBatchCheck(self._stage_to_check())
        self.weight_gradients = accumulate_in_products(self.module, self.optimizer)
        self._stage = Stage(
            self.stage_id,
            DeepSpeedCalls(self),
            self._links,
            self._store,
            self._watchdog,
            self.weight_gradients,
            BatchResults(self, self.terapipe_config.sequence_dim),
            Tracer(self.terapipe_config.trace_dir, self.global_rank, self.stage_id, self.num_stages),
        )
        self._parts = tuple(PartRunner(self._stage, place) for place in self._layout.places(self.stage_id))  # by chunk
        self._batch = OpenBatch(self._stage, self._parts)
        count_every_stage_in_norm(self.module, self.grid)
        count_nothing_as_zero(self.optimizer)
        self._stage.flops = self._flops = stage_flops(self)
        self._stage.finite = self._finite = finite_check(
            self, self.terapipe_config.check_finite == "every_step", self._store, self._groups.world
        )
        warn_of_checkpoints(self)

    def _stage_to_check(self) -> StageToCheck:
        return StageToCheck(
            self.module,
            self.terapipe_config,
            self._layout,
            self._groups,
            self.stage_id,
            torch.device(self.device),
            self.slice_length_multiple,
            TensorRanks.of(self.grid, Trials.of(self)),
            autocast=partial(autocast_if_enabled, self),
            weights_of_slices=self.weights_of_slices,
            cast_input=self._cast_inputs_half if self.fp16_auto_cast() else lambda tensor: tensor,
            note=self._watchdog.note,
        )

    # -- what a user calls ------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """One optimizer step over ``gradient_accumulation_steps`` micro-batches, each run in slices.

        Same arguments and result as DeepSpeed's; StopIteration and errors in the data are raised on every stage.
        """
        check_train_call()
        with ErrorsUnwrapped(), self._guarded():
            return super().train_batch(data_iter)

    def own_seconds(self, is_last: bool, between: Callable[[], object], share: float) -> tuple[float, float]:
        """Return what the engine itself takes of an F and of a B, in seconds; the arguments are those of `own_time`."""
        return own_seconds(self, is_last, between, share, self.slice_clock)

    def reset_activation_shape(self) -> None:
        """Let stages hand on other shapes from the next batch on. As with DeepSpeed's, every rank must call."""
        super().reset_activation_shape()
        self._links.forget_announced()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's ``compile``, where sequences are whole.

        Raises:
            TeraPipeConfigError: they are cut in slices.
        """
        check_compile_call(self.terapipe_config)
        super().compile(*args, **kwargs)

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate in slices; same arguments and result as DeepSpeed's ``eval_batch``.

        Logits are there on the last stage only, and of each tensor-parallel rank as its layers give them: its part of
        the vocabulary, where the head is divided.
        """
        check_eval_call(data_iter, *args, **kwargs)
        training_iterator = self.data_iterator
        try:
            with ErrorsUnwrapped(), self._guarded():
                return super().eval_batch(data_iter, *args, **kwargs)
        finally:  # also after an error, so that a caller who goes on does not train on the evaluation data
            self.set_dataiterator(training_iterator)

    def slice_plan(self, sequence_length: int) -> SlicePlan:
        """The slices of a sequence of ``sequence_length`` tokens; kept per length.

        Raises:
            ValueError: with ``"slices": "auto"``, before a batch with sequences of that length has come.
        """
        return self._plans.plan(sequence_length)

    def use_slice_plan(self, plan: SlicePlan, schedule: str | None = None) -> None:
        """From the next batch on, run sequences of ``plan.sequence_length`` tokens with this plan.

        Every rank must make the same call between the same batches; a rank that does not is an error on all. For
        tuning by hand and for benchmarks: what is planned or configured for other lengths stays as it is.

        Args:
            schedule: the name of a schedule as well; None keeps the one that the config names.

        Raises:
            PlanError: slices that are no multiples of the module's ``slice_length_multiple``.
        """
        self._source.also_agree_on("slices set by hand:", self._plans.use(plan, schedule))

    def destroy(self) -> None:
        """Stop the watch-dog and drop keys and values, then let DeepSpeed give back what it holds."""
        watchdog = getattr(self, "_watchdog", None)
        if watchdog is not None:
            watchdog.close()
        super().destroy()

    @property
    def slice_store(self) -> SliceStore:
        """Where keys, values and their gradients are kept."""
        return self._store

    @property
    def tracer(self) -> ActionTracer:
        """What is told of each computation of this rank; a benchmark may put one of its own here."""
        return self._stage.tracer

    @tracer.setter
    def tracer(self, tracer: ActionTracer) -> None:
        self._stage.tracer = tracer

    # -- a batch -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around a batch: no stage is left waiting for one that failed, and no state of a failed batch stays."""
        try:
            with self._watchdog.batch():
                yield
        except BaseException:
            self._forget_batch()
            raise

    def _forget_batch(self) -> None:
        """After an error: a caller who goes on (the data was at its end) trains as if nothing had begun."""
        if self._batch.is_training and self.optimizer is not None:
            self.optimizer.zero_grad()
            self.zero_grad()
        self._batch.forget()
        self.eval_return_logits = False
        for timer in self.timers.get_timers().values():
            if timer.started_:
                timer.stop()

    def _train_schedule(self) -> Any:
        return self._open_batch(self.micro_batches, training=True)

    def _inference_schedule(self, micro_batches: int) -> Any:
        return self._open_batch(micro_batches, training=False)

    def _open_batch(self, num_micro_batches: int, training: bool) -> Any:
        """Draw the data, agree on its shape, and make ready what the actions of this batch work on."""
        drawn, shapes = self._source.draw(num_micro_batches, training, needs_labels=self._compute_loss)
        name, plans = self._plans.for_batch(drawn, shapes)
        schedule = self._plans.schedule(name, training, tuple(plan.num_slices for plan in plans))
        micro_batches = [self._in_flight(d, shape, plan) for d, shape, plan in zip(drawn, shapes, plans, strict=True)]
        self._first_batch.run(micro_batches, training, self._compute_loss, self.verify_only)
        self._batch.open(BatchInFlight(schedule, self.stage_id, training, micro_batches), self.global_steps + 1)
        self.closing_s = 0.0
        return schedule.for_stage(self.stage_id)

    def _check_options(self) -> None:
        """Of DeepSpeed and of the environment, before each batch."""
        in_stock_order = self.terapipe_config.is_stock_order and not self._plans.cut_by_hand
        check_batch_options(in_stock_order, self._wires.post_on_device)

    def _in_flight(self, drawn: DrawnMicroBatch, shape: MicroBatchShape, plan: SlicePlan) -> MicroBatchInFlight:
        inputs = labels = None
        weights: tuple[float, ...] = ()
        if any(part.place.is_first for part in self._parts):
            inputs = self._source.slice_inputs(drawn.inputs, shape, plan)
        if any(part.place.is_last for part in self._parts):
            labels = drawn.labels
            assert labels is not None
            weights = self.weights_of_slices(labels, plan)
        return MicroBatchInFlight(plan, shape, inputs, labels, weights)

    def _tells_of_inputs(self) -> bool:
        """Whether this is the one rank that logs what of the inputs is cut: the first part need not be on rank 0."""
        ranks = self.grid.get_data_parallel_rank(), self.grid.get_slice_parallel_rank()
        return self._layout.owner(0) == self.stage_id and not any(ranks)

    def weights_of_slices(self, labels: SliceableTensors, plan: SlicePlan) -> tuple[float, ...]:
        """Of their losses, on a stage that has the labels."""
        config = self.terapipe_config
        return slice_weights(
            labels,
            plan,
            loss_reduction=config.loss_reduction,
            ignore_index=config.ignore_index,
            slice_weight=getattr(self.module.loss_fn, "slice_weight", None),
        )

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """DeepSpeed's loop over the actions, then the check that the books of this batch are closed."""
        if self._batch.is_training and self._batch.is_first_of_its_mode:
            tell_of_clipping(self)
        with self._batch.running():
            super()._exec_schedule(pipe_schedule)
        self._batch.close(pipe_schedule.peak_live_slices, self.global_steps)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _exec_action(self, action: Action) -> None:
        """Execute one action of the schedule."""
        self._watchdog.note(action)
        counted = self._flops.around(action) if self._flops is not None else nullcontext()
        timed = self._timed_closing() if action.kind in CLOSING else nullcontext()
        with self._stage.tracer.measure(action), counted, timed:
            self._ACTIONS[action.kind](self, action)

    def _load(self, action: Action) -> None:
        """Bring a micro-batch to the device."""
        micro_batch = self._batch.current.micro_batches[action.micro_batch_id]
        with self._stage.deepspeed.timed(BATCH_INPUT_TIMER):
            if micro_batch.inputs is not None:
                micro_batch.inputs = micro_batch.inputs.to(self.device)
            if micro_batch.labels is not None:
                micro_batch.labels = micro_batch.labels.to(self.device)

    _ACTIONS = {
        Kind.LOAD: _load,
        Kind.RECV_ACTIVATION: _on_its_part(PartRunner.post_activation),
        Kind.FORWARD: _on_its_part(PartRunner.forward),
        Kind.SEND_ACTIVATION: _on_its_part(PartRunner.send_activation),
        Kind.RECV_GRAD: _on_its_part(PartRunner.post_gradients),
        Kind.BACKWARD: _on_its_part(PartRunner.backward),
        Kind.WEIGHT: _on_its_part(PartRunner.weight),
        Kind.SEND_GRAD: _on_its_part(PartRunner.send_gradients),
        Kind.REDUCE_TIED_GRADS: ClosingOfBatches._reduce_tied_grads,
        Kind.REDUCE_GRADS: lambda self, action: self._exec_reduce_grads(),
        Kind.OPTIMIZER_STEP: ClosingOfBatches._optimizer_step,
    }
    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, Action: _exec_action}
