"""Measure layers of large models: write a profile of each, as the planner takes it."""

import re
from collections.abc import Iterator

from studies import gpu
from terapipe_ds.bench.drivers.base import one_attention
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner import plan_slices
from tests.gpu_checks.checks import Check, Settings, not_run

TINY = {"tiny": (32, 2, 1, 16, 64, True)}
TINY_LENGTH = 256
_STAGES = 8


def checks(settings: Settings) -> Iterator[Check]:
    """Write a profile `layer-NAME.json` of each layer, and yield what the planner finds for eight such stages."""
    import torch

    layers, length = (TINY, TINY_LENGTH) if settings.dry_run else (gpu.LAYERS, gpu.LAYER_LENGTH)
    for name, sizes in layers.items():
        if settings.is_late(settings.limit_s / 5):
            yield not_run(name, "the part's time is over")
            continue
        with one_attention(settings.device, torch.bfloat16, sizes[3]) as kernel:
            profile = gpu.measured_layer(sizes, length, settings.device)
        path = settings.folder / f"layer-{re.sub('[^a-z0-9]+', '-', name)}.json"
        profile.save(path)
        (costs,) = CostModel.from_profile(Profile.load(path))
        whole_s = costs.forward_s(length, 0) + costs.backward_s(length, 0)
        planned = plan_slices(costs, length, _STAGES, granularity_tokens=64)
        yield Check(f"{name}: whole sequence of {length} tokens, ms", whole_s * 1e3)
        yield Check(f"{name}: attention", kernel)
        left_out = (*costs.errors("forward").held_out, *costs.errors("backward").held_out)
        yield Check(f"{name}: the fit is off by, on points left out", max(left_out, default="no points"))
        yield Check(f"{name}: planned slices on {_STAGES} stages", float(planned.plan.num_slices))
        of_unsliced = planned.predicted_s / (whole_s * _STAGES)  # never more than 1: the planner looks at that as well
        yield Check(f"{name}: planned step over an unsliced one", of_unsliced)
