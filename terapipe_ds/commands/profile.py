"""Run `terapipe profile`: measure the seconds of a model's slices on this device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from terapipe_ds.commands.options import JsonOutput, Output, Progress, json_option, option, write_json
from terapipe_ds.commands.user_model import MAX_THREADS, ModelOptions
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.schedule.show import many

HELP = "measure what slices of a model take on one device"
DESCRIPTION = (
    "Measure forward and backward seconds of slices of each part of a model, on one device, as training runs them. "
    "The file serves `terapipe plan --profile` and, on the same device, `terapipe.planner.profile` of a config."
)
EXAMPLES = """\
  terapipe profile --config ds.json --model mini --stages 2 --out profile.json
  terapipe profile --config ds.json --model my_model.json --stages 8 --sequence-length 8192 \\
                   --out profile.json
  terapipe profile --config ds.json --model tiny --stages 2 --json    # the samples on stdout

A model is a named size (a wrong one lists all) or a JSON file with fields of
models.gpt.GPTConfig, such as {"hidden_size": 512, "num_layers": 8, "num_heads": 8}. The config
gives the micro-batch size, accumulation, precision, activation checkpointing and granularity.
"""


class ProfileOptions(ModelOptions):
    out: Output | None = option("where to write the profile; --json needs none", "FILE")
    stages: int = option("pipeline stages (default: those of the config, or 1)", "K", default=1, ge=1, le=MAX_THREADS)
    as_json: JsonOutput | None = json_option("the profile")


def run(options: ProfileOptions) -> None:
    if options.out is None and options.as_json is None:
        raise CommandError("--out is missing: give it, or print the profile by --json")
    section, keys = options.settings()
    options = options.filled({"stages": keys.number("pipeline.stages") or 1})
    job = options.job(keys, options.stages, num_micro_batches=keys.fixed_number("gradient_accumulation_steps"))
    length = job.inputs.shape[1]
    granularity = min(section.granularity_tokens, length)
    bounds = _bounds(section.partition, options.stages, job.layers)
    if passed := options.passed_over(section, keys, keep_attention=section.keep_attention):
        raise CommandError(
            f"{passed} in --config: such layers are timed in the running job alone; set planner.profile to "
            '"measure", or leave the key out'
        )
    recomputing = section.recomputing_stages(options.stages, keys.content)
    job = dataclasses.replace(job, granularity_tokens=granularity, bounds=bounds, recomputing=recomputing)
    from terapipe_ds.costs.fitted import CostModel
    from terapipe_ds.runtime.profiling.one_device import profile_model

    # DeepSpeed prints how it partitions on stdout, the place of --json
    with Progress() as progress, redirect_stdout(sys.stderr):
        profile = profile_model(
            job,
            lambda part_id, share: progress.callback("measuring", part_id + share, options.stages),
            lambda text: print(f"terapipe profile: warning: {text}", file=sys.stderr),
        )
    if options.out is not None:
        profile.save(options.out)
    if write_json(lambda: profile.to_json().rstrip(), options.as_json):
        return
    file, key = options.out or options.as_json, profile.key
    print(f"{file}: {key.model} on {key.device}, {key.dtype}, {length} tokens")
    for model in CostModel.from_profile(profile):
        whole = f"{model.forward_s(length, 0):.4g} s forward, {model.backward_s(length, 0):.4g} s backward"
        print(f"part {model.part_id}: {whole} for a whole sequence")
        print(f"  {model.report}".replace("\n", "\n  "))


def _bounds(partition: tuple[int, ...] | None, stages: int, layers: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the config's cut of the layers; raise CommandError where it does not fit these stages and layers."""
    from terapipe_ds.runtime.layout.layout import bounds_in

    if partition is None:
        return None
    shown = f"terapipe.partition = {list(partition)} in --config"
    if (bounds := bounds_in(layers, partition)) is None:
        raise CommandError(f"{shown} ends with {partition[-1]}, but the model has {len(layers)} layers: end with that")
    if len(partition) - 1 != stages:
        parts = len(partition) - 1
        has = f"{shown} has {many(parts, 'part')}, --stages is {stages}"
        raise CommandError(f"{has}: give --stages {parts}, one part each")
    return bounds
