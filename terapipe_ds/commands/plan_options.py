"""The options of `terapipe plan`."""

from __future__ import annotations

from typing import Any

from terapipe_ds.commands.options import (
    MAX_DEVICES,
    MAX_FORWARDS,
    Options,
    OrderFile,
    Output,
    Panel,
    Picture,
    ScheduleDetails,
    Text,
    details_option,
)
from terapipe_ds.files.user_json import CommandError

OF_CLUSTERS = (
    "devices_per_node",
    "global_batch",
    "within_gb_per_s",
    "between_gb_per_s",
    "node_gb_per_s",
    "strategy_out",
)
"""Options that go with `--devices` only."""

_WHAT, _CLUSTER, _BATCH, _SEARCH, _OUTPUT = map(
    Panel, ("model and devices", "cluster (the search for a strategy)", "training", "search", "output")
)


class PlanOptions(Options):
    """What is planned for, what is tried, and what is written. An empty name or 0 is not known yet."""

    model: Text = _WHAT.option(
        "a named size, for example gpt3-13b or llama-3-8b; with --devices also a Hugging Face config.json", "NAME", ""
    )
    device: Text = _WHAT.option("a device card: v100, a100, h100, h200, ...", "NAME", default="")
    profiles: tuple[Text, ...] = _WHAT.option(
        "measured costs (JSON) in the place of counted ones; with --devices one per number of tensor ranks and rows",
        "FILE",
        (),
        flags=("--profile",),
        action="append",
    )
    stages: int = _WHAT.option("pipeline stages", "K", default=0, ge=1)
    tensor_parallel: int = _WHAT.option("ranks per stage (default 1)", "T", default=1, ge=1)
    sequence_parallel: bool = _WHAT.switch("Megatron's, over the tensor-parallel ranks")
    data_parallel: int = _WHAT.option("pipelines side by side (default 1)", "D", default=1, ge=1)
    devices: int = _CLUSTER.option(
        "so many in all: also find stages, tensor and data parallelism, placement, layer cuts, recomputation, ZeRO",
        "N",
        default=0,
        ge=1,
        le=MAX_DEVICES,
    )
    devices_per_node: int = _CLUSTER.option(
        "default: what nodes of the device card have", "N", default=0, ge=1, le=MAX_DEVICES
    )
    global_batch: int = _CLUSTER.option(
        "sequences of a step, of all replicas together", "N", default=0, ge=1, le=MAX_FORWARDS
    )
    within_gb_per_s: float | None = _CLUSTER.option(
        "a device's link to others of its node, one way (default: the card's)", "GB/S", gt=0
    )
    between_gb_per_s: float | None = _CLUSTER.option(
        "a device's link to other nodes, one way (default: the card's)", "GB/S", gt=0
    )
    node_gb_per_s: float | None = _CLUSTER.option(
        "of all links of a node to other nodes together, where devices share a network card", "GB/S", gt=0
    )
    sequence_length: int = _BATCH.option("tokens of a sequence (default: the model's)", "L", default=0, ge=1)
    micro_batches: int = _BATCH.option("per step and pipeline (default 1)", "M", default=1, ge=1)
    micro_batch_size: int = _BATCH.option("sequences per micro-batch (default 1)", "B", default=1, ge=1)
    dtype: Text = _BATCH.option("fp32, fp16, bf16 (default: what the device is made for)", default="auto")
    activation_checkpointing: bool = _BATCH.switch("of the decoder layers")
    recompute: bool = _SEARCH.switch(
        "choose the layers that recompute under --memory-limit-gb; of a measured model (--profile)",
        "--choose-recompute",
    )
    zero_stage: int = _BATCH.option("default 0", "{0,1}", default=0, ge=0, le=1)
    config: Text | None = _BATCH.option("a DeepSpeed JSON for all of these that are not given", "FILE")
    schedule: Text = _SEARCH.option(
        "a schedule (terapipe show --help lists them), search for an order of its own, or auto (default): all of these",
        "NAME",
        default="auto",
    )
    chunks_per_stage: int | None = _SEARCH.option(
        "parts that each stage holds (default: those of the schedule; with auto 1 and 2)", "V", ge=1
    )
    schedule_options: ScheduleDetails = details_option(_SEARCH)
    granularity: int | None = _SEARCH.option(
        "cut at multiples of N tokens (default: 64, or the sequence where that is shorter)", "N", ge=1
    )
    max_slices: int | None = _SEARCH.option("at most so many slices", "S", ge=1)
    memory_limit_gb: float | None = _SEARCH.option("per device (default: what it has)", "GB", gt=0)
    as_json: bool = _OUTPUT.switch("print as JSON", "--json")
    out: Output | None = _OUTPUT.option("write the plan as JSON; with --devices a whole DeepSpeed JSON", "FILE")
    order: OrderFile | None = _OUTPUT.option("write the order as CSV, for the key terapipe.schedule", "FILE")
    strategy_out: Output | None = _OUTPUT.option(
        "with --devices: write the strategy, for the key terapipe.strategy", "FILE"
    )
    picture: Picture | None = _OUTPUT.option(
        "draw the simulated step, with --devices also who has which part: .png, .svg or .pdf", "FILE"
    )

    @property
    def profile(self) -> str | None:
        """Return the one profile of a plan without a cluster."""
        if len(self.profiles) > 1:
            raise CommandError("--profile is given twice: give one, or --devices to find a strategy")
        return self.profiles[0] if self.profiles else None

    @property
    def shape(self) -> dict[str, Any]:
        """Return what a part's costs and memory depend on besides model, device and dtype."""
        return {
            "micro_batch": self.micro_batch_size,
            "tensor_parallel": self.tensor_parallel,
            "activation_checkpointing": self.activation_checkpointing,
        }

    @property
    def granule(self) -> int:
        """Return the tokens at whose multiples slices end; the default is at most the sequence."""
        from terapipe_ds.config import TeraPipeConfig
        from terapipe_ds.planner import granularity_for

        default = TeraPipeConfig.model_fields["granularity_tokens"].default
        granule = granularity_for(self.granularity or default, self.tensor_parallel, self.sequence_parallel)
        return granule if self.granularity else min(granule, self.sequence_length)
