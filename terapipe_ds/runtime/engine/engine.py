"""Make a slice of tokens the unit of work of DeepSpeed's pipeline engine.

DeepSpeed still owns the optimizer, the loss scale, clipping, ZeRO-1, checkpoints, monitors and timers. This engine
draws the data, picks the schedule and executes its actions. To DeepSpeed a slice looks like one more micro-batch of
gradient accumulation. Reduction and step come once per batch.

A stage holds one or more parts of the layers; a chunk numbers them on their stage. F is the forward of a slice through
a part, B its backward, and W the products of its weight gradients, where a schedule runs them apart from B.

DeepSpeed's `train_batch` (`runtime/pipe/engine.py`) calls three methods, in this order:

1. `_train_schedule` draws the micro-batches. All ranks agree on their shapes, so that every stage computes the same
   slices and the same schedule. A program may have set the slices for a length; otherwise a plan by measured costs
   gives them, or the config. The longest micro-batch decides the schedule. The schedule lowers its order for this stage
   to actions: computations, messages, and at the end the sums of tied and replicated gradients and the optimizer's
   step.
2. `_exec_schedule` executes the actions. F, B and W go to the `PartRunner` of their chunk, messages to `StageLinks`.
   Attention appends the keys and values of a slice to those of earlier slices (`attention.slice_store`). The Bs of a
   micro-batch run from its last slice to its first, and add to the gradients of earlier keys and values. When the B
   of a slice runs, all later slices have added to the gradients of its own keys and values. The last part weighs the
   loss of each slice by its share of the labels. Linear layers compute their weight gradients themselves, outside of
   autograd, and add them to the optimizer's sums in one pass (`layers.weight_gradients`).
3. `_aggregate_total_loss` averages the losses over micro-batches and data-parallel ranks, and every rank gets the mean
   (`model_ends`). Then `StepReport.tell` gathers the times of the stages for the monitors, and logs after 20 steps.

An error on which the ranks agree (`agreement`) is raised on all of them; training can go on with the next batch. After
any other error the rank publishes its reason and raises. Threads of the other ranks print it and end their processes
(`failures.watchdog`).

Seven more files show a batch from its data to the step and its loss. All others serve details, checks and options.

- `runtime/engine/batches.py`: draw a batch, open it, close it, and forget it after an error.
- `runtime/batch/source.py`: the user's batch as micro-batches of tensors, on which all ranks agree.
- `runtime/planning/plans.py`: the slices of each micro-batch, and the schedule.
- `schedule/schedule.py`: how the order of a stage, which `schedule.build` makes, becomes actions (`lower_stage`).
- `runtime/engine/part_runner.py`: F, B and W of a part, and its sends.
- `runtime/links/stage_links.py`: messages between stages.
- `runtime/engine/batch_results.py`: the losses of slices, and their sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER

import terapipe_ds.runtime.engine.deepspeed_faults as faults
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.agreement import ErrorsUnwrapped, refuse_in_batch
from terapipe_ds.runtime.batch.loss_weights import SliceLossError
from terapipe_ds.runtime.checkpoints.engine_methods import LoadOptions, SafeCheckpoints, warn_of_checkpoints
from terapipe_ds.runtime.engine.batches import CLOSING, BatchEnd, IncomingBatches, OpenBatch
from terapipe_ds.runtime.engine.build import EngineSetup, build_stage, give_back
from terapipe_ds.runtime.engine.model_ends import ModelEndsEngine
from terapipe_ds.runtime.engine.part_runner import PartRunner
from terapipe_ds.runtime.engine.refused_calls import check_eval_call
from terapipe_ds.runtime.engine.step_report import StepReport
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.engine.trained_parameters import pass_over_absent
from terapipe_ds.runtime.layers.sliceable import OutsideLayers, WrittenParameters, check_compile_call
from terapipe_ds.runtime.layout.parted_module import activate
from terapipe_ds.runtime.layout.tied_and_copied import Gradients, problem_of_tied_gradients, sum_gradients
from terapipe_ds.runtime.links.choose_formats import packed_wires
from terapipe_ds.runtime.links.groups import make_pipeline_groups
from terapipe_ds.runtime.links.staging import neighbours_staged
from terapipe_ds.runtime.planning.plans import Plans
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.profiling.profiles import require_profile
from terapipe_ds.schedule.action import Action, Kind

_WITH_GROUPS = (
    "_groups", "_wires", "_stage", "_plans", "_incoming", "_parts", "_batch", "_batch_end", "_steps", "_checkpoints",
    "slice_store", "weight_gradients",
)  # fmt: skip


def _on_its_part(run: Callable[[PartRunner, Action], None]) -> Callable[[TeraPipeEngine, Action], None]:
    """Return `run` as a method of the engine, which calls it for the part at the action's chunk."""

    def execute(self: TeraPipeEngine, action: Action) -> None:
        part = self._parts[action.chunk_id]
        if self._place is not part.place:
            self._place = part.place
            activate(self.module, action.chunk_id)
        run(part, action)

    return execute


class TeraPipeEngine(ModelEndsEngine):
    """Train a `PipelineModule` in slices. `deepspeed.initialize` builds it if the `terapipe` section is enabled.

    It offers everything that DeepSpeed's `PipelineEngine` offers, with the same arguments and results: `train_batch`,
    `eval_batch`, `save_checkpoint`, `load_checkpoint`, `set_train_batch_size` and the rest. `ModelEndsEngine` changes
    where DeepSpeed finds losses and divides them by the micro-batches, how it sums losses and gradients over ranks, and
    saves a loss module; never the course of a batch.
    """

    reads_terapipe_section = True  # `compat.unread_section` reads it
    closing_s = 0.0  # that sums of gradients and optimizer took in the last batch, on this rank
    slice_clock: Callable[[], float] | None = None  # times slices for a plan; None: the wall clock
    # by micro-batch of the next batch, the labels that its loss is divided by under "mean_of_step"; None: counted here
    step_label_counts: Sequence[float] | None = None
    _written: WrittenParameters | None = None  # only in the first training batch, as `_outside`
    _outside: OutsideLayers | None = None
    _deepcompile_z3_eager_fallback: Any = None  # DeepSpeed asks for it in each forward; a search of the module is slow
    fwd_outputs: list[Any]  # DeepSpeed's, like those that follow
    total_loss: Any
    total_additional_losses: Any

    def __init__(self, *args: Any, verify_only: bool = False, **kwargs: Any) -> None:
        """Build DeepSpeed's engine, and then its collaborators here. The order matters.

        The layers move before DeepSpeed reads the module. The engine refuses configs before it makes groups, and a
        wrong profile before it makes links. A stage has its watch-dog before slices are planned, measured and checked.
        With `verify_only` the engine checks the first batch, and then the process ends.
        """
        # lay out the layers and settle the config
        setup = EngineSetup.of(kwargs)
        self.terapipe_config, self._layout = setup.config, setup.layout
        self.slice_length_multiple, self._sequence = setup.slice_length_multiple, setup.sequence
        self.own_time = setup.own_time
        with neighbours_staged(), faults.monitors_agreed():
            by_setup = {"model_parameters": setup.parameters, "optimizer": setup.optimizer}
            super().__init__(*args, **{**kwargs, **by_setup})
        # connect the stages
        setup.refuse(self)
        self._groups = groups = make_pipeline_groups(self.grid, self._layout)
        to_plan = StageToPlan(self, self.terapipe_config, self._layout, groups, self.slice_length_multiple)
        require_profile(to_plan)
        wires = groups.connect(self._layout, self.stage_id, torch.device(self.device))
        # build the objects that the actions work with, then those that draw batches for them
        self._wires = packed_wires(wires, self.terapipe_config, self._layout)
        self._stage = stage = build_stage(self, setup, groups, self._wires)
        self.slice_store, self.weight_gradients = stage.store, stage.weight_gradients
        groups.leave_hangs_to_watchdog()
        self._plans = Plans(to_plan, self._wires, stage.watchdog.note)
        self._parts = tuple(PartRunner(stage, place) for place in self._layout.places(self.stage_id))  # by chunk
        self._batch = OpenBatch(stage, self._parts, self.terapipe_config.attention == "intercept")
        again = self._batch.guard_again
        self._incoming = IncomingBatches(to_plan, self._plans, stage, self._wires, verify_only, again)
        self._batch_end = BatchEnd(self, self._layout, stage)
        # reports and checkpoints come last, because they use all other objects
        self._steps = StepReport(self, stage, groups, self.terapipe_config)
        allow_pickle = self.terapipe_config.checkpoints.allow_pickle
        self._checkpoints = SafeCheckpoints(self, self._layout, groups.world, self._plans, stage.watchdog, allow_pickle)
        warn_of_checkpoints(self)
        self._is_built = True

    # -- methods for users ------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Run one optimizer step, each micro-batch in slices. Return the mean loss, on every rank.

        Errors in the data are raised on every stage.
        """
        if not torch.is_grad_enabled():  # refused as in DeepSpeed, but before the batch: a caller may go on
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        self._checkpoints.refuse_half_loaded()
        with ErrorsUnwrapped(), self._guarded():
            begin_s = time.perf_counter()
            loss = super().train_batch(data_iter)
            self._steps.tell(time.perf_counter() - begin_s)
            return loss

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate in slices. Only the last stage returns logits: each rank returns the logits of its own layers.

        If tensor parallelism divides the head, these logits cover a part of the vocabulary.
        """
        training_iterator, is_monitored = self.data_iterator, self.monitor.enabled
        returns_each_loss, has_loss, passed = check_eval_call(is_monitored, data_iter, *args, **kwargs)
        self._checkpoints.refuse_half_loaded()
        try:
            with ErrorsUnwrapped(), self._guarded():
                self._stage.results.returns_each_loss, self._incoming.evaluates_with = returns_each_loss, passed
                self.monitor.enabled = is_monitored and has_loss  # DeepSpeed fails for logits, or calls them a loss
                return super().eval_batch(data_iter, *args, **kwargs)
        finally:  # also after an error, so that a caller who goes on does not train on the evaluation data
            self.monitor.enabled = is_monitored
            self.set_dataiterator(training_iterator)

    def reset_activation_shape(self) -> None:
        """Allow stages to send other shapes from the next batch on; it is enough that one rank calls this."""
        super().reset_activation_shape()
        self._incoming.announces_again = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as DeepSpeed does, if sequences are whole. Raises TeraPipeConfigError if they are cut."""
        check_compile_call(self._plans.may_cut)
        super().compile(*args, **kwargs)

    def autotp_size(self) -> int:
        """Return 1: modules divide their layers over tensor-parallel ranks, and DeepSpeed must not do it again."""
        return 1

    def slice_plan(self, sequence_length: int, micro_batch_id: int = 0) -> SlicePlan:
        """Return the slices of a sequence of `sequence_length` tokens; the engine keeps them per length.

        With `"slices": "auto"` this raises ValueError until a batch with sequences of that length has come.
        """
        return self._plans.plan(sequence_length, micro_batch_id)

    def use_slice_plan(self, plan: SlicePlan | Sequence[SlicePlan], schedule: str | None = None) -> None:
        """Run sequences of that length with this plan, or with one for each micro-batch, from the next batch on.

        With `schedule` that schedule runs them, too. Every rank must make the same call between the same batches; if a
        rank does not, all ranks raise. Plans for other lengths do not change.

        Raises:
            PlanError: the slices are no multiples of the module's `slice_length_multiple`, or there are too few plans.
        """
        self._incoming.use_slice_plan(plan, schedule)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save a checkpoint as a whole or not at all, even if ranks die. The watch-dog reports missing ranks.

        Raises:
            CheckpointError: on every rank, if one of them cannot write, another job has begun to save this tag, or
                `client_state` has a name under which DeepSpeed keeps states of its own.
        """
        stock = super().save_checkpoint
        return self._checkpoints.save(stock, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load a checkpoint; this engine keeps its own plan and schedule.

        If `latest` names a checkpoint that is not whole, load the newest whole one, with a warning.

        Raises:
            TeraPipeConfigError: on every rank: the checkpoint has another TP x PP x DP, or its optimizer states
                cannot be moved to the stages of this engine.
            CheckpointError: on every rank: `tag` is not whole, or no checkpoint is, or a file cannot be read, or holds
                more than tensors and plain values (`checkpoints.allow_pickle`).
        """
        states = load_optimizer_states, load_lr_scheduler_states
        options = LoadOptions(load_module_strict, *states, load_module_only, custom_load_fn)
        is_universal = self.load_universal_checkpoint()
        with pass_over_absent(self.module, self.optimizer) if is_universal else nullcontext():
            return self._checkpoints.load(super().load_checkpoint, load_dir, tag, options)

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call that fails in DeepSpeed's pipeline engine (0.19.8), in a line that names no reason."""
        raise NotImplementedError(
            "save_16bit_model: no rank of a pipeline has the whole model. Use terapipe_ds.save_pretrained for models "
            "of transformers, or save_checkpoint, whose layer_*-model_states.pt files have the weights"
        )

    def long_call(self, name: str) -> AbstractContextManager[None]:
        """Watch a collective call of that name outside a batch, such as a save; refuse it in another thread."""
        return self._stage.watchdog.long_call(name)

    def destroy(self) -> None:
        """Stop the watch-dog, then free all that DeepSpeed and the pipeline hold; raise RuntimeError within a batch."""
        if "_stage" in vars(self):
            if busy := self._stage.watchdog.busy:
                raise RuntimeError(f"destroy() was called while the engine is {busy}: call it after the batch")
            self._stage.watchdog.close()
            self._stage.weight_gradients.close()
            give_back(self)
        super().destroy()
        if "_groups" in vars(self):
            self._groups.close()
        for name in _WITH_GROUPS:  # groups stay open while something refers to them
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Say why the engine has no collaborators any more; DeepSpeed searches the module for other attributes."""
        if name in _WITH_GROUPS:
            raise AttributeError(f"this engine is destroyed, or its start failed, and it has no {name}: build another")
        return super().__getattr__(name)

    @property
    def tracer(self) -> Tracer:
        """Return the tracer of this rank's computations; a benchmark may set one of its own."""
        return self._stage.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer) -> None:
        self._stage.tracer = tracer

    # -- a batch, from drawing it to the optimizer's step ------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run a batch so that no stage waits for a failed one, and no state of a failed batch remains."""
        self._stage.watchdog.claim("train_batch() or eval_batch()", moves=True)
        try:
            with self._stage.watchdog.batch():
                yield
        except BaseException:  # forget the batch: a caller who goes on trains as if it had not begun
            if self._batch.is_training and self.optimizer is not None:
                self.optimizer.zero_grad()
                self.zero_grad()
            self._batch.forget()
            self.eval_return_logits = False
            for timer in self.timers.get_timers().values():
                if timer.started_:
                    timer.stop()
            raise

    def _train_schedule(self) -> Any:
        return self._open_batch(self.micro_batches, training=True)

    def _inference_schedule(self, micro_batches: int) -> Any:
        return self._open_batch(micro_batches, training=False)

    def _open_batch(self, num_micro_batches: int, training: bool) -> Any:
        """Draw a batch, and prepare the data that its actions work on."""
        batch = self._incoming.next(num_micro_batches, training)
        self._batch.begin(batch, self.global_steps + 1)
        self._steps.begin(batch)
        self.closing_s = 0.0
        return batch.schedule.for_stage(self.stage_id)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        # the first training batch shows which values, except gradients, layers change
        if self._batch.is_training and self._batch.is_first_of_its_mode:
            faults.tell_of_clipping(self)
            is_whole = not self._plans.may_cut
            self._written = None if is_whole else WrittenParameters(self.module)
            trainer = self, self.optimizer, self.basic_optimizer, self.lr_scheduler
            self._outside = OutsideLayers(self.module, self._layout.has_copies, is_whole, trainer)
        # DeepSpeed reads the losses from here when all actions have run
        self.fwd_outputs = []
        self._place = None  # a check or a measurement may have run another part since
        with self._batch.running():
            for action in pipe_schedule.actions:
                self._exec_action(action)
        if self._compute_loss and not self._batch.is_training:
            self._refuse_in_batch(None)
        self._batch.close(pipe_schedule.peak_live_slices, self.global_steps)

    def _exec_action(self, action: Action) -> None:
        stage = self._stage
        stage.watchdog.note(action)
        execute = self._ACTIONS[action.kind]
        if self._batch.is_observed or action.kind in CLOSING:
            with self._batch.observed(action):
                begin_s = time.perf_counter()
                execute(self, action)
                self.closing_s += (time.perf_counter() - begin_s) * (action.kind in CLOSING)
        else:
            execute(self, action)
        if self._written is not None:
            self._written(action.kind is Kind.FORWARD)

    def _load(self, action: Action) -> None:
        micro_batch = self._batch.current.micro_batches[action.micro_batch_id]
        self._stage.deepspeed.timed(BATCH_INPUT_TIMER, micro_batch.to, self.device)

    def _reduce_tied_grads(self, action: Action) -> None:
        if self._outside is not None:
            self._refuse_in_batch(self._outside)
            self._written = self._outside = None
        self._batch_end.before_sums()
        # DeepSpeed's own sum fails for weights that are frozen, or passes over gradients
        sum_gradients(self.module, self.optimizer)

    def _refuse_in_batch(self, outside: OutsideLayers | None) -> None:
        """Raise on every rank if a loss has no value, or layers have changed values that do not train right."""
        with self._stage.watchdog.waiting("what all ranks say of losses, parameters and state that change in a batch"):
            self._stage.links.close_batch()  # a caller may go on after the error
            if outside is not None:
                # with copies every sum has all gradients
                has_copies, tied = self._layout.has_copies, (self.module, self.optimizer, self._groups.world)
                problem = None if has_copies else problem_of_tied_gradients(*tied)
                problem = problem or (None if self._written is None else self._written.problem(has_copies))
                problem = problem or outside.problem(Gradients.of(self.optimizer).is_there)
                refuse_in_batch(problem, self._groups.world)
            refuse_in_batch(self._stage.results.problem, self._groups.world, SliceLossError)

    # DeepSpeed calls these two around autograd in a B

    def _backward_prologue(self) -> None:
        super()._backward_prologue()
        self.own_time.layers_begin()

    def _backward_epilogue(self) -> None:
        self.own_time.layers_end()
        super()._backward_epilogue()

    steps_per_print = faults.steps_between_prints

    def clip_fp32_gradients(self) -> None:
        """Clip if none of DeepSpeed's own optimizers does. Keep the norm."""
        self._global_grad_norm = faults.clip_fp32(self.module, self.grid, self.gradient_clipping())

    # One micro-batch in two slices, as `seq1f1b` is lowered for two stages. Time goes to the right.
    #
    #   stage 0   RG L0  F0.0 SA    RG F0.1 SA                      B0.1         B0.0    RT RD ST
    #                          \          \                    /            /
    #   stage 1   RA RA L0        F0.0         F0.1   B0.1  SG   B0.0  SG                RT RD ST
    #
    # RA and RG post receives ahead of the F and B that wait for them; SA and SG hand a message to its link and go on.
    # B0.1 comes before B0.0, because slice 0 gets gradients of its keys and values from slice 1. After the last B the
    # ranks sum gradients of tied weights (RT) and of replicas (RD), and the optimizer steps (ST).
    _ACTIONS = {
        Kind.LOAD: _load,
        Kind.RECV_ACTIVATION: lambda self, action: self._stage.links.post(action),
        Kind.FORWARD: _on_its_part(PartRunner.forward),
        Kind.SEND_ACTIVATION: _on_its_part(PartRunner.send_activation),
        Kind.RECV_GRAD: lambda self, action: self._stage.links.post(action),
        Kind.BACKWARD: _on_its_part(PartRunner.backward),
        Kind.WEIGHT: _on_its_part(PartRunner.weight),
        Kind.SEND_GRAD: _on_its_part(PartRunner.send_gradients),
        Kind.REDUCE_TIED_GRADS: _reduce_tied_grads,
        Kind.REDUCE_GRADS: lambda self, action: self._exec_reduce_grads(),
        Kind.OPTIMIZER_STEP: lambda self, action: self._batch_end.step(self._exec_optimizer_step),
    }
