"""Refuse misspelt keys of the `terapipe` section and values that its models do not take.

DeepSpeed ignores sections that it does not know, and all that they hold.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from terapipe_ds.config.values import SECTION, TeraPipeConfigError, shown_value
from terapipe_ds.files.user_json import value_at
from terapipe_ds.messages import closest, nearest, show_key, show_value

Path = tuple[Any, ...]  # of a key, which need not be a word
Models = Mapping[Path, type[BaseModel]]


def refuse_misspelt_section(ds_config: Mapping[str, Any]) -> None:
    """Refuse a section that DeepSpeed would silently ignore: the run would go on without slices."""
    for key, value in ds_config.items():
        is_other = isinstance(key, str) and key != SECTION and isinstance(value, dict)
        if is_other and closest(key.strip().lower(), [SECTION], cutoff=0.8):
            shown = f"{show_key(key)} = {show_value(value)}"
            raise TeraPipeConfigError(f"{shown}: unknown section; did you mean {SECTION}?")


# Names that DeepSpeed 0.19.8 looks for, in the whole config and in sections whose other names it ignores
_READ: dict[str, tuple[str, ...]] = {
    "": (
        SECTION, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer",
        "scheduler", "fp16", "bf16", "bfloat16", "torch_autocast", "zero_optimization", "pipeline", "tensor_parallel",
        "sequence_parallel_size", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor",
        "gradient_allreduce_op", "data_types", "communication_data_type", "seq_parallel_communication_data_type",
        "activation_checkpointing", "checkpoint", "data_efficiency", "flops_profiler", "comms_logger", "compile",
        "tensorboard", "wandb", "csv_monitor", "comet", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "elasticity", "aio",
        "timers", "dump_state", "disable_allgather", "managed_gradient_accumulation", "expert_parallel", "log_level",
        "curriculum_learning", "compression_training", "autotuning", "hybrid_engine", "weight_quantization",
    ),
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
    "checkpoint": ("tag_validation", "load_universal", "use_node_local_storage", "parallel_write"),
    "activation_checkpointing": (
        "partition_activations", "contiguous_memory_optimization", "number_checkpoints", "cpu_checkpointing", "profile",
        "synchronize_checkpoint_boundary",
    ),
}  # fmt: skip


_MEANT = {"bfloat16": "bf16", "float16": "fp16"}
"""The names to advise for one that DeepSpeed reads as an old name, and for one that it never reads."""


def misspelt_keys(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of DeepSpeed's own that is nearly one it reads: it ignores others without a word."""
    if ds_config.get("bf16") is not None and "bfloat16" in ds_config:
        yield "bfloat16: DeepSpeed ignores this key beside bf16; leave one of them out"
    for section, known in _READ.items():
        keys = value_at(ds_config, section) if section else ds_config
        for key in keys if isinstance(keys, Mapping) else ():
            names = known if section else (*known, *_MEANT)
            close = None if key in known else closest(show_key(key).strip().lower(), names, cutoff=0.84)
            # "_fp16" and "checkpoint_dir" have a whole name and more: a key taken out, or one of the user's own
            if close is not None and not re.search(rf"[^a-z0-9\s]{close}$|^{close}[^a-z0-9\s]", show_key(key)):
                before = f"{section}." if section else ""
                meant = _MEANT.get(close, close)
                yield f"{before}{show_key(key)}: DeepSpeed ignores this key; did you mean {before}{meant}?"


@functools.cache
def models_of(root: type[BaseModel]) -> Models:
    """Return the models of the section and of its objects, by the path of their key."""
    objects = {(name,): field.annotation for name, field in root.model_fields.items()}
    inner = {path: type_ for path, type_ in objects.items() if isinstance(type_, type) and issubclass(type_, BaseModel)}
    return {(): root} | inner


def take_known(section: dict[Any, Any], models: Models, problems: dict[Path, str], path: Path = ()) -> dict[str, Any]:
    """Return `section` without its unknown keys, and add these to `problems`. A key need not be a string."""
    known: dict[str, Any] = {}
    for key, value in section.items():
        if key not in models[path].model_fields:
            problems[*path, key] = unknown_key((*path, key), value, models)
        else:
            is_model = (*path, key) in models and isinstance(value, dict)
            known[key] = take_known(value, models, problems, (*path, key)) if is_model else value
    return known


def problems_of(error: ValidationError, section: Any, models: Models) -> dict[Path, str]:
    """Return pydantic's errors, one per key: a union fails once per member, a list once per entry."""
    problems = {}
    for detail in error.errors(include_input=False, include_context=False, include_url=False):
        location = detail["loc"]
        path = location[:2] if location[:1] in models and len(location) > 1 else location[:1]
        value = functools.reduce(operator.getitem, path, section)
        allowed = str(models[path[:-1]].model_fields[str(path[-1])].description)
        hint = nearest(value, _names_in(allowed)) if isinstance(value, str) else ""
        problems[path] = f"{shown_value(value, *path)}: must be {allowed}{hint}"
    return problems


def _names_in(allowed: str) -> list[str]:
    """Return the names among the allowed values; other words describe."""
    listed = allowed.removeprefix("one of ")
    return re.findall(r'"([\w-]+)"', allowed) if listed == allowed else re.split(", (?:or )?", listed)


def unknown_key(path: Path, value: Any, models: Models) -> str:
    known = {key: (*parent, key) for parent, model in models.items() for key in model.model_fields}
    close = closest(show_key(path[-1]).strip().lower(), known)
    hint = f"known keys: {', '.join(models[path[:-1]].model_fields)}"
    if close is not None:
        hint = f"did you mean {'.'.join([SECTION, *known[close]])}?"
    return f"{shown_value(value, *map(show_key, path))}: unknown key; {hint}"
