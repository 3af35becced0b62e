"""Build and run the pipeline behind a Trainer: DeepSpeed's config, the module of this rank's stage, and the engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from accelerate.utils import send_to_device
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.trainer_pt_utils import nested_detach

from terapipe_ds.compat.unread_section import is_enabled
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.conflicts import problem_of_auto, problem_of_quotes
from terapipe_ds.config.strategy_file import read_strategy
from terapipe_ds.config.unknown_keys import refuse_misspelt_section
from terapipe_ds.dict_batch import BatchError
from terapipe_ds.integrations.trainer.refusals import check_optimizer, precision_of
from terapipe_ds.integrations.trainer.token_loss import IGNORED, Sums, TokenLoss
from terapipe_ds.models.hugging_face import HuggingFaceModule, ModelRefusedError, from_pretrained
from terapipe_ds.models.hugging_face.refusals import refused_on_all_ranks
from terapipe_ds.models.hugging_face.weights.stored import named
from terapipe_ds.models.rank_gradients import of_all_stages
from terapipe_ds.runtime.agreement import everywhere, gather, on_some_rank
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.layout.sequence_axis import sequence_ranks_of
from terapipe_ds.runtime.layout.topology import topology_of
from terapipe_ds.runtime.register import lay_out, register

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
# The arguments fill the keys that the JSON leaves out; DeepSpeed would take its own defaults
_DEFAULTS: dict[str, Any] = {**dict.fromkeys(_SIZES, "auto"), "zero_allow_untested_optimizer": True}  # as in Trainer


def config_of(args: TrainingArguments | None) -> dict[str, Any]:
    """Return a copy of DeepSpeed's config that `args` name; an empty one if they name none."""
    of_launcher = getattr(args, "deepspeed_plugin", None)  # `accelerate launch` names a config in its environment
    source = getattr(args, "deepspeed", None) or getattr(of_launcher, "deepspeed_config", None)
    raw: dict[str, Any] = {} if source is None else HfDeepSpeedConfig(source).config
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if of_launcher is not None and not getattr(args, "deepspeed", None) and file is not None and os.path.isfile(file):
        # accelerate reads 1 where the file has no gradient_accumulation_steps; the arguments name them
        of_file = HfDeepSpeedConfig(file).config
        raw = {key: each for key, each in raw.items() if key not in _SIZES or key in of_file}
    refuse_misspelt_section(raw)
    return raw


def enabled_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a DeepSpeed config as Trainer takes it; None unless it has an enabled `terapipe` section."""
    # null means an absent key; DeepSpeed and Trainer would look into sections, and compare null with numbers
    may_be_null = ("pipeline", "tensor_parallel", "sequence_parallel_size", *_SIZES)
    present = {key: each for key, each in raw.items() if each is not None or key not in may_be_null}
    return present if is_enabled(raw) else None


class Stages:
    """Hold the pipeline of a Trainer.

    Ranks with one `replica` are the stages, tensor-parallel and sequence ranks of one pipeline, and get the same data.
    All ranks call all methods.
    """

    engine: TeraPipeEngine  # absent before `start_engine`

    def __init__(self, raw: Mapping[str, Any]) -> None:
        register()
        deepspeed.init_distributed(dist_backend=torch_dist.get_backend(), verbose=False)
        self._raw, self.section = raw, dict(raw["terapipe"])
        # a rank that cannot read a file tells the others, which would wait
        self._topology = everywhere(self._wanted_topology)
        place = self._topology.get_coord(torch_dist.get_rank())
        self.replicas: int = self._topology.get_dim("data")
        self.replica: int = place.data
        self.is_first: bool = all(getattr(place, axis, 0) == 0 for axis in ("pipe", "model", "sequence"))

    def _wanted_topology(self) -> ProcessTopology:
        """Return the grid of ranks that the config asks for, in a strategy's file or itself."""
        # mistakes of the section are errors here; the rest of the config is complete only later
        TeraPipeConfig.from_deepspeed({"terapipe": self.section | {"strategy": None}})
        path, count = self.section.get("strategy"), self._raw.get("pipeline", {}).get("stages", "auto")
        if path is not None:
            try:
                strategy = read_strategy(os.path.expanduser(str(path)))
            except ValueError as error:
                raise TeraPipeConfigError(f"terapipe.strategy = {path!r}: {error}") from None
            if count not in ("auto", strategy.grid["pipe"]):
                raise TeraPipeConfigError(
                    f"pipeline.stages = {count!r}, and terapipe.strategy = {path!r} has {strategy.grid['pipe']}: leave "
                    "out pipeline.stages"
                )
            return topology_of(strategy)
        world = torch_dist.get_world_size()
        tensor = self._raw.get("tensor_parallel", {}).get("autotp_size", 0)
        shown, others = f"pipeline.stages = {count!r}", {"sequence": self._raw.get("sequence_parallel_size", 1)}
        others["model"] = 1 if tensor == 0 else tensor
        ranks = list(others.values())
        if count == "auto" and all(type(size) is int and size > 0 for size in ranks):
            count = world // math.prod(ranks)
        if any(type(size) is not int or size < 1 for size in (count, *ranks)) or world % (count * math.prod(ranks)):
            keys = zip(("sequence_parallel_size", "tensor_parallel.autotp_size"), ranks, strict=True)
            shown += "".join(f", {key} = {size!r}" for key, size in keys if size != 1)
            raise TeraPipeConfigError(
                f'{shown}: give a number of stages that divides the {world} ranks, or "auto" for as many stages as '
                "ranks; with tensor-parallel or sequence ranks, their product must divide the ranks"
            )
        sizes = {"pipe": count, "data": world // (count * math.prod(ranks))}
        sizes |= {axis: size for axis, size in others.items() if size > 1}
        return ProcessTopology(axes=[*sizes], dims=[*sizes.values()])

    def build_module(self, model: PreTrainedModel, loss: TokenLoss | None, seed: int) -> None:
        """Cut the model into stages; this rank keeps the weights of its own stage."""
        self._loss = loss
        with torch.random.fork_rng([]):  # samplers draw as if no module had been built
            self.module: HuggingFaceModule = from_pretrained(
                model,
                topology=self._topology,
                loss_fn=loss,
                seed=seed,
                activation_checkpoint_interval=0,  # recomputation is a key of the section
            )
        adapters = self.module.blueprint.adapters
        with refused_on_all_ranks():
            if adapters is not None and adapters.beside:  # else the first save would end the training
                raise ModelRefusedError(
                    f"{named(adapters.beside)} of the model are trained beside the adapters, and files that Trainer "
                    "saves cannot hold them: name their modules in modules_to_save of LoraConfig, or freeze them"
                )

    # -- DeepSpeed's config -------------------------------------------------------------------------------------------

    def new_config(self, args: TrainingArguments) -> HfTrainerDeepSpeedConfig:
        """Return the config with the values of `args` in place of "auto"; values of a training run stay "auto".

        `args` count data-parallel ranks as their processes.
        """
        raw = {**_DEFAULTS, "zero_optimization": {}, **self._raw}
        raw.pop("tensor_parallel", None)  # Trainer would divide its numbers of ranks and labels by it once more
        filled = HfTrainerDeepSpeedConfig(raw)
        filled.trainer_config_process(args)
        for key in ("bf16", "fp16"):
            filled.config.setdefault(key, {"enabled": key == precision_of(args)})
        if not filled.config["gradient_clipping"]:  # no clipping, and the norm is still computed
            filled.config["gradient_clipping"] = math.inf
        is_bf16, is_fp16 = ((filled.config[key] or {}).get("enabled") for key in ("bf16", "fp16"))
        zero = filled.config["zero_optimization"] or {}
        # with stage 0, its default, DeepSpeed cannot load the optimizer states of bf16, and Trainer resumes; in fp16
        # its optimizers take a first step without gradients (`initialize_optimizer_states`)
        if (is_bf16 or is_fp16) and "stage" not in zero:
            filled.config["zero_optimization"] = {"stage": 1, **zero}
            if is_bf16:
                filled.config["data_types"] = {"grad_accum_dtype": "fp32"} | (self._raw.get("data_types") or {})
        filled.config |= {"terapipe": self.section, "steps_per_print": math.inf}
        return filled

    def engine_config(self, args: TrainingArguments, model: PreTrainedModel) -> dict[str, Any]:
        """Return the config with all values. A scheduler comes with each training run, which knows its steps."""
        filled = self.new_config(args)
        filled.config.pop("scheduler", None)
        filled.trainer_config_finalize(args, model, 1)
        if "tensor_parallel" in self._raw:
            filled.config["tensor_parallel"] = self._raw["tensor_parallel"]
        return cast(dict[str, Any], filled.config)

    def start_engine(self, config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        """Build the engine. Without `optimizer` the config has one."""
        lay_out(self.module, config)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        chosen: dict[str, Any] = {"model_parameters": trained} if optimizer is None else {"optimizer": optimizer}
        if optimizer is not None:
            check_optimizer(optimizer, self.module, config)
        self.engine = deepspeed.initialize(model=self.module, config=config, **chosen)[0]
        if not hasattr(self.engine.optimizer, "defaults"):  # DeepSpeed's wrappers have none, and schedulers read them
            self.engine.optimizer.defaults = self.engine.basic_optimizer.defaults
        if self._loss is not None:
            self._loss.store = self.engine.slice_store
        # dropout draws for other tokens and heads on each sequence rank; samplers draw on the CPU, and alike
        rank, device = sequence_ranks_of(self.module.mpu()).rank, get_accelerator()
        if rank > 0 and device.device_name() != "cpu":
            device.manual_seed_all(torch.initial_seed() + rank)

    def own_scheduler(self, config: Mapping[str, Any]) -> Any:
        """Make the scheduler that DeepSpeed's config names, and let the engine step it."""
        section = {"scheduler": config["scheduler"]}  # the engine's config has none
        if problem := problem_of_auto(section) or problem_of_quotes(section):
            raise TeraPipeConfigError(problem)
        name, options = config["scheduler"]["type"], config["scheduler"].get("params", {})
        owner = lr_schedules if hasattr(lr_schedules, name) else torch.optim.lr_scheduler
        self.engine.lr_scheduler = getattr(owner, name)(self.engine.optimizer, **options)
        return self.engine.lr_scheduler

    # -- batches ------------------------------------------------------------------------------------------------------

    def train(self, batches: Sequence[Any], counts: Sequence[float] | None, check: Callable[[], object]) -> Tensor:
        """Take one optimizer step on the micro-batches of this replica; return the loss, the same on all ranks.

        `counts` are the divisors of the losses; None: each micro-batch's own number of labels. The engine tells
        all ranks of an error of `check`.
        """

        def drawn() -> Iterator[Any]:
            check()
            yield from map(_with_shifted, batches)

        engine = self.engine
        engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * self.replicas * len(batches))
        engine.step_label_counts = counts
        return engine.train_batch(drawn()).detach().float().reshape(())

    def evaluate(
        self, batch: Mapping[str, Any], label_count: float | None, reduce_logits: Callable[[Tensor], Any] | None
    ) -> tuple[Tensor | None, Any]:
        """Evaluate a batch of this replica; return its loss, and what `reduce_logits` makes of its logits.

        The last stage reduces the logits before they travel to the other stages.
        """
        engine, with_loss = self.engine, batch.get("labels") is not None
        engine.step_label_counts = None if label_count is None else [label_count]
        wants_logits = with_loss and reduce_logits is not None  # without a loss, the result is logits
        result: Any = engine.eval_batch(
            map(_with_shifted, [batch]),
            return_logits=wants_logits,
            compute_loss=with_loss,
            reduce_output="avg" if engine.monitor.enabled and with_loss else None,
            bcast_loss=False,
            num_micro_batches=1,
        )
        result, logits = cast(tuple[Any, Any], result if wants_logits else (result, None))

        def of_last_stage() -> tuple[Tensor | None, Any]:
            loss = result[0] if isinstance(result, list) else result
            of_model = logits if with_loss else loss
            reduced = None if reduce_logits is None else nested_detach(reduce_logits(of_model))
            of_batch = loss.detach().float().cpu().reshape(()) if with_loss else None
            return of_batch, send_to_device(reduced, "cpu")

        # an error of the user's function must reach all ranks
        own = everywhere(lambda: of_last_stage() if engine.is_last_stage() else None, torch_dist.group.WORLD)
        of_stages = gather(own, self.module.mpu().get_pipe_parallel_group())
        return next(each for each in of_stages if each is not None)

    def on_some_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is true on some rank. The watch-dog alone limits the wait."""
        return on_some_rank(flags, self.engine._groups.world)  # noqa: SLF001

    def sums(self) -> Sums:
        """Return the sums of all micro-batches since the last call, whichever ranks computed their loss."""
        if self._loss is None:
            return {}
        of_pipeline = of_all_stages(self._loss.take_sums(), self.module.mpu())
        sequence = sequence_ranks_of(self.module.mpu())
        if sequence.size == 1:
            return of_pipeline
        # each has the sums of its own tokens, or none if no label counts there
        of_ranks = gather(of_pipeline, sequence.group)
        parts = {index: [sums[index] for sums in of_ranks if index in sums] for index in set().union(*of_ranks)}
        return {index: [math.fsum(of_one) for of_one in zip(*each, strict=True)] for index, each in parts.items()}

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all replicas, one after the other."""
        if self.replicas == 1:
            return tensor
        own = (tensor[None] if tensor.dim() == 0 else tensor).contiguous()
        all_of_them = [torch.empty_like(own) for _ in range(self.replicas)]
        torch_dist.all_gather(all_of_them, own, group=self.module.mpu().get_data_parallel_group())
        return torch.cat(all_of_them)


def _with_shifted(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with labels shifted as the model's own loss does: a document learns the next one's first token.

    Raises:
        BatchError: for labels at padding. The engine draws the batch, and tells all ranks of errors.
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if labels is None:
        return batch
    if mask is not None and mask.shape == labels.shape and bool((mask.eq(0) & labels.ne(IGNORED)).any()):
        raise BatchError(
            "labels at padding, which Trainer would train on and stages leave out: set labels to -100 where "
            "attention_mask is 0, as transformers.DataCollatorForLanguageModeling does"
        )
    shifted = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return {"shift_labels": shifted, **batch}  # a collator may have shifted them itself


def refuse_without_weights(*_: Any, **__: Any) -> None:
    """Raise the error of all that needs the weights of a Trainer's model."""
    raise RuntimeError(
        "the model of this Trainer has no weights: they are on the pipeline's stages. Call trainer.evaluate() or "
        "trainer.predict(), or save with trainer.save_model(folder) on all ranks and load the folder. Load weights "
        "into the model before you build the Trainer. Let compute_loss, training_step and prediction_step of a class "
        "call their parent's method, and not the model"
    )


def leave_no_weights(model: nn.Module) -> None:
    """Drop the weights of a model whose stages have them; it can no longer run, nor give or take a state_dict."""
    model.to_empty(device="meta")
    for module in model.modules():
        module.register_load_state_dict_pre_hook(refuse_without_weights)  # torch would only warn
        if isinstance(module, PreTrainedModel):
            module.tie_weights()  # so that Trainer counts tied weights once
            module.register_forward_pre_hook(refuse_without_weights, with_kwargs=True)
            module.register_state_dict_pre_hook(refuse_without_weights)
