"""The model and the micro-batch that a command is asked to run on one device: of ``--model`` and ``--config``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from terapipe_ds.commands import CommandError, read_json
from terapipe_ds.messages import show_value

MAX_TOKENS, MAX_THREADS = 2**26, 4096


def offline_job(arguments: argparse.Namespace, ds_config: dict[str, Any], num_stages: int, **options: Any) -> Any:
    """``OfflineJob`` with random tokens for ``--model``, ``--sequence-length`` and ``--threads``."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    import torch

    from terapipe_ds.runtime.profiling.one_device import OfflineJob

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    config, layers, loss_fn = model_of(arguments.model, dtype_of(ds_config))
    length = arguments.sequence_length or config.max_sequence_length
    shape = (rows_of(ds_config, length), length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return OfflineJob(
        layers,
        loss_fn,
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        num_stages,
        activation_checkpoint_interval=checkpoint_interval_of(ds_config),
        **options,
    )


def _object(ds_config: dict[str, Any], key: str) -> dict[str, Any]:
    value = ds_config.get(key) or {}
    if not isinstance(value, dict):
        raise CommandError(f"{key} = {show_value(value)} in --config: give an object")
    return value


def checkpoint_interval_of(ds_config: dict[str, Any]) -> int:
    """After how many layers activations are checkpointed; 0: never."""
    value = _object(ds_config, "pipeline").get("activation_checkpoint_interval", 0)
    if type(value) is not int or value < 0:
        raise CommandError(
            f"pipeline.activation_checkpoint_interval = {show_value(value)} in --config: give a number >= 0"
        )
    return value


def number_of(ds_config: dict[str, Any], key: str) -> int:
    """A number of the config, 1 where it has none."""
    value = ds_config.get(key, 1)
    if type(value) is not int or value < 1:
        raise CommandError(f"{key} = {show_value(value)} in --config: give a number >= 1")
    return value


def rows_of(ds_config: dict[str, Any], length: int) -> int:
    """Sequences of a micro-batch."""
    rows = number_of(ds_config, "train_micro_batch_size_per_gpu")
    if rows * length > MAX_TOKENS:
        many = f"train_micro_batch_size_per_gpu = {show_value(rows)} in --config with {length} tokens each"
        raise CommandError(f"{many} is too much to measure: give at most {MAX_TOKENS} tokens altogether")
    return rows


def dtype_of(ds_config: dict[str, Any]) -> str:
    """What the config trains in."""
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if _object(ds_config, key).get("enabled") is True:
            return dtype
    return "float32"


def model_of(name: str, dtype: str) -> tuple[Any, Any, Any]:
    """(config, layers, loss) of ``models.gpt``."""
    from terapipe_ds.models.gpt import GPTConfig, GPTConfigError, gpt_layers, gpt_loss

    if name.endswith(".json"):
        fields = read_json(name, "--model")
        known = list(GPTConfig.model_fields)
        unknown = next((key for key in fields if key not in known), None)
        if unknown is not None:
            text = f"unknown field {show_value(unknown)}; give some of {', '.join(known)}"
            raise CommandError(f"--model {name}: {text}")
        try:
            config = GPTConfig(**{"dtype": dtype, **fields})
        except GPTConfigError as error:
            raise CommandError(f"--model {name}: {error}") from None
    else:
        config = GPTConfig.from_name(name, dtype=dtype)
    return config, gpt_layers(config), gpt_loss


class StdoutToStderr:
    """DeepSpeed prints how it partitions on stdout, where --json has its place."""

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, sys.stderr

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._stdout
