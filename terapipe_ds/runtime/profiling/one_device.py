"""Measure the parts of a model one after the other, on one device, without a pipeline.

Parts with the same layers are measured once. There are no links on one device, so the profile has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime import utils as ds_utils

from terapipe_ds.attention import SliceStore, guard_plain_attention
from terapipe_ds.costs.profile import CostSample, PartProfile, Profile
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.layers.gradient_sums import OwnSums
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from terapipe_ds.runtime.links.specs import MessageSpec
from terapipe_ds.runtime.profiling.cache import layers_of_parts
from terapipe_ds.runtime.profiling.key import describe_part, kinds_of_part, profile_key
from terapipe_ds.runtime.profiling.layer_times import LayerMeasured, measure_layers
from terapipe_ds.runtime.profiling.rounds import grid, noise_warning, time_part
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer


@dataclass(frozen=True)
class OfflineJob:
    """Describe the model to profile, in the form for `PipelineModule`, and a batch for it."""

    layers: Sequence[LayerSpec]
    loss_fn: Callable[[Any, Any], Any]
    inputs: torch.Tensor  # of a micro-batch, [B, L]
    labels: torch.Tensor
    num_stages: int
    num_micro_batches: int = 1
    granularity_tokens: int = 64
    activation_checkpoint_interval: int = 0
    recomputing: frozenset[int] | None = None  # parts that recompute every layer; None: as the interval says
    bounds: Sequence[int] | None = None  # the first layer of each part, and their number; None: as DeepSpeed cuts them

    def build_part(self, start: int, stop: int) -> Any:
        """Return the layers from `start` to `stop` as a `PipelineModule` of one stage."""
        module = PipelineModule(list(self.layers[start:stop]), num_stages=1, loss_fn=self.loss_fn)
        # DeepSpeed's engine marks the layers to checkpoint; without the marks no layer would run at all
        module.set_checkpoint_interval(self.activation_checkpoint_interval)
        return module


@contextmanager
def single_process() -> Iterator[None]:
    """Have a process group of one rank, which `PipelineModule` needs, unless there is a group already."""
    had_rank, had = "LOCAL_RANK" in os.environ, torch_dist.is_initialized()
    os.environ.setdefault("LOCAL_RANK", "0")  # PipelineModule reads it
    try:
        if not had:
            torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and never used
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        yield
    finally:
        # who called a command from Python, as a test does, is no job afterwards
        if not had and torch_dist.is_initialized():
            # DeepSpeed has the group in its own books, unless its start failed
            (deepspeed.comm if deepspeed.comm.is_initialized() else torch_dist).destroy_process_group()
        if not had_rank:
            os.environ.pop("LOCAL_RANK", None)


@single_process()
def profile_model(job: OfflineJob, progress: Callable[[int, float], None], warn: Callable[[str], None]) -> Profile:
    """Return the profile of all parts of `job`.

    `progress` gets the number of the part and its finished share; `warn` is called if numbers vary too much.
    """
    # the same cut as in training, if no config sets one
    bounds = job.bounds or partition(job.layers, job.num_stages)
    length = int(job.inputs.shape[1])
    lengths = sorted({tokens for tokens, _ in grid(length, job.granularity_tokens)})
    specs: dict[int, MessageSpec] = {}
    # by the kinds of layers: equal parts cost the same
    known: dict[tuple[str, ...], tuple[tuple[CostSample, ...], tuple[LayerMeasured, ...] | None]] = {}
    parts, described, measured = [], [], []
    for part_id in range(job.num_stages):
        module = job.build_part(bounds[part_id], bounds[part_id + 1])
        if job.recomputing is not None:
            module.set_checkpoint_interval(int(part_id in job.recomputing))
        described.append(describe_part(module))
        # each part receives the message of the part before it
        timer = _timer(job, module, part_id)
        with untouched(module, timer.weights.sums), guard_plain_attention(intercept=True):
            for tokens in lengths:
                if part_id:
                    timer.receive(tokens, specs[tokens])
                specs[tokens] = timer.output_spec(tokens)
            kinds = tuple(kinds_of_part(module, part_id == 0, part_id == job.num_stages - 1))
            if kinds not in known:
                steps = job.num_stages, job.num_micro_batches
                samples = time_part(timer, job.granularity_tokens, *steps, progress=partial(progress, part_id))
                known[kinds] = samples, measure_layers(timer, kinds, samples)
                if (warning := noise_warning(samples)) is not None:
                    warn(f"part {part_id}: {warning}")
        parts.append(PartProfile(part_id, known[kinds][0]))
        measured.append([[known[kinds][1]]])
    # the key says for which runs these numbers are good
    device = torch.device(get_accelerator().device_name())
    key = profile_key(described, module=module, device=device, rows=int(job.inputs.shape[0]), length=length)
    return Profile(key, tuple(parts), (), job.num_stages, layers_of_parts(measured))


def partition(layers: Sequence[LayerSpec], num_stages: int) -> list[int]:
    """Return the cuts between layers that `PipelineModule` makes by itself (deepspeed/runtime/pipe/module.py).

    Raises ValueError for more stages than layers.
    """
    if not 1 <= num_stages <= len(layers):
        problem = f"--stages, or pipeline.stages in --config, is {num_stages}: the model has {len(layers)} layers"
        raise ValueError(f"{problem}; give between 1 and {len(layers)}")
    with torch.device("meta"):
        counts = [sum(p.numel() for p in spec.build().parameters() if p.requires_grad) for spec in layers]
    return list(ds_utils.partition_balanced(weights=counts, num_parts=num_stages))


def _timer(job: OfflineJob, module: Any, part_id: int) -> SliceTimer:
    device = torch.device(get_accelerator().device_name())
    is_last = part_id == job.num_stages - 1
    labels = SliceableTensors.of_labels(job.labels.to(device), 1)
    weights = accumulate_in_products(module, None)
    # DeepSpeed's optimizer for bf16 sums in fp32
    if any(parameter.dtype == torch.bfloat16 for parameter in module.parameters()):
        weights.sums = OwnSums(module)
    return SliceTimer(
        module,
        labels.length,
        device,
        SliceStore(),
        part_id,
        inputs=SliceableTensors.of_inputs(job.inputs.to(device), labels.length, 1) if part_id == 0 else None,
        labels=labels if is_last else None,
        is_last=is_last,
        weights=weights,
        rows=int(job.inputs.shape[0]),
        of_hidden=LossOfHidden.of(module, weights) if is_last else None,
    )
