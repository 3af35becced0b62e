"""Refuse by name the arguments and classes of Trainers that pipeline stages cannot serve."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from terapipe_ds.config.conflicts import conflicting_keys
from terapipe_ds.files.user_json import value_at
from terapipe_ds.models.hugging_face.refusals import (
    SOURCE,
    ModelRefusedError,
    refuse_other_ranks,
    refused_on_all_ranks,
)
from terapipe_ds.runtime.agreement import gather

_WHOLE = "needs the whole model on one rank"
# Arguments that stages cannot serve in another value than the default, and why.
_REFUSED_ARGS = {
    "average_tokens_across_devices": "the labels of a step weigh alike: leave it out",
    "neftune_noise_alpha": "NEFTune draws noise for whole sequences in a hook on the embedding: leave it out",
    "use_liger_kernel": "Liger replaces the model's forward, which stages do not call: leave it out",
    "torch_compile": 'set "compile": true in the terapipe section, which compiles the layers of each stage',
    "auto_find_batch_size": "an error of memory on one stage would leave the others waiting: give the size",
    "fp16_full_eval": "the engine evaluates in the precision that it trains in: set fp16 or bf16 in DeepSpeed's config",
    "bf16_full_eval": "the engine evaluates in the precision that it trains in: set fp16 or bf16 in DeepSpeed's config",
    "predict_with_generate": f"generation {_WHOLE}: save the model, load it and generate",
    "eval_use_gather_object": "objects would be gathered from all stages, which have the same data: leave it out",
    "activation_offloading": 'set "offload_activations": true in the terapipe section',
    "parallelism_config": "DeepSpeed's config describes the ranks (pipeline.stages, tensor_parallel.autotp_size, "
    "sequence_parallel_size): leave it out",
    "torch_empty_cache_steps": "the engine owns its memory within a step: leave it out",
    "debug": f"it {_WHOLE}: leave it out, and set check_finite in the terapipe section",
    "save_on_each_node": "the stages of one model may be on several machines: save to a folder that all of them share",
    "enable_jit_checkpoint": "ranks see the signal at different steps, and wait for each other: set save_steps",
    "save_safetensors": "each stage writes safetensors: leave it out",
    "use_legacy_prediction_loop": "stages serve evaluation_loop: leave it out",
    "past_index": "stages return no states of the model: leave it out",
    "jit_mode_eval": "stages do not trace the model: leave it out",
}
# Variables of `accelerate launch`: the values that stages serve, the default first
_OF_LAUNCHER = {
    "ACCELERATE_MIXED_PRECISION": (("no", "bf16", "fp16"), "stages compute in fp32, bf16 or fp16"),
    "ACCELERATE_DYNAMO_BACKEND": (("no",), _REFUSED_ARGS["torch_compile"]),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (("false", "no", "0"), _REFUSED_ARGS["parallelism_config"]),
}
# Arguments in which ranks may differ: names, paths, logs, processes. Others compare DeepSpeed's config and models
_OF_RANK = re.compile(
    r"^(_|log_|disable|report_to|run_name|project|trackio|deepspeed|resume|skip_memory|model_init)|_(dir|path)$|rank|hub"
    r"|num_proc|^dataloader_(num_workers|prefetch|persistent|pin)"
)
# Parts of the names of arguments and classes, without "_"
_REFUSED_OPTIMIZERS = ("galore", "apollo", "lomo", "layerwise", "grokadamw", "schedulefree", "prodigy", "dadapt")
# These compare the numbers of a weight. DeepSpeed flattens or divides weights in half precision and with ZeRO.
_OPTIMIZERS_OF_WHOLE_WEIGHTS = ("adafactor", "stableadamw", "muon", "shampoo", "soap", "lamb", "lars")
_REFUSED_GIVEN = {
    "compute_loss_func": "stages compute the loss of the Trainer's class in slices: pass a loss_fn to "
    "terapipe_ds.from_pretrained and train without Trainer",
    "model_init": "stages are cut once: pass model=",
    "optimizers": "they hold parameters of the whole model; give optimizer_cls_and_kwargs, optim=, or an optimizer in "
    "DeepSpeed's config",
}
# Nobody calls these: stages compute in the precision of DeepSpeed's config, and DeepSpeed clips.
_NOT_CALLED = ("compute_loss_context_manager", "autocast_smart_context_manager", "_clip_grad_norm")


def is_sft(kind: type) -> bool:
    """Return whether the class is TRL's SFTTrainer, or made of it."""
    return any(map(is_sft_itself, kind.__mro__))


def outer_arguments(kind: type, mixin: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return by name the arguments that the mixin of a class of Trainer got; its parents may pass them on unnamed."""
    parents = kind.__mro__[kind.__mro__.index(mixin) + 1 :]  # classes before the mixin have handed theirs on
    starts = (inspect.unwrap(vars(base)["__init__"]) for base in parents if "__init__" in vars(base))
    names = next(names for start in starts if "args" in (names := inspect.getfullargspec(start).args))
    return dict(zip(names[1:], args, strict=False)) | dict(kwargs)


def check_arguments(kind: type, mixin: type, given: Mapping[str, Any], ds_config: Mapping[str, Any]) -> None:
    """Raise ModelRefusedError for arguments or a class of Trainer that stages cannot serve. A collective.

    `mixin` is the class that gives the Trainer its stages; `ds_config` is DeepSpeed's config.
    """
    if not torch_dist.is_initialized():
        raise ModelRefusedError(
            "the ranks are not connected: start the script with the deepspeed launcher or torchrun, and on CPUs set "
            "TrainingArguments(use_cpu=True)"
        )
    with refused_on_all_ranks():
        of_call = *_of_class(kind, mixin), *_of_args(given["args"], ds_config), *_of_given(given)
        _refuse(kind, [*of_call, *conflicting_keys(ds_config)])
    refuse_other_arguments(given["args"])


def refuse_other_arguments(args: TrainingArguments, **more: Any) -> None:
    """Raise ValueError on every rank if one has other arguments than the first, or other values in `more`.

    A collective. Stages would train with other rates, or wait for one that evaluates, saves or ends alone. Arguments
    that a framework has added may be of a rank, such as an estimate of its own data.
    """
    values = {each.name: getattr(args, each.name) for each in _fields_of_libraries(args)}
    values |= {name: vars(each) for name, each in values.items() if dataclasses.is_dataclass(each)}
    compared = {name: each for name, each in values.items() if not _OF_RANK.search(name)}
    refuse_other_ranks(compared | more, "train differently", "TrainingArguments and data sets", gather)


def _of_class(kind: type, mixin: type) -> Iterator[str]:
    for base in kind.__mro__:
        is_of_trl = base.__module__.startswith("trl.") and base.__name__.endswith("Trainer")
        if is_of_trl and not base.__name__.startswith("_") and not is_sft_itself(base):
            yield (
                f"{base.__name__}: its loss compares whole sequences, or needs texts that the model generates; of "
                "TRL's trainers stages serve SFTTrainer alone"
            )
    for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
        for name in filter(vars(base).__contains__, _NOT_CALLED):
            yield f"{base.__name__}.{name}: DeepSpeed's config says how stages compute and clip: remove it"
        if "save_model" in vars(base) and base in kind.__mro__[kind.__mro__.index(mixin) + 1 :]:
            yield (
                f"{base.__name__}.save_model: the stages save, and it would not run; override _save, or save_model in "
                "a class above the mixin"
            )
    # the mixin wraps each method that overrides one of Trainer
    wrapped = [name for name, value in vars(mixin).items() if hasattr(value, "__wrapped__")]
    if missing := [name for name in wrapped if not hasattr(Trainer, name)]:
        yield f"the installed transformers has no {', '.join(missing)} in Trainer: install the tested version"


def _of_args(args: TrainingArguments, ds_config: Mapping[str, Any]) -> Iterator[str]:
    # the library's defaults, which a class of the user may change; an empty list is no value either
    defaults = {each.name: each.default for each in _fields_of_libraries(args)}
    for name, why in _REFUSED_ARGS.items():
        value = getattr(args, name, None)
        if value != defaults.get(name) and (value or defaults.get(name)):
            yield f"{name}: {why}"
    if args.label_names not in (None, ["labels"]):
        yield f'label_names={args.label_names}: a causal language model has "labels" alone; leave it out'
    if args.label_smoothing_factor and "num_items_in_batch" not in inspect.signature(LabelSmoother.__call__).parameters:
        yield (
            f"label_smoothing_factor: Trainer of transformers {transformers.__version__} adds up the means of "
            "micro-batches and ranks, and does not average them: install 5.15 or a newer version"
        )
    for name, (served, why) in _OF_LAUNCHER.items():
        if (value := os.environ.get(name) or served[0]).lower() not in served:
            yield f"{name}={value} of accelerate: {why}"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if _needs_more(optimizer, ds_config, is_half=args.bf16 or args.fp16):
        yield f"optim={optimizer}: it {_WHOLE}; give adamw_torch or another optimizer of torch"
    options = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    # TRL drops a "selective" that is off
    if unserved := sorted(name for name in {*options} - {"use_reentrant"} if name != "selective" or options[name]):
        names = "activation_checkpointing_kwargs or gradient_checkpointing_kwargs"
        yield f'{names} {unserved}: set "recompute" in the terapipe section'


def precision_of(args: TrainingArguments) -> str:
    """Return the mixed precision that Trainer gives accelerate: the argument, or else what `accelerate launch` says."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"


def _fields_of_libraries(args: TrainingArguments) -> list[dataclasses.Field[Any]]:
    """Return the fields of transformers' and TRL's arguments, the class that defines one last."""
    kinds = [kind for kind in type(args).__mro__ if dataclasses.is_dataclass(kind)]
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] in ("transformers", "trl")]
    return [each for kind in own for each in dataclasses.fields(kind)]


def _needs_more(optimizer: str, ds_config: Mapping[str, Any], is_half: bool = False) -> bool:
    """Return whether the optimizer of that name needs the whole model, or whole weights that DeepSpeed divides."""
    keys = "zero_optimization.stage", "tensor_parallel.autotp_size", "terapipe.strategy", "bf16.enabled", "fp16.enabled"
    values = [value_at(ds_config, key) for key in keys]
    divides = is_half or any(value for value in values if value != "auto")  # these are the arguments'
    refused = _REFUSED_OPTIMIZERS + _OPTIMIZERS_OF_WHOLE_WEIGHTS * divides
    return any(name in optimizer.lower().replace("_", "") for name in refused)


def check_optimizer(optimizer: torch.optim.Optimizer, module: torch.nn.Module, ds_config: Mapping[str, Any]) -> None:
    """Raise ModelRefusedError for an optimizer of the user's class or method that the stage `module` cannot serve."""
    own = {id(each) for each in module.parameters()}
    if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
        raise ModelRefusedError(
            "the optimizer has parameters that no stage trains, for example of the empty trainer.model. In "
            "create_optimizer take them from self.model.named_parameters(), or call super().create_optimizer(), and "
            'give no "params" in optimizer_cls_and_kwargs'
        )
    name = type(optimizer).__name__
    if _needs_more(name, ds_config) or hasattr(optimizer, "train"):
        raise ModelRefusedError(
            f"the optimizer {name} looks at whole weights or the whole model, which stages, ZeRO and half "
            "precision divide, or has other weights in evaluation: give one that treats each number by itself"
        )


def _of_given(given: Mapping[str, Any]) -> Iterator[str]:
    absent = (None, (None, None))
    yield from (f"{name}: {why}" for name, why in _REFUSED_GIVEN.items() if given.get(name) not in absent)
    model, template = given.get("model"), getattr(given["args"], "chat_template_path", None)
    is_named = isinstance(model, str | os.PathLike)
    if given.get("quantization_config") is not None and not is_named:
        yield (
            "quantization_config: the model is in memory already; give its folder or name, or "
            "terapipe_ds.skeleton(name, quantization_config=...)"
        )
    if (adapter := given.get("peft_config")) is not None:  # TRL puts it onto a skeleton first, on which peft would fail
        from terapipe_ds.models.hugging_face.weights.adapters import check_kind

        check_kind(adapter)
    is_file = template is None or str(template).endswith((".jinja", ".j2"))
    if not is_file and (is_named or hasattr(model, SOURCE)):
        yield (
            f"chat_template_path={template}: TRL would resize an embedding without values; give a .jinja file, or a "
            "model in memory"
        )


def check_trainer(trainer: Trainer) -> None:
    """Raise ModelRefusedError for what shows only in a Trainer that is built."""
    problems = [problem] if (problem := problem_of_loss(trainer)) is not None else []
    if getattr(trainer, "aux_loss_enabled", False):
        problems.append(
            "the loss over the routers of all layers, which are on several stages: router_aux_loss_coef=0.0"
        )
    if getattr(getattr(trainer.data_collator, "tokenizer", None), "padding_side", "right") == "left":
        problems.append('padding on the left, which later tokens would attend to: tokenizer.padding_side = "right"')
    _refuse(type(trainer), problems)


def problem_of_loss(trainer: Trainer) -> str | None:
    """Return why stages cannot compute the loss of a Trainer: something has given it another one; None if they can."""
    smoother = trainer.label_smoother
    if callable(trainer.compute_loss_func):  # TRL sets it to a text
        return f"Trainer.compute_loss_func: {_REFUSED_GIVEN['compute_loss_func']}"
    if smoother is not None and smoother != LabelSmoother(epsilon=trainer.args.label_smoothing_factor):
        return "label_smoother: stages smooth labels by label_smoothing_factor: set that argument instead"
    return None


def _refuse(kind: type, problems: Sequence[str]) -> None:
    if problems:
        raise ModelRefusedError(f"pipeline stages cannot serve this {kind.__name__}: {'; '.join(problems)}")


def stock_of(kind: type, name: str) -> type:
    """Return the class of transformers or TRL whose method a Trainer has without the user's classes."""
    return next(base for base in kind.__mro__ if name in vars(base) and (base is Trainer or is_sft_itself(base)))


def is_sft_itself(kind: type) -> bool:
    """Return whether the class is TRL's SFTTrainer, and not made of it."""
    return (kind.__module__, kind.__name__) == ("trl.trainer.sft_trainer", "SFTTrainer")
