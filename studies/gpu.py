"""Measure one accelerator: sliced attention, and one layer of large models, against the unsliced call.

    python -m studies.gpu attention
    python -m studies.gpu layer --full --json layer.json

`terapipe bench --from layer.json --html layer.html` makes a report of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from studies.attention import Shape, measure
from studies.options import study_parser, write_report
from terapipe_ds.bench.drivers.base import one_attention
from terapipe_ds.bench.ranks import machine
from terapipe_ds.bench.table import render
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.models.gpt import DecoderLayer, GPTConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.profiling.one_device import OfflineJob, profile_model

ATTENTION_LENGTHS, ATTENTION_SLICES = (8192, 16384, 32768, 65536), (256, 512, 1024, 2048, 4096, 8192)
HEADS = ((32, 8, 128), (16, 16, 128), (16, 16, 64))
"""(query heads, key/value heads, head dim)."""

LAYERS = {  # one layer on one of 8 tensor-parallel ranks: hidden, heads, key/value heads, head dim, ffn, gated
    "gpt3-13b/8": (5120, 5, 5, 128, 2560, False),
    "gpt3-175b/8": (12288, 12, 12, 128, 6144, False),
    "llama-3-8b": (4096, 32, 8, 128, 14336, True),
    "llama-3-70b/8": (8192, 8, 1, 128, 3584, True),
}
LAYER_LENGTH = 8192
REPEATS = 7


def run_on_gpu(name: str, *, full: bool) -> dict[str, Any]:
    """Return the rows of `attention` or `layer` in the form of `terapipe bench`, bound by the unsliced call."""
    before = {**machine(), "device": torch.cuda.get_device_name()}
    # the largest of the rows, whose own sizes are in their labels
    measured, hidden, length = {
        "attention": (attention_rows, max(heads * dim for heads, _, dim in HEADS), max(ATTENTION_LENGTHS)),
        "layer": (layer_rows, max(sizes[0] for sizes in LAYERS.values()), LAYER_LENGTH),
    }[name]
    work: dict[str, Any] = {"stages": 1, "layers": 1, "hidden": hidden, "micro_batch": 1, "sequence_length": length}
    work |= {"pairs": REPEATS, "device": "cuda"}
    with one_attention("cuda", torch.bfloat16, HEADS[0][2]) as attention:  # all their head dims are measured alike
        rows = list(measured(full))
    return {"machine": before, "preset": f"gpu-{name}", "workload": work, "attention": attention, "runs": rows}


def attention_rows(full: bool) -> Iterator[dict[str, Any]]:
    """Yield forward and backward of all slices against one unsliced fused call, bf16."""
    for heads, kv_heads, head_dim in HEADS if full else HEADS[1:2]:
        for length in ATTENTION_LENGTHS if full else ATTENTION_LENGTHS[:2]:
            shape = Shape(1, heads, kv_heads, head_dim, length, "bfloat16")
            for tokens in ATTENTION_SLICES:
                slices = [tokens] * (length // tokens)
                cost = measure(shape, len(slices), repeats=REPEATS, device="cuda")
                label = f"attention {heads}/{kv_heads} heads of {head_dim}, {length} in slices of {tokens}"
                yield _row(label, "attention", slices, cost.sliced_s, cost.unsliced_s, cost.store_bytes)


def layer_rows(full: bool) -> Iterator[dict[str, Any]]:
    """Yield t(tokens, prefix) of one layer, as the planner would have it, summed over equal slices."""
    for name in LAYERS if full else list(LAYERS)[:2]:
        profile = measured_layer(LAYERS[name], LAYER_LENGTH, "cuda")
        (costs,) = CostModel.from_profile(profile)
        unsliced_s = costs.forward_s(LAYER_LENGTH, 0) + costs.backward_s(LAYER_LENGTH, 0)
        for num_slices in (2, 4, 8, 16, 32):
            plan = SlicePlan.equal(LAYER_LENGTH, num_slices)
            spans = [(b - a, a) for a, b in map(plan.span, range(num_slices))]
            sliced_s = sum(costs.forward_s(*span) + costs.backward_s(*span) for span in spans)
            row = _row(f"layer {name}, {num_slices} slices", "layer", list(plan.lengths), sliced_s, unsliced_s, 0)
            yield {**row, "profile": profile.to_json()} if num_slices == 2 else row


def measured_layer(sizes: tuple[int, int, int, int, int, bool], length: int, device: str) -> Any:
    """Return the profile of a layer with sizes as in `LAYERS`, on sequences of `length` tokens in bf16."""
    if (own := get_accelerator().device_name()) != device:  # DeepSpeed says where layers are measured
        raise RuntimeError(f"DeepSpeed measures on {own}, and {device} was asked for: unset DS_ACCELERATOR")
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "gated_mlp")
    named = dict(zip(names, sizes, strict=True))
    config = GPTConfig(num_layers=1, max_sequence_length=length, dtype="bfloat16", **named)
    inputs = torch.randn((1, length, config.hidden_size), dtype=torch.bfloat16, device=device)
    layers = [LayerSpec(_Start, config.hidden_size), LayerSpec(DecoderLayer, config, 0)]
    job = OfflineJob(layers, _mean_square, inputs, torch.zeros(1, length), 1)
    return profile_model(job, lambda part_id, share: None, lambda text: None)


class _Start(nn.Module):
    """Add a parameter before the layer at almost no cost: with it the layer's input has a gradient, as in a model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(hidden, dtype=torch.bfloat16))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.offset


def _mean_square(outputs: Any, labels: Any) -> Any:
    """Return a loss that costs next to nothing beside the layer."""
    return outputs.float().square().mean() + 0.0 * labels.sum()


def _row(
    label: str, schedule: str, lengths: Sequence[int], step_s: float, unsliced_s: float, store_bytes: int
) -> dict[str, Any]:
    """Return a measurement in the form of a run; without a pipeline there is no prediction, idle time or message."""
    ratio = unsliced_s / step_s
    row: dict[str, Any] = {"system": "terapipe", "schedule": schedule, "label": label, "slices": list(lengths)}
    row |= {"accumulation": 1, "stages": 1, "planned": False, "replayed": False}
    row |= {"step_s": step_s, "step_s_all": [step_s], "spread_s": [step_s] * 2, "tokens_per_s": sum(lengths) / step_s}
    row |= {"bound_s": unsliced_s, "predicted_s": None, "ratio_to_stock": ratio, "ratio_to_bound": ratio}
    return row | {"bubble": 0.0, "peak_bytes": [store_bytes], "exposed_comm_s": 0.0, "loss": None}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write and print."""
    parser = study_parser("gpu", __doc__, writes="machine and all figures")
    parser.add_argument("what", choices=["attention", "layer"])
    parser.add_argument("--full", action="store_true", help="all heads and lengths, all layers")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    result = run_on_gpu(options.what, full=options.full)
    write_report(options.json, **result)  # first, so that the figures are kept even if the table fails
    print(render(result))


if __name__ == "__main__":
    main()
