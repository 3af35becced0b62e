"""Read JSON that the user wrote for a command: the DeepSpeed config, the fields of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import JsonError, parse_hjson, parse_json
from terapipe_ds.messages import show_value

DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32", "fp64": "float64"}
"""Short names of dtypes, and torch's."""

_ON = {
    *("bf16.check_grad_overflow", "comms_logger.prof_all", "flops_profiler.detailed", "managed_gradient_accumulation"),
    *("pipeline.grad_partitioned", "pipeline.pipe_partitioned", "pipeline.use_reentrant", "gradient_clipping"),
    *("optimizer.params.adam_w_mode", "optimizer.params.bias_correction", "optimizer.params.fp32_optimizer_states"),
    *("timers.throughput.enabled", "timers.throughput.synchronized", "zero_force_ds_cpu_optimizer"),
    *("zero_optimization.allgather_partitions", "zero_optimization.compute_grad_norm"),
    *("zero_optimization.contiguous_gradients", "zero_optimization.ignore_unused_parameters"),
    *("zero_optimization.load_from_fp32_weights", "zero_optimization.memory_efficient_linear"),
    *("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.override_module_apply"),
    *("zero_optimization.reduce_scatter", "zero_optimization.use_multi_rank_bucket_allreduce"),
}
"""Switches that are on, and numbers that are 1, in DeepSpeed 0.19.8 where the JSON does not say."""
_ABSENT = {
    **{"sequence_parallel_size": 1, "tensor_parallel.autotp_size": 1},
    "zero_optimization.offload_optimizer.device": "none",
}

_COMMENT = re.compile(rb"(^|[\s,])(#|//|/\*)")


class CommandError(ValueError):
    """Tell why a command cannot do what the user asked, and how to fix it."""


def is_on(value: Any) -> bool:
    """Return whether a switch of DeepSpeed's config is on."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "t", "yes", "y", "on", "1")
    return isinstance(value, int | float) and value == 1


def says_nothing(key: str, value: Any) -> bool:
    """Return whether a value means the same as no key at all."""
    return value in (None, "auto", _ABSENT.get(key)) or value == (key in _ON)


def value_at(ds_config: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key such as `zero_optimization.stage`; None where an object on the way lacks it."""
    value: Any = ds_config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_new_names(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config with new names and forms for the old ones that DeepSpeed 0.19.8 still reads.

    A `bfloat16` beside `bf16` stays: DeepSpeed ignores it.
    """
    config = dict(ds_config)
    if config.get("bf16") is None and "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping) and "cpu_offload" in zero and "offload_optimizer" not in zero:
        device = "cpu" if is_on(zero["cpu_offload"]) else "none"
        others = {key: value for key, value in zero.items() if key != "cpu_offload"}
        config["zero_optimization"] = others | {"offload_optimizer": {"device": device}}
    return config


def read_json(path: str, option: str) -> dict[str, Any]:
    """Return the object in a JSON file that `option` names; a DeepSpeed config may have comments and old names.

    Raise CommandError if it holds no object, and OSError if it cannot be read.
    """
    data = read_bytes(path)
    try:
        content = _parse_config(data) if option == "--config" else parse_json(data)
    except JsonError as error:
        raise CommandError(f"{option} {path} is no JSON: {error}; make it one JSON object") from None
    if not isinstance(content, dict):
        raise CommandError(f"{option} {path} holds {show_value(content)}: give an object")
    return with_new_names(content) if option == "--config" else content


def _parse_config(data: bytes) -> Any:
    """Return the document, which may have comments; then the error must not blame the first of them."""
    try:
        return parse_json(data)
    except JsonError as error:
        try:
            return parse_hjson(data)
        except ImportError:
            raise error from None
        except JsonError as other:
            raise (other if _COMMENT.search(data) else error) from None


@dataclasses.dataclass(frozen=True)
class DeepSpeedJson:
    """Hold the content of the file of `--config`, with new names. A key `a.b` is key `b` of the object `a`.

    All methods raise CommandError where a key has an impossible value.
    """

    content: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", with_new_names(self.content))

    def number(self, key: str, least: int = 1) -> int | None:
        """Return an integer; None where the config has none, or "auto"."""
        value = self._value(key)
        if value in (None, "auto"):
            return None
        if type(value) is not int or value < least:
            raise CommandError(f"{key} = {show_value(value)} in --config: give an integer >= {least}")
        return value

    def fixed_number(self, key: str, least: int = 1) -> int:
        """Return an integer, or `least` where the config has none; refuse "auto", which nothing fills in."""
        if self._value(key) == "auto":
            raise CommandError(f"{key} = 'auto' in --config: give an integer >= {least}")
        number = self.number(key, least)
        return least if number is None else number

    @property
    def micro_batch(self) -> int:
        """Return the sequences of a micro-batch; refuse a config that gives them by `train_batch_size` alone."""
        name = "train_micro_batch_size_per_gpu"
        if self._value(name) is None and self.number("train_batch_size") is not None:
            why = "train_batch_size counts the sequences of all replicas, and this command does not know their number"
            raise CommandError(f"{name} is missing in --config: {why}; give both")
        return self.fixed_number(name)

    def at(self, key: str) -> Any:
        return value_at(self.content, key)

    def is_on(self, key: str) -> bool:
        """Return whether a switch is on, in any form that DeepSpeed takes."""
        return is_on(self._value(key))

    @property
    def precision(self) -> str | None:
        """Return the enabled one of "bf16" and "fp16"."""
        return next((name for name in ("bf16", "fp16") if self.is_on(f"{name}.enabled")), None)

    @property
    def leaves_precision(self) -> bool:
        """Return whether Trainer or `torch.autocast` decides the precision."""
        enabled = [self._value(f"{name}.enabled") for name in ("bf16", "fp16")]
        return "auto" in enabled or self.is_on("torch_autocast.enabled")

    @property
    def dtype(self) -> str:
        """Return torch's name of the dtype in training."""
        return DTYPE_NAMES[self.precision or "fp32"]

    def _value(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        content = (self.content.get(section) or {}) if section else self.content
        if not isinstance(content, dict):
            raise CommandError(f"{section} = {show_value(content)} in --config: give an object")
        return content.get(name)
