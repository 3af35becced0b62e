"""``terapipe profile``: measure what the slices of a model take on this device."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from terapipe_ds.commands import CommandError, check_counts, check_output, read_json
from terapipe_ds.plan import show_value

HELP = "measure what slices of a model take on one device"
DESCRIPTION = (
    "Measure forward and backward seconds of slices of each part of a model, on one device, as training runs them. "
    "The file serves `terapipe plan --profile` and, on the same device, `terapipe.planner.profile` of a config."
)
EXAMPLES = """\
  terapipe profile --config ds.json --model mini --stages 2 --out profile.json
  terapipe profile --config ds.json --model my_model.json --stages 8 --sequence-length 8192 --out profile.json
  terapipe profile --config ds.json --model tiny --stages 2 --out profile.json --json    (the samples on stdout)

A model is a named size (terapipe plan --help lists them) or a JSON file with fields of models.gpt.GPTConfig, such as
{"hidden_size": 512, "num_layers": 8, "num_heads": 8}. The config gives the micro-batch size, accumulation, precision,
activation checkpointing and granularity.
"""


MAX_TOKENS, MAX_THREADS = 2**26, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--config", required=True, metavar="DS.json", help="the DeepSpeed config")
    parser.add_argument("--model", required=True, metavar="NAME_OR_JSON", help="a named size, or a JSON file")
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write the profile")
    parser.add_argument("--stages", type=int, default=1, metavar="K", help="pipeline stages (default: 1)")
    parser.add_argument(
        "--sequence-length", type=int, metavar="L", help="tokens (default: the model's longest sequence)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print the profile on stdout as well")


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the file, and say how good the numbers are."""
    check_counts(arguments, {"stages": MAX_THREADS, "sequence_length": MAX_TOKENS, "threads": MAX_THREADS})
    check_output(arguments.out, "--out")
    if not Path(arguments.out).absolute().parent.is_dir():  # before minutes of measuring
        raise CommandError(f"--out {arguments.out}: there is no such folder; give a path in one that exists")
    ds_config = read_json(arguments.config, "--config")
    from terapipe_ds.config import TeraPipeConfig

    section = TeraPipeConfig.from_deepspeed(ds_config)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    import torch

    from terapipe_ds.cost_model import CostModel
    from terapipe_ds.runtime.offline import OfflineJob, profile_model

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    config, layers, loss_fn = _model(arguments.model, _dtype(ds_config))
    length = arguments.sequence_length or config.max_sequence_length
    rows = _rows(ds_config, length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
    job = OfflineJob(
        layers, loss_fn, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), arguments.stages,
        num_micro_batches=_number(ds_config, "gradient_accumulation_steps"),
        granularity_tokens=min(section.granularity_tokens, length),
        activation_checkpoint_interval=_checkpoint_interval(ds_config),
    )  # fmt: skip
    with _Bar(arguments.stages) as bar, _StdoutToStderr():
        profile = profile_model(job, bar, _warn)
    profile.save(arguments.out)
    if arguments.json:
        print(profile.to_json(), end="")
        return
    print(f"{arguments.out}: {profile.key.model} on {profile.key.device}, {profile.key.dtype}, {length} tokens")
    for model in CostModel.from_profile(profile):
        whole = f"{model.forward_s(length, 0):.4g} s forward, {model.backward_s(length, 0):.4g} s backward"
        print(f"part {model.part_id}: {whole} for a whole sequence")
        print(f"  {model.report}".replace("\n", "\n  "))


def _object(ds_config: dict[str, Any], key: str) -> dict[str, Any]:
    value = ds_config.get(key) or {}
    if not isinstance(value, dict):
        raise CommandError(f"{key} = {show_value(value)} in --config: give an object")
    return value


def _checkpoint_interval(ds_config: dict[str, Any]) -> int:
    value = _object(ds_config, "pipeline").get("activation_checkpoint_interval", 0)
    if type(value) is not int or value < 0:
        raise CommandError(
            f"pipeline.activation_checkpoint_interval = {show_value(value)} in --config: give a number >= 0"
        )
    return value


def _number(ds_config: dict[str, Any], key: str) -> int:
    value = ds_config.get(key, 1)
    if type(value) is not int or value < 1:
        raise CommandError(f"{key} = {show_value(value)} in --config: give a number >= 1")
    return value


def _rows(ds_config: dict[str, Any], length: int) -> int:
    rows = _number(ds_config, "train_micro_batch_size_per_gpu")
    if rows * length > MAX_TOKENS:
        many = f"train_micro_batch_size_per_gpu = {show_value(rows)} in --config with {length} tokens each"
        raise CommandError(f"{many} is too much to measure: give at most {MAX_TOKENS} tokens altogether")
    return rows


def _dtype(ds_config: dict[str, Any]) -> str:
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if _object(ds_config, key).get("enabled") is True:
            return dtype
    return "float32"


def _model(name: str, dtype: str) -> tuple[Any, Any, Any]:
    """(config, layers, loss) of ``models.gpt``."""
    from terapipe_ds.models.gpt import GPTConfig, GPTConfigError, gpt_layers, gpt_loss

    if name.endswith(".json"):
        fields = read_json(name, "--model")
        known = [field.name for field in dataclasses.fields(GPTConfig)]
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


def _warn(text: str) -> None:
    print(f"terapipe profile: warning: {text}", file=sys.stderr)


class _StdoutToStderr:
    """DeepSpeed prints how it partitions on stdout, where --json has its place."""

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, sys.stderr

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._stdout


class _Bar:
    """A progress bar over all parts, where somebody looks at a terminal."""

    def __init__(self, num_parts: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=100 * num_parts, desc="measuring", unit="%", disable=None, leave=False)

    def __enter__(self) -> Any:
        return lambda part_id, share: self._bar.update(round(100 * (part_id + share)) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
