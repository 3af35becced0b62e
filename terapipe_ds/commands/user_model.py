"""Read the model and the config that a command takes from the files of `--model` and `--config`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands.options import Options, Text, option
from terapipe_ds.files.user_json import CommandError, DeepSpeedJson, read_json
from terapipe_ds.messages import show_value

if TYPE_CHECKING:
    from terapipe_ds.config import TeraPipeConfig
    from terapipe_ds.models.gpt import GPTConfig
    from terapipe_ds.runtime.profiling.one_device import OfflineJob

MAX_TOKENS, MAX_THREADS = 2**26, 4096


def read_config(path: str) -> dict[str, Any]:
    """Return the DeepSpeed JSON of `--config`; name on stderr the keys that are nearly some of DeepSpeed's."""
    from terapipe_ds.config.unknown_keys import misspelt_keys

    ds_config = read_json(path, "--config")
    for text in misspelt_keys(ds_config):
        print(f"terapipe: note: --config {path}: {text}", file=sys.stderr)
    return ds_config


class ModelOptions(Options):
    config: Text = option("the DeepSpeed config", "DS.json", required=True)
    model: Text = option("a named size, or a JSON file", "NAME_OR_JSON", required=True)
    sequence_length: int | None = option("tokens (default: the model's longest sequence)", "L", ge=1, le=MAX_TOKENS)
    threads: int | None = option("CPU threads of torch (default: torch's choice)", "N", ge=1, le=MAX_THREADS)

    def settings(self) -> tuple[TeraPipeConfig, DeepSpeedJson]:
        """Return the `terapipe` section of the config, and its other keys."""
        from terapipe_ds.config import TeraPipeConfig
        from terapipe_ds.config.strategy_file import sizes_of

        ds_config = read_config(self.config)
        section = TeraPipeConfig.from_deepspeed(ds_config)
        sizes = {} if section.planned is None else sizes_of(section.planned)
        return section, DeepSpeedJson(ds_config | sizes)

    @staticmethod
    def passed_over(section: TeraPipeConfig, keys: DeepSpeedJson, **more: bool) -> str:
        """Return the settings that change layers in a job, and that layers without an engine lack; "" for none.

        Args:
            more: other keys of the section, and whether they are set.
        """
        settings = {f"terapipe.{name}": is_set for name, is_set in more.items()} | {
            "terapipe.compile": section.compile,
            "terapipe.documents": section.documents != "off",
            "terapipe.offload_activations": section.offload_activations,
            "torch_autocast.enabled": keys.is_on("torch_autocast.enabled"),
            "sequence_parallel_size": (keys.number("sequence_parallel_size") or 1) > 1,
            "tensor_parallel.autotp_size": (keys.number("tensor_parallel.autotp_size", least=0) or 1) > 1,
        }
        return " and ".join(f"{name} = {show_value(keys.at(name))}" for name, is_set in settings.items() if is_set)

    def job(self, keys: DeepSpeedJson, num_stages: int, **more: Any) -> OfflineJob:
        """Return the model with random tokens for it."""
        os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
        import torch

        from terapipe_ds.models.gpt import gpt_layers, gpt_loss
        from terapipe_ds.runtime.profiling.one_device import OfflineJob

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        config = model_of(self.model, keys.dtype)
        length = self.sequence_length or config.max_sequence_length
        rows = keys.micro_batch
        if rows * length > MAX_TOKENS:
            many = f"train_micro_batch_size_per_gpu = {show_value(rows)} in --config with {length} tokens each"
            raise CommandError(f"{many} is too much to measure: give at most {MAX_TOKENS} tokens altogether")
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        more["activation_checkpoint_interval"] = keys.fixed_number("pipeline.activation_checkpoint_interval", 0)
        return OfflineJob(gpt_layers(config), gpt_loss, inputs, labels, num_stages, **more)


def model_of(name: str, dtype: str) -> GPTConfig:
    """Return the model that `--model` names, by its size or by a JSON file."""
    from terapipe_ds.models.gpt import GPTConfig, GPTConfigError

    if not name.endswith(".json"):
        return GPTConfig.from_name(name, dtype=dtype)
    try:
        return GPTConfig(**{"dtype": dtype, **read_json(name, "--model")})
    except GPTConfigError as error:
        raise CommandError(f"--model {name}: {error}") from None
