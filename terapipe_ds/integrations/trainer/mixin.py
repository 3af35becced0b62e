"""Put the pipeline under `transformers.Trainer` and the trainers that are made of it.

    class Mine(PipelineTrainerMixin, SomeTrainer): ...

The Trainer's own loop draws the micro-batches of a step, calls callbacks, logs, evaluates and saves. The mixin replaces
the places where the loop touches the model: forwards, the optimizer's parameters, gathering, saving.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState, data_loader
from accelerate.utils import DummyOptim, DummyScheduler, send_to_device
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer, trainer
from transformers.trainer_utils import has_length

from terapipe_ds.compat.replaced import replaced
from terapipe_ds.integrations.trainer.refusals import (
    check_arguments,
    check_trainer,
    is_sft,
    outer_arguments,
    problem_of_loss,
    refuse_other_arguments,
    stock_of,
)
from terapipe_ds.integrations.trainer.stages import (
    Stages,
    config_of,
    enabled_config,
    leave_no_weights,
    refuse_without_weights,
)
from terapipe_ds.integrations.trainer.token_loss import IGNORED, TokenLoss
from terapipe_ds.messages import in_short, logger
from terapipe_ds.models.hugging_face import save_pretrained, skeleton
from terapipe_ds.models.hugging_face.refusals import (
    SOURCE,
    ModelRefusedError,
    base_of,
    refuse_other_ranks,
    refused_on_all_ranks,
)
from terapipe_ds.models.hugging_face.weights.in_memory import IN_PEFT, OF_TENSORS
from terapipe_ds.runtime.agreement import from_rank_0, gather
from terapipe_ds.runtime.register import lay_out

_Method = TypeVar("_Method", bound=Callable[..., Any])
# Arguments that the engine and its optimizer take at their start
_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
_OF_ENGINE = (*_OF_OPTIMIZER, "max_grad_norm", "bf16", "fp16")
_STOPS = ("should_training_stop", "should_epoch_stop")
_FLAGS = (*_STOPS, "should_save", "should_evaluate", "should_log")
_COUNTS_OF_ALL = "_get_num_items_in_batch" in Trainer.prediction_step.__code__.co_names  # labels, in evaluation


def over_stages(method: _Method) -> _Method:
    """Let a method of the mixin replace its parent's in Trainers that have stages."""

    @wraps(method)
    def choose(self: PipelineTrainerMixin, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_stages"):
            return getattr(super(PipelineTrainerMixin, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(_Method, choose)


class PipelineTrainerMixin(Trainer):
    """Train over the stages that the DeepSpeed JSON names, in token slices. Put it before a Trainer's class.

    `"pipeline": {"stages": N}` ("auto": all ranks) and an enabled `terapipe` section in `TrainingArguments(deepspeed=)`
    switch it on; otherwise it does nothing. Losses, metrics, callbacks, schedules and saved files equal the
    Trainer's. `trainer.model` keeps no weights.

    Raises:
        ModelRefusedError: on all ranks, for arguments and classes that stages cannot serve.
        ValueError: on all ranks, for arguments in which these differ.
    """

    _stages: Stages  # absent without an enabled section
    _reduce_logits: Any = None
    _has_trained = False
    _taken = 0  # micro-batches to train on
    _tried: frozenset[bool] = frozenset()  # of evaluation (False) and training, those that have computed a loss
    _made: Any = None  # the optimizer of the training run, or of the next one
    _joined_at = -1  # the step at whose end the ranks have joined their flags
    _asked: frozenset[str] = frozenset()  # flags by which callbacks have asked to stop since then
    _ends_epochs_together = False  # all replicas have as many batches
    _started_with: tuple[tuple[str, Any], ...] = ()  # arguments of the engine
    _given: Sequence[tuple[str, nn.Parameter, bool]] = ()  # requires_grad as the stages have it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = outer_arguments(type(self), PipelineTrainerMixin, args, kwargs)
        raw = config_of(given.get("args"))
        config = enabled_config(raw)
        if config is None:
            is_forgotten = "enabled" not in (raw.get("terapipe") or ())  # false is a choice
            if is_forgotten and os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK") == "0":
                text = "no stages, each rank has the whole model: `deepspeed` names no enabled terapipe section"
                logger.warning(text)
            super().__init__(*args, **kwargs)
            return
        check_arguments(type(self), PipelineTrainerMixin, given, config)
        self._stages, self._waiting = Stages(config), list[tuple[Any, Any]]()
        if isinstance(given.get("model"), str | os.PathLike):
            args, kwargs = (), self._with_skeleton(given)
        super().__init__(*args, **kwargs)
        with refused_on_all_ranks():
            check_trainer(self)

    def _with_skeleton(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with a skeleton in place of a name: each stage will read its own weights."""
        options = dict(getattr(given["args"], "model_init_kwargs", None) or {})
        with refused_on_all_ranks():
            if is_sft(type(self)):
                remote = getattr(given["args"], "trust_remote_code", False)
                options = {"dtype": "float32", "trust_remote_code": remote} | options  # as TRL reads a model
            if (quantization := given.pop("quantization_config", None)) is not None:
                if "quantization_config" in options:
                    raise ModelRefusedError("quantization_config: it stands in model_init_kwargs too; give it once")
                options["quantization_config"] = quantization
            model = skeleton(given["model"], **options)
            if is_sft(type(self)) and given.get("processing_class") is None:
                given["processing_class"] = AutoTokenizer.from_pretrained(getattr(model, SOURCE))
        return given | {"model": model}

    @over_stages
    def create_accelerator_and_postprocess(self) -> None:
        """Build the stages of the model that Trainer has by now, and an accelerator that counts replicas."""
        stages = self._stages
        # keys of the section that follow from the arguments
        wants_recompute = getattr(self.args, "activation_checkpointing", None) or self.args.gradient_checkpointing
        if wants_recompute and "strategy" not in stages.section:  # a strategy sets `recompute` itself
            stages.section.setdefault("recompute", "full")
        if getattr(self, "padding_free", False):  # TRL's collator then joins texts in rows
            stages.section.setdefault("documents", "position_ids")
        # what the loss of the Trainer's class is
        smoothing, sft = self.args.label_smoothing_factor, is_sft(type(self))
        is_dft = sft and self.args.loss_type == "dft"
        loss = TokenLoss(0.0 if is_dft else smoothing, is_dft, keeps_sums=sft) if sft or smoothing else None
        stages.build_module(self.model, loss, self.args.seed)
        leave_no_weights(self.model)
        self._given = [(name, each, each.requires_grad) for name, each in self.model.named_parameters()]
        # from here on Trainer counts replicas; `process_index` stays the rank, which decides who writes files
        self.args.distributed_state = copy.copy(PartialState())
        self.args.distributed_state.num_processes = stages.replicas
        self._renew_config()
        super().create_accelerator_and_postprocess()
        with refused_on_all_ranks():
            if not self.is_deepspeed_enabled:  # Trainer would move the model, which has no weights
                raise ModelRefusedError(
                    "Accelerate leaves DeepSpeed out where ACCELERATE_USE_CPU is set (accelerate launch --cpu): unset "
                    "it, and give TrainingArguments(use_cpu=True)"
                )
        self.accelerator.__class__ = PipelineAccelerator
        self.accelerator.stages, self.accelerator.start = stages, self._start_engine

    def _renew_config(self) -> None:
        """Give DeepSpeed's config its open values again: each training run fills them anew."""
        plugin, filled = self.args.deepspeed_plugin, self._stages.new_config(self.args)
        self.args.hf_deepspeed_config = plugin.hf_ds_config = filled
        plugin.deepspeed_config = filled.config

    # -- the engine, its optimizer and schedulers ---------------------------------------------------------------------

    def _start_engine(self) -> None:
        """Build the engine if there is none yet, with the optimizer of the JSON or the one that the arguments name."""
        if hasattr(self._stages, "engine"):
            return
        accepts_counts = self.model_accepts_loss_kwargs
        self._stages.section.setdefault("loss_reduction", "mean_of_step" if accepts_counts else "mean_valid")
        config = self._stages.engine_config(self.args, self.model)
        self._started_with = tuple((name, getattr(self.args, name)) for name in _OF_ENGINE)
        optimizer = None if "optimizer" in config else self._make_optimizer(self.create_optimizer)
        self._stages.start_engine(config, optimizer)

    @over_stages
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does. `resume_from_checkpoint=True` leaves out checkpoints that a kill has cut short."""
        is_path = isinstance(resume_from_checkpoint, str | os.PathLike)  # machines may have it in different folders
        resumed = Path(resume_from_checkpoint).name if is_path else resume_from_checkpoint
        more = {"resume_from_checkpoint": resumed, "the length of train_dataset": _length_of(self.train_dataset)}
        refuse_other_arguments(self.args, **more)
        if is_path:
            _check_state(resume_from_checkpoint)

        def newest(folder: str) -> str | None:
            return _check_state(from_rank_0(lambda: _last_whole(folder)))

        with replaced(trainer, "get_last_checkpoint", newest):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @over_stages
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._renew_config()
        self._waiting.clear()
        self._asked = frozenset()
        self._joined_at = -1
        self._stages.sums()  # of a step that raised
        # another training run goes on with the engine: accelerate must not destroy it, and gets the model again
        self.accelerator.deepspeed_engine_wrapped, self.model_wrapped = None, self.model
        with refused_on_all_ranks():
            if kept := self._check_unchanged():
                logger.warning("%s: changed after train(), whose optimizer keeps the old value", ", ".join(kept))
        self._has_trained = True
        once = replaced(self, "create_optimizer", partial(self._make_optimizer, self.create_optimizer))
        handler = self.callback_handler
        joined = replaced(handler, "call_event", partial(self._call_event, handler.call_event))
        try:
            # a resumed run makes a loader that skips batches
            with once, joined, self.accelerator.loaders_of_replicas():
                return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._made = None  # Trainer asks again for the next run

    def _make_optimizer(self, create: Callable[[], Any]) -> Any:
        """Return the result of `create`; while it runs, the model has the parameters of this stage.

        Trainer asks once for a run, and under DeepSpeed twice; the engine may start before. An override of
        `create_optimizer` may change the parent's optimizer each time.
        """
        if self._made is None:
            engine = getattr(self._stages, "engine", None)
            if engine is None:  # the layers come to their stages before the optimizer lists their parameters
                lay_out(self._stages.module, self._stages.engine_config(self.args, self.model))
            own, modules = self._own_parameters(), self._stages.module.modules
            named = replaced(self.model, "named_parameters", lambda *_, **__: iter(own))
            with named, replaced(self.model, "modules", modules):
                self._made = create()
            kept = () if engine is None else (engine.optimizer, engine.basic_optimizer)
            if engine is not None and not any(getattr(self._made, "optimizer", self._made) is each for each in kept):
                raise ModelRefusedError(
                    "create_optimizer made another optimizer, but the engine keeps its first one: "
                    "let it return self.optimizer where that is not None, or build another Trainer"
                )
        return self._made

    @over_stages
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer that the arguments name, for the parameters of this stage by their names in the model."""
        if hasattr(self._stages, "engine"):  # another training run goes on with its state
            self.optimizer = DeepSpeedOptimizerWrapper(self._stages.engine.optimizer)
            return self.optimizer
        return self._make_optimizer(super().create_optimizer)

    def _own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of this stage by their names in the model."""
        module, prefix = self._stages.module, "" if base_of(self.model) is self.model else IN_PEFT
        names = module.checkpoint_names()
        return [(prefix + names.get(name, name), each) for name, each in module.named_parameters()]

    # -- data ---------------------------------------------------------------------------------------------------------

    @over_stages
    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(self.args.distributed_state, "process_index", self._stages.replica):  # for samplers and workers
            return super()._get_dataloader(*args, **kwargs)

    @over_stages
    def store_flos(self) -> None:
        """Count operations once per replica, on its first stage: Trainer sums them over all ranks."""
        self.current_flos *= self._stages.is_first
        super().store_flos()

    @over_stages
    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        # transformers would take weights in 4 bits for packed, and these have no values
        with replaced(base_of(self.model), "is_loaded_in_4bit", False):
            return super().floating_point_ops(inputs)

    # -- steps --------------------------------------------------------------------------------------------------------

    @over_stages
    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Call the steps of the classes below, in which `_train_on` is Trainer's own, with the model for the engine."""
        taken = self._taken + 1
        with replaced(stock_of(type(self), "training_step"), "training_step", PipelineTrainerMixin._train_on):
            loss = super().training_step(self.model, *args, **kwargs)
        if self._taken != taken:
            raise ModelRefusedError(f"{type(self).__name__}.training_step must call its parent's once for a batch")
        return loss

    def _train_on(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep the micro-batch; with the last one of the step, run them all. Return the loss of the step, or zero."""
        self.model.train()
        inputs, count = self._for_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        accepts_counts, is_scaled = self.model_accepts_loss_kwargs, getattr(self, "loss_is_scaled_for_ga", None)
        uncounted = accepts_counts and num_items_in_batch is None and inputs.get("labels") is not None
        if uncounted or is_scaled not in (None, accepts_counts):
            raise ModelRefusedError(
                "labels of a step weigh alike, or with trainer.model_accepts_loss_kwargs = False its micro-batches: "
                f"loss_is_scaled_for_ga={is_scaled} or num_items_in_batch={num_items_in_batch} ask for other weights"
            )
        self._taken += 1
        self._waiting.append((inputs, None if num_items_in_batch is None else count))
        if not self.accelerator.sync_gradients:
            return self._without_labels(torch.zeros((), device=self.args.device), num_items_in_batch)
        batches, counts = zip(*self._waiting, strict=True)
        self._waiting.clear()
        loss = self._stages.train(batches, None if None in counts else counts, self._check_unchanged)
        self._note_metrics("train", batches)
        return self._without_labels(loss.to(self.args.device), num_items_in_batch)

    @over_stages
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do on all ranks what a callback of one asks for, by its clock for example: that rank would wait for them."""
        # Trainer also calls this at the end of an epoch, which replicas with fewer batches reach earlier
        is_step, self._joined_at = self._joined_at != self.state.global_step, self.state.global_step
        acts = (is_step or self._ends_epochs_together) and self._join_flags()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if acts:  # callbacks of an evaluation may stop the run
            self._join_flags()

    def _join_flags(self) -> bool:
        """Set each flag of `self.control` that is set on some rank; return whether there are any. A collective."""
        own = [bool(getattr(self.control, name)) or name in self._asked for name in _FLAGS]
        self._asked = frozenset()
        flags = self._stages.on_some_rank(own)
        for name, flag in zip(_FLAGS, flags, strict=True):
            setattr(self.control, name, flag)
        return any(flags)

    def _call_event(self, call: Callable[..., Any], event: str, *args: Any, **kwargs: Any) -> Any:
        """Call the callbacks. Keep it for the end of the step if they ask to stop: this rank would leave it alone."""
        if event == "on_epoch_begin":  # Trainer forgets here that the epoch before was to stop
            self._asked -= {"should_epoch_stop"}
        new = [name for name in _STOPS if not getattr(self.control, name)]  # others are set on all ranks
        control = call(event, *args, **kwargs)
        if event == "on_train_begin":
            loader = self.callback_handler.train_dataloader
            lengths = {*gather(len(loader) if has_length(loader) else None)}
            self._ends_epochs_together = self._stages.replicas == 1 or (len(lengths) == 1 and None not in lengths)
        for name in filter(partial(getattr, control), new):
            self._asked |= {name}
            setattr(control, name, False)
        return control

    def _check_unchanged(self) -> list[str]:
        """Return the arguments of the optimizer that have changed after `train`; raise ModelRefusedError for others."""
        changed = [name for name, value in self._started_with if getattr(self.args, name) != value]
        # Trainer's next run goes on with the optimizer of the first one as well, whatever its arguments are now
        kept = [name for name in changed if self._has_trained and name in _OF_OPTIMIZER]
        if changed := [name for name in changed if name not in kept]:
            raise ModelRefusedError(
                f"{', '.join(changed)} of the arguments: changed since evaluate(), train() or save_model() started "
                "the engine, which keeps the old value: change it before, or build another Trainer"
            )
        if changed := [name for name, each, trained in self._given if each.requires_grad != trained]:
            raise ModelRefusedError(
                f"requires_grad of {in_short(changed)} has changed since the Trainer was built, which no stage sees: "
                "freeze weights before you build the Trainer, or build a new Trainer"
            )
        if hooked := [name for name, each, _ in self._given if any(map(each.__getattribute__, OF_TENSORS))]:
            raise ModelRefusedError(
                f"hooks of {in_short(hooked)}: trainer.model has no gradients, and nobody would call them: remove them "
                "(WANDB_WATCH adds some), or train a PipelineModule of terapipe_ds.from_pretrained without Trainer"
            )
        return kept

    def _for_loss(self, model: nn.Module, inputs: Any, **counts: Any) -> tuple[Any, float | None]:
        """Return the batch that `compute_loss` of the user's classes hands on, and its divisor: both may change."""
        is_known, self._tried = self.model.training in self._tried, self._tried | {self.model.training}
        # a method that reads the loss on one rank alone, for a log, would leave the others in the step
        with nullcontext() if is_known else refused_on_all_ranks():
            return self._handed_on(model, inputs, **counts)

    def _handed_on(self, model: nn.Module, inputs: Any, **counts: Any) -> tuple[Any, float | None]:
        if (problem := problem_of_loss(self)) is not None:  # a class or a callback has set it by now
            raise ModelRefusedError(problem)
        handed_on, cause = list[tuple[Any, float | None]](), None
        with torch.inference_mode(False):  # which counts no changes
            loss = torch.zeros((), device="meta")

        def last(_: Any, model: Any, inputs: Any, return_outputs: Any = 0, num_items_in_batch: Any = None) -> Tensor:
            handed_on.append((inputs, self._divisor_of(inputs, num_items_in_batch)))
            return loss

        with replaced(stock := stock_of(type(self), "compute_loss"), "compute_loss", last):
            try:
                returned = self.compute_loss(model, inputs, **counts)
            except Exception as error:
                if not handed_on:
                    raise
                cause, returned = error, None  # nobody may read a loss that stages compute later
        is_same = (returned[0] if isinstance(returned, tuple) else returned) is loss
        if len(handed_on) == 1 and is_same and not loss._version:  # which counts changes in place
            return handed_on[0]
        raise ModelRefusedError(
            f"{type(self).__name__}.compute_loss is its own{f' ({cause})' if cause else ''}, and stages run "
            f"{stock.__name__}'s in slices: let it return what one call of its parent's returns, or pass a loss_fn to "
            "terapipe_ds.from_pretrained and train without Trainer"
        ) from cause

    def _without_labels(self, loss: Tensor, count: Any) -> Tensor:
        """Return NaN where no label counts, as the model's own loss does; `logging_nan_inf_filter` leaves it out."""
        return torch.full_like(loss, math.nan) if count == 0 and not is_sft(type(self)) else loss

    def _note_metrics(self, mode: str, batches: Sequence[Mapping[str, Any]]) -> None:
        """Add what TRL logs of each micro-batch, from the sums of the stage that computed its loss."""
        if not is_sft(type(self)):
            return
        sums, metrics = self._stages.sums(), self._metrics[mode]
        for index, batch in enumerate(batches):
            mask, tokens = batch.get("attention_mask"), 0
            if mode == "train":
                tokens = batch["position_ids"].size(1) if mask is None else int(mask.sum())
            own = torch.tensor([[*sums.get(index, [0.0] * 3), tokens]], dtype=torch.float64, device=self.args.device)
            entropy, correct, valid, tokens_of_all = self.accelerator.gather_for_metrics(own).sum(0).tolist()
            metrics["entropy"].append(entropy / valid if valid else 0.0)
            metrics["mean_token_accuracy"].append(correct / valid if valid else 0.0)
            self._total_train_tokens += int(tokens_of_all)
            metrics["num_tokens"] = [self._total_train_tokens]

    @over_stages
    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does, also before training. The last stage preprocesses logits before they travel."""
        rows, batches = map(_length_of, (getattr(dataloader, "dataset", None), dataloader))
        refuse_other_ranks({"the number of rows": rows}, "evaluate different data sets", "one", gather)
        even = "number of batches: leave out even_batches=False, or give rows that the replicas share evenly"
        refuse_other_ranks({"the number of batches": batches}, "evaluate uneven shares of the rows", even, gather)
        # without one, Trainer would ask DeepSpeed for ZeRO-3; it prepares the engine in any case
        self.deepspeed = getattr(self, "deepspeed", None) or self.accelerator
        self._reduce_logits = self.preprocess_logits_for_metrics
        self.model.eval()  # which is not the engine's module, and TRL asks it whose metrics to log
        with replaced(self, "preprocess_logits_for_metrics", None):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    @over_stages
    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Call the steps of the classes below, in which `_predict_on` is Trainer's own."""
        with replaced(stock_of(type(self), "prediction_step"), "prediction_step", PipelineTrainerMixin._predict_on):
            return super().prediction_step(self.model, *args, **kwargs)

    def _predict_on(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch, with the logits preprocessed."""
        inputs = self._prepare_inputs(inputs)
        labels, reduce = inputs.get("labels"), self._reduce_logits or (lambda logits, _: logits)
        wanted = None if prediction_loss_only else lambda logits: reduce(logits, labels)
        count, counts = None, dict[str, Any]()
        if labels is not None:
            if _COUNTS_OF_ALL and not is_sft(type(self)):
                counts = {"num_items_in_batch": self._get_num_items_in_batch([inputs], self.args.device)}
            inputs, count = self._for_loss(model, inputs, **counts)
        loss, logits = send_to_device(self._stages.evaluate(inputs, count, wanted), self.args.device)
        loss = self._without_labels(loss, count)
        self._note_metrics("eval", [inputs])
        return loss, logits, None if prediction_loss_only else labels

    def _divisor_of(self, inputs: Mapping[str, Any], count: Any) -> float | None:
        """Return the divisor of a batch's loss: `count`, or the labels of this batch; None if the engine counts."""
        if not self.model_accepts_loss_kwargs or "labels" not in inputs:
            return None
        if count is not None:
            return float(count)
        shifted = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., 1:]
        return float(shifted.ne(IGNORED).sum()) * self._stages.replicas

    # -- files --------------------------------------------------------------------------------------------------------

    @over_stages
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights of all stages, the config, the tokenizer and the arguments. All ranks call it."""
        self._start_engine()
        module = self._stages.module
        # Trainer may have changed both configs since the module was built
        model = base_of(self.model)
        module.config = model.config
        module.blueprint.outline.model.generation_config = model.generation_config
        folder = self.args.output_dir if output_dir is None else output_dir
        save_pretrained(self._stages.engine, folder)
        card = getattr(self.model, "create_or_update_model_card", None)  # peft writes one beside adapters
        # Trainer adds its files beside the weights, and its own state of processes
        with replaced(self.model, "save_pretrained", lambda *_, **__: card and card(folder)), self._as_rank():
            from_rank_0(lambda: self._save(folder, state_dict={}))  # a full disk must reach all ranks
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _as_rank(self) -> AbstractContextManager[None]:
        """Let the arguments count ranks again, whose random numbers differ."""
        return replaced(self.args, "distributed_state", PartialState())

    @over_stages
    def _save_rng_state(self, output_dir: str) -> None:
        with self._as_rank():
            super()._save_rng_state(output_dir)

    @over_stages
    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._as_rank():
            super()._load_rng_state(checkpoint)


def _length_of(dataset: Any) -> int | None:
    return len(dataset) if has_length(dataset) else None


def _check_state(folder: Any) -> Any:
    """Return `folder`; raise ModelRefusedError on all ranks if one cannot read Trainer's state in it. A collective."""
    with refused_on_all_ranks():
        path = None if folder is None else Path(folder) / trainer.TRAINER_STATE_NAME
        try:
            if path is not None:
                trainer.TrainerState.load_from_json(str(path))
        except (OSError, ValueError) as error:
            raise ModelRefusedError(f"{path} cannot be read ({error}): copy it again, or give another one") from error
    return folder


def _last_whole(folder: str) -> str | None:
    """Return the checkpoint of the most steps whose save came to its end; None if there is none."""
    numbers = (path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*"))
    for number in sorted(map(int, filter(str.isdecimal, numbers)), reverse=True):
        path = Path(folder) / f"checkpoint-{number}"
        try:
            trainer.TrainerState.load_from_json(str(path / trainer.TRAINER_STATE_NAME))  # which a save writes last
            return str(path)
        except (OSError, ValueError) as error:
            logger.warning("%s: not whole, a kill has cut its save short (%s); left out", path, error)
    return None


class PipelineAccelerator(Accelerator):
    """Let accelerate count replicas of the model, not ranks: the stages of a pipeline get the same data.

    It shards data over replicas, gathers from them, and prepares the pipeline's engine in place of a model.
    """

    stages: Stages
    start: Callable[[], None]  # builds the engine

    get_state_dict = staticmethod(refuse_without_weights)
    num_processes = property(attrgetter("stages.replicas"))
    process_index = property(attrgetter("stages.replica"))

    @contextmanager
    def loaders_of_replicas(self) -> Iterator[None]:
        """Let a loader that divides the batches of rank 0 divide them among replicas, and give stages the same ones."""
        state, take = copy.copy(PartialState()), data_loader.slice_tensors
        state.num_processes = self.num_processes  # its index stays the rank: rank 0 alone reads

        def of_replica(batch: Any, rows: slice, **of_rank: int) -> Any:
            count = rows.stop - rows.start
            first = self.process_index * count if rows.start else 0  # the first rows of a batch fill up the last one
            return take(batch, slice(first, first + count), **of_rank)

        with replaced(data_loader, "PartialState", lambda: state), replaced(data_loader, "slice_tensors", of_replica):
            yield

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        with self.loaders_of_replicas():
            return super().prepare_data_loader(*args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all replicas, concatenated."""
        return recursively_apply(self.stages.gathered, tensor, error_on_other_type=True)

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """Prepare loaders as Accelerate does; return the engine for a model, and its optimizer and scheduler."""
        return tuple(map(self._prepared, args))

    def _prepared(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return self._prepare_one(item, first_pass=True)
        if isinstance(item, nn.Module):
            self.start()
            self.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(self.stages.engine)
            self._models.append(self.stages.engine)
            return self.stages.engine
        if isinstance(item, Optimizer | DummyOptim):
            self._optimizers.append(DeepSpeedOptimizerWrapper(self.stages.engine.optimizer))
            return self._optimizers[-1]
        if isinstance(item, DummyScheduler):
            config = self.state.deepspeed_plugin.hf_ds_config.config
            if "scheduler" not in config:
                return item.lr_scheduler_callable(self._optimizers[-1])  # Trainer's own, which Trainer steps
            self._schedulers.append(DeepSpeedSchedulerWrapper(self.stages.own_scheduler(config), self._optimizers[-1]))
            return self._schedulers[-1]
        return item


class PipelineTrainer(PipelineTrainerMixin, Trainer):
    """Be `transformers.Trainer` over pipeline stages."""
