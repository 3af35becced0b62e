"""List the keys of DeepSpeed's own config that exclude an enabled `terapipe` section, and why."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.files.user_json import is_on, value_at
from terapipe_ds.messages import show_value


@dataclass(frozen=True)
class Conflict:
    """Describe a key of DeepSpeed's own config that an enabled section excludes."""

    key: str
    is_set: Callable[[Any], bool]
    why: str
    fix: str


def _number(value: Any) -> float:
    """Return the number that a value is, or is the text of; NaN for others, which DeepSpeed itself refuses."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _offloads(value: Any) -> bool:
    return value.get("device") not in (None, "none") if isinstance(value, dict) else _is_given(value)


def _has_keys_of(value: Any, names: Sequence[str]) -> bool:
    return value is None or (isinstance(value, dict) and value.keys() <= {*names})


_OF_PIPELINE = ("stages", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant")

_ONLY_ZERO_3 = "only ZeRO 3 offloads parameters, and a pipeline cannot use ZeRO 3"
_WHOLE_SEQUENCE = "it needs the tokens of a whole sequence at once, and a slice has only some of them"
CONFLICTS = (
    Conflict("zero_optimization.stage", lambda value: _number(value) > 1,
             "ZeRO 2 and 3 communicate in every backward pass, and slices bring many of them to one step",
             "set it to 0 or 1"),
    Conflict("zero_optimization.offload_param", _offloads, _ONLY_ZERO_3, "remove it"),
    Conflict("zero_optimization.cpu_offload_param", is_on, _ONLY_ZERO_3, "remove it"),
    Conflict("zero_optimization.zenflow", _is_given,
             "ZenFlow counts backward passes, and slices bring many of them to one step", "remove it"),
    Conflict("compile.deepcompile", is_on,
             "DeepCompile plans for one forward and one backward pass per micro-batch", "set it to false"),
    Conflict("tensor_parallel", lambda value: not _has_keys_of(value, ["autotp_size"]),
             "layers are divided by the plan of transformers, when they are built", "keep autotp_size alone"),
    Conflict("pipeline", lambda value: not _has_keys_of(value, [*_OF_PIPELINE, "partition", "seed_layers"]),
             "it is no object, or has a key that DeepSpeed silently ignores",
             f"give an object with the keys {', '.join(_OF_PIPELINE)}"),
    Conflict("pipeline.partition", lambda value: value not in (None, "auto", "best"),  # those are in many examples
             "DeepSpeed silently ignores it",
             "give partition_method to PipelineModule, or set terapipe.partition to the first layer of each part and "
             "the number of layers"),
    Conflict("pipeline.activation_checkpoint_interval",
             lambda value: isinstance(value, int | float) and not (isinstance(value, int) and value >= 0),
             "DeepSpeed ignores a negative number, and fails with a fraction", "set it to a number of layers, or to 0"),
    Conflict("expert_parallel.enabled", is_on, f"auxiliary losses and expert capacity: {_WHOLE_SEQUENCE}",
             "set it to false"),
    Conflict("hybrid_engine.enabled", is_on, "DeepSpeed's hybrid engine is an engine of its own, without a pipeline",
             "set it to false"),
    Conflict("data_efficiency.data_routing.random_ltd.enabled", is_on,
             f"random layer token drop: {_WHOLE_SEQUENCE}", "set it to false"),
    Conflict("progressive_layer_drop.enabled", is_on,
             "it may drop a layer for one slice of a sequence and keep it for another", "remove the section"),
    Conflict("sparse_attention", _is_given, f"sparse attention: {_WHOLE_SEQUENCE}", "remove the section"),
    Conflict("eigenvalue.enabled", is_on, "it takes a second backward pass through the graph of a whole micro-batch",
             "remove the section"),
    Conflict("autotuning.enabled", is_on,
             "DeepSpeed's autotuner tries ZeRO stages and micro-batch sizes, and ends the job in the midst of a batch",
             "set it to false"),
    Conflict("managed_gradient_accumulation", lambda value: isinstance(value, int | float) and not value,
             "DeepSpeed's pipelines decide themselves when the backward passes of a step are complete",
             "remove it or set it to true"),
)  # fmt: skip


# sections and keys that give "auto" a meaning, and sections that may have it as a name
_OWN_AUTO = ("terapipe", "autotuning")
_OWN_AUTO_KEYS = {("data_types", "keep_in_fp32_modules"), ("pipeline", "stages"), ("pipeline", "partition")}
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


def unfilled_in(ds_config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the way to each key whose value "auto" waits for transformers' Trainer to fill it in."""
    for key, value in ds_config.items():
        inner = (*path, str(key))
        is_name = inner[0] in _MONITORS and inner[1:] != ("enabled",)
        if value == "auto" and inner not in _OWN_AUTO_KEYS and not is_name:
            yield inner
        elif isinstance(value, Mapping) and inner[0] not in _OWN_AUTO:
            yield from unfilled_in(value, inner)
        elif isinstance(value, list | tuple) and "auto" in value:
            yield inner


def without_auto(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config without the keys that wait for Trainer."""
    config = copy.deepcopy(dict(ds_config))
    for *sections, name in list(unfilled_in(config)):
        functools.reduce(operator.getitem, sections, config).pop(name)
    return config


def problem_of_auto(ds_config: Mapping[str, Any]) -> str | None:
    """Report the keys that hold "auto" outside of Trainer; return None where none does."""
    if not (keys := list(map(".".join, unfilled_in(ds_config)))):
        return None
    return (
        f'{", ".join(keys)} = "auto": only transformers\' Trainer fills such values in, and not for all keys; '
        "DeepSpeed itself ignores them or fails; set each value, or remove the key for DeepSpeed's default"
    )


# DeepSpeed converts text in most sections to numbers and switches, but takes these values unchanged
_TAKEN_UNCHANGED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
    "gradient_clipping", "gradient_predivide_factor", "prescale_gradients", "wall_clock_breakdown",
    "flops_profiler.enabled", "pipeline.activation_checkpoint_interval", "pipeline.use_reentrant",
)  # fmt: skip


def problem_of_quotes(ds_config: Mapping[str, Any]) -> str | None:
    """Report numbers and switches that are text, and clipping by null; return None without any.

    DeepSpeed would fail with a TypeError, in the first step on some ranks alone, or take "false" for true.
    """
    found = {key: value_at(ds_config, key) for key in _TAKEN_UNCHANGED}
    found = {key: value for key, value in found.items() if isinstance(value, str) and value != "auto"}
    if ds_config.get("gradient_clipping", 0) is None:
        found["gradient_clipping"] = None
    for section in ("optimizer.params", "scheduler.params"):
        params = value_at(ds_config, section)
        for key, value in params.items() if isinstance(params, Mapping) else ():
            several = value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(each, str) and math.isfinite(_number(each)) for each in several):
                found[f"{section}.{key}"] = value
    if not found:
        return None
    shown = ", ".join(f"{key} = {show_value(value)}" for key, value in found.items())
    return (
        f"{shown}: text or null, where DeepSpeed computes with a number, or reads any text as true; write a number, "
        "true or false without quotes, or leave the key out"
    )


def conflicting_keys(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each conflicting key of a config: its value, the reason, the fix."""
    for conflict in CONFLICTS:
        value = value_at(ds_config, conflict.key)
        if conflict.is_set(value):
            shown = f"{conflict.key} = {show_value(value)}"
            yield f"{shown} cannot be combined with terapipe.enabled: {conflict.why}; {conflict.fix}"
