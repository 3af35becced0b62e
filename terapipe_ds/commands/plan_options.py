"""Declare the options of `terapipe plan`, some of them shared with `terapipe strategy`."""

from __future__ import annotations

import functools
from typing import Any

from terapipe_ds.commands.options import (
    JsonOutput,
    Options,
    OrderFile,
    Output,
    Picture,
    ScheduleDetails,
    Text,
    details_option,
    json_option,
    option,
    switch,
)
from terapipe_ds.files.user_json import CommandError

_what, _batch, _search, _output = (
    functools.partial(option, group=title) for title in ("model and devices", "training", "search", "output")
)


class CostOptions(Options):
    """Choose the model, the devices and the output files. An empty name or 0 means that it is not known yet."""

    model: Text = _what("a named size such as llama-3-8b (a wrong name lists all), or a config.json", "NAME", "")
    device: Text = _what("a device card: v100, a100, h100, h200, ..., or the .json of your own", "NAME", "")
    profiles: tuple[Text, ...] = _what(
        "measured costs (JSON) in place of counted ones", "FILE", (), flags=("--profile",), action="append"
    )
    stages: int = _what("pipeline stages", "K", 0, ge=1)
    tensor_parallel: int = _what("ranks per stage (default 1)", "T", 1, ge=1)
    data_parallel: int = _what("pipelines side by side (default 1)", "D", 1, ge=1)
    sequence_length: int = _batch("tokens of a sequence (default: the model's)", "L", 0, ge=1)
    dtype: Text = _batch("fp32, fp16, bf16 (default: what the device is made for)", default="auto")
    config: Text | None = _batch("a DeepSpeed JSON: values for options that are left out", "FILE")
    schedule: Text = _search("a schedule (terapipe show --help lists them), or auto (default): all", "NAME", "auto")
    chunks_per_stage: int | None = _search(
        "parts that each stage holds (default: 2 for zbv and chimera, 1 for others; with auto searched)", "V", ge=1
    )
    memory_limit_gb: float | None = _search("10^9 bytes per device (default: 0.9 of what it has)", "GB", gt=0, le=1e9)
    as_json: JsonOutput | None = json_option(group="output")
    out: Output | None = _output("write the plan as JSON", "FILE")
    picture: Picture | None = _output("draw the step under one of whole sequences to a .png, .svg or .pdf file", "FILE")


class PlanOptions(CostOptions):
    sequence_parallel: bool = switch("Megatron's, over the tensor-parallel ranks", group="model and devices")
    micro_batches: int = _batch("per step and pipeline (default 1)", "M", 1, ge=1)
    micro_batch_size: int = _batch("sequences per micro-batch (default 1)", "B", 1, ge=1)
    activation_checkpointing: bool = switch("recompute the decoder layers in the backward", group="training")
    recompute: bool = switch(
        "choose the layers that recompute under --memory-limit-gb; of a measured model (--profile)",
        "--choose-recompute",
        group="search",
    )
    zero_stage: int = _batch("ZeRO stage (default 0)", "{0,1}", 0, ge=0, le=1)
    schedule_options: ScheduleDetails = details_option("search")
    granularity: int | None = _search(
        "cut at multiples of N tokens (default: 64; doubled above 16,384 tokens, to at most 256 granules)", "N", ge=1
    )
    max_slices: int | None = _search("use at most S slices", "S", ge=1)
    order: OrderFile | None = _output("write the order as CSV, for the key terapipe.schedule", "FILE")

    @property
    def profile(self) -> str | None:
        if len(self.profiles) > 1:
            raise CommandError("--profile is given twice: give one, or find a strategy with `terapipe strategy`")
        return self.profiles[0] if self.profiles else None

    @property
    def shape(self) -> dict[str, Any]:
        """Return the settings, other than model, device and dtype, that decide a part's costs and memory."""
        return {
            "micro_batch": self.micro_batch_size,
            "tensor_parallel": self.tensor_parallel,
            "activation_checkpointing": self.activation_checkpointing,
        }

    @property
    def granule(self) -> int:
        """Return the tokens at whose multiples slices end; the default depends on the sequence."""
        from terapipe_ds.config import TeraPipeConfig
        from terapipe_ds.plan import coarsened
        from terapipe_ds.planner import granularity_for

        default = TeraPipeConfig.model_fields["granularity_tokens"].default
        granule = granularity_for(self.granularity or default, self.tensor_parallel, self.sequence_parallel)
        return granule if self.granularity else coarsened(granule, self.sequence_length)
