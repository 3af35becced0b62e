"""Run `terapipe verify`: check whether the layers of a model are safe to slice."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands.options import Numbers, option
from terapipe_ds.commands.user_model import ModelOptions
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.plan import SlicePlan

if TYPE_CHECKING:
    from terapipe_ds.config import TeraPipeConfig
    from terapipe_ds.runtime.profiling.one_device import OfflineJob
    from terapipe_ds.runtime.verify.stage import Findings

HELP = "compare a model's layers on slices with the same layers on whole sequences"
DESCRIPTION = (
    "Run each layer of a built-in model on a whole sequence and on the slices of the config, forward and backward, on "
    "one device, and compare outputs, gradients and the loss. Exit code 0 where all agree, 1 where a layer differs.\n"
    'For a model of your own: "verify": "first_batch" in the terapipe section, or, for the check alone,\n'
    "  deepspeed --num_gpus 2 --module terapipe_ds.run --verify train.py ARGS\n"
    "which runs your script up to its first training batch."
)
EXAMPLES = """\
  terapipe verify --config ds.json --model mini
  terapipe verify --config ds.json --model my_model.json --sequence-length 2048 \\
                  --slices 512,1024,512
  # your own script
  deepspeed --num_gpus 2 --module terapipe_ds.run --verify train.py --config ds.json

A model is a named size (a wrong one lists all) or a JSON file with fields of
models.gpt.GPTConfig. With "slices": "auto" and no --slices it tries four equal slices, or as
many as fit if granularity_tokens is set. docs/verify.md explains the report.
"""


class VerifyOptions(ModelOptions):
    slices: Numbers | None = option("slice lengths, as 512,1024,512 (default: the config's)", "T", nargs="+")


def run(options: VerifyOptions) -> None:
    section, keys = options.settings()
    from terapipe_ds.runtime.profiling.one_device import single_process

    if passed := options.passed_over(section, keys):
        print(f"terapipe verify: note: the layers run without {passed} of --config", file=sys.stderr)
    job = options.job(keys, num_stages=1)
    plan, begin_s = _plan(section, job.inputs.shape[1], options.slices), time.monotonic()
    with single_process(), redirect_stdout(sys.stderr):  # DeepSpeed prints how it partitions
        report = verify_model(job, plan, section, keys.content)
    print(report.text(time.monotonic() - begin_s))
    if report.findings:
        sys.stdout.flush()
        raise SystemExit(1)


def verify_model(job: OfflineJob, plan: SlicePlan, section: TeraPipeConfig, raw: Mapping[str, Any]) -> Findings:
    """Check all layers of a model and its loss on one device, without an engine. `raw` is DeepSpeed's config."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
    from terapipe_ds.runtime.batch.loss_weights import weights_of
    from terapipe_ds.runtime.layers.activation_checkpointing import keeps_attention, set_recompute
    from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
    from terapipe_ds.runtime.layers.untouched import untouched
    from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
    from terapipe_ds.runtime.verify.cut import Cut
    from terapipe_ds.runtime.verify.loss import LossCheck
    from terapipe_ds.runtime.verify.named_layer import layers_of
    from terapipe_ds.runtime.verify.stage import Findings, StageCheck, inputs_of
    from terapipe_ds.runtime.verify.tokens import Slicing

    device = torch.device(get_accelerator().device_name())
    module = job.build_part(0, len(job.layers))
    set_recompute(module, section, raw, stands_for_all=True)  # layers that some stage may recompute are checked so
    module.set_checkpoint_interval(module.activation_checkpoint_interval)
    labels = SliceableTensors.of_labels(job.labels.to(device), 1)
    inputs = inputs_of(SliceableTensors.of_inputs(job.inputs.to(device), labels.length, 1))
    weights = weights_of(labels, plan, section, job.loss_fn)
    slicing = Slicing(plan, weights, keeps_attention=keeps_attention(module))
    found = Findings(cut=Cut(plan, plan.sequence_length))
    of_hidden = LossOfHidden.of(module, WeightGradients())
    check = StageCheck(module, slicing, found, intercept=section.attention == "intercept", of_hidden=of_hidden)
    with untouched(module, with_gradients=False):
        outputs = check.check_layers(layers_of(module), inputs)
        if module.activation_checkpoint_interval:
            kept = ", and kept their attention" * slicing.keeps_attention
            check.found.notes.append(f"layers with parameters were recomputed{kept}")
        if outputs is not None:
            check.check_loss(LossCheck(job.loss_fn, labels, outputs, slicing, section), len(job.layers))
    return check.found


def _plan(section: TeraPipeConfig, length: int, lengths: tuple[int, ...] | None) -> SlicePlan:
    """Return the user's slices, the config's, or four equal ones."""
    if lengths is not None:
        plan = SlicePlan(lengths)
        if plan.sequence_length != length:
            what = f"--slices add up to {plan.sequence_length} tokens, the sequence has {length}"
            raise CommandError(f"{what}: give others, or another --sequence-length")
        return plan
    if section.slices == "auto":
        section.check_length(length)
        most = -(-length // section.granularity_tokens) if "granularity_tokens" in section.model_fields_set else length
        section = section.model_copy(update={"slices": min(4, most)})
    return section.plan_for(length)
