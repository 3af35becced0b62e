"""The same check for a whole model on one device, without an engine."""

from __future__ import annotations

import time

import torch
from deepspeed.accelerator import get_accelerator

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.loss import slice_weights
from terapipe_ds.runtime.profiling.one_device import OfflineJob, init_single_process
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.runtime.verify.cut import Cut
from terapipe_ds.runtime.verify.handing_on import layouts_of_batch
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.pipeline import layers_of
from terapipe_ds.runtime.verify.report import Report, Told
from terapipe_ds.runtime.verify.runner import Runner, Values
from terapipe_ds.runtime.verify.stage import Inputs, check_loss, check_stage


def verify_model(job: OfflineJob, plan: SlicePlan, section: TeraPipeConfig) -> Report:
    """The report on all layers of ``job`` and its loss, with the slices of ``plan``."""
    begin_s = time.monotonic()
    init_single_process()
    device = torch.device(get_accelerator().device_name())
    module = job.build_part(0, len(job.layers))
    labels = SliceableTensors.of_labels(job.labels.to(device), 1)
    batch = SliceableTensors.of_inputs(job.inputs.to(device), labels.length, 1)
    reduction, ignore_index = section.loss_reduction, section.ignore_index
    weights = slice_weights(
        labels, plan, loss_reduction=reduction, ignore_index=ignore_index,
        slice_weight=getattr(job.loss_fn, "slice_weight", None),
    )  # fmt: skip
    with untouched(module, with_gradients=False):
        inputs = Inputs(Values(batch.tensors, batch.is_tuple), layouts_of_batch(batch))
        stage = check_stage(Runner(module, plan), layers_of(module), inputs, weights)
        if stage.outputs is not None:
            check_loss(
                stage,
                lambda last: LossCheck(
                    job.loss_fn, labels, plan, last.values, last.layouts, weights, reduction, ignore_index
                ),
                len(job.layers),
            )
    return Report.of([Told.of(stage, Cut(plan, plan.sequence_length))], took_s=time.monotonic() - begin_s)
