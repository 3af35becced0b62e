"""``terapipe profile``: measure what the slices of a model take on this device."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from terapipe_ds.commands import check_counts, check_output, read_json
from terapipe_ds.commands.user_model import MAX_THREADS, MAX_TOKENS, StdoutToStderr, number_of, offline_job

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
    ds_config = read_json(arguments.config, "--config")
    from terapipe_ds.config import TeraPipeConfig

    section = TeraPipeConfig.from_deepspeed(ds_config)
    job = offline_job(
        arguments, ds_config, arguments.stages, num_micro_batches=number_of(ds_config, "gradient_accumulation_steps")
    )
    length = job.inputs.shape[1]
    job = dataclasses.replace(job, granularity_tokens=min(section.granularity_tokens, length))
    from terapipe_ds.costs.fitted import CostModel
    from terapipe_ds.runtime.profiling.one_device import profile_model

    with _Bar(arguments.stages) as bar, StdoutToStderr():
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


def _warn(text: str) -> None:
    print(f"terapipe profile: warning: {text}", file=sys.stderr)


class _Bar:
    """A progress bar over all parts, where somebody looks at a terminal."""

    def __init__(self, num_parts: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=100 * num_parts, desc="measuring", unit="%", disable=None, leave=False)

    def __enter__(self) -> Any:
        return lambda part_id, share: self._bar.update(round(100 * (part_id + share)) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
