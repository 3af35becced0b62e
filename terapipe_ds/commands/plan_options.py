"""The options of `terapipe plan`, and where those that are not given come from: a profile, then a DeepSpeed JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import DTYPE_NAMES, CommandError, read_json
from terapipe_ds.commands.deepspeed_json import DeepSpeedJson
from terapipe_ds.commands.options import Group, Options, Output, Picture, Text
from terapipe_ds.commands.schedule_options import ScheduleDetails, details_option
from terapipe_ds.messages import show_value

if TYPE_CHECKING:
    from terapipe_ds.costs.profile import Profile

MAX_UNITS = 100_000
_WHAT, _BATCH, _SEARCH, _OUTPUT = map(Group, ("model and devices", "training", "search", "output"))


class PlanOptions(Options):
    """What is planned for, what is tried, and what is written; no model, no device and 0: not known yet."""

    model: Text = _WHAT.option("a named size, for example gpt3-13b or llama-3-8b", "NAME", default="")
    device: Text = _WHAT.option("a device card: v100, a100, h100, h200, ...", "NAME", default="")
    profile: Text | None = _WHAT.option("measured costs (JSON) in the place of counted ones", "FILE")
    stages: int = _WHAT.option("pipeline stages", "K", default=0, ge=1)
    tensor_parallel: int = _WHAT.option("ranks per stage (default 1)", "T", default=1, ge=1)
    sequence_parallel: bool = _WHAT.switch("Megatron's, over the tensor-parallel ranks")
    data_parallel: int = _WHAT.option("pipelines side by side (default 1)", "D", default=1, ge=1)
    sequence_length: int = _BATCH.option("tokens of a sequence (default: the model's)", "L", default=0, ge=1)
    micro_batches: int = _BATCH.option("per step and pipeline (default 1)", "M", default=1, ge=1)
    micro_batch_size: int = _BATCH.option("sequences per micro-batch (default 1)", "B", default=1, ge=1)
    dtype: Text = _BATCH.option("fp32, fp16, bf16 (default: what the device is made for)", default="auto")
    activation_checkpointing: bool = _BATCH.switch("of the decoder layers")
    zero_stage: int = _BATCH.option("default 0", "{0,1}", default=0, ge=0, le=1)
    config: Text | None = _BATCH.option("a DeepSpeed JSON for all of these that are not given", "FILE")
    schedule: Text = _SEARCH.option(
        "a schedule (terapipe show --help lists them), or auto (default): all are compared", "NAME", default="auto"
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
    out: Output | None = _OUTPUT.option("write the plan as JSON", "FILE")
    picture: Picture | None = _OUTPUT.option("draw the simulated step: .png, .svg or .pdf", "FILE")

    @property
    def shape(self) -> dict[str, Any]:
        """What the costs and the memory of a part depend on besides model, device and dtype."""
        return {
            "micro_batch": self.micro_batch_size,
            "tensor_parallel": self.tensor_parallel,
            "activation_checkpointing": self.activation_checkpointing,
        }


def complete(options: PlanOptions, profile: Profile | None) -> PlanOptions:
    """Return the options where those not given come from the profile, then from the DeepSpeed JSON.

    Raises:
        CommandError: what is asked for was not measured, or is missing.
    """
    if profile is None and not (options.model and options.device):
        raise CommandError("no costs: give --model and --device, or --profile with measured costs")
    configured = from_config(options.config)
    options_by_schedule = configured.pop("options_by_schedule", {})
    measured = {} if profile is None else _from_profile(profile)
    if profile is not None:
        if not options.stages:
            _refuse_unknown_stages(str(options.profile), profile)
        _refuse_other_costs(str(options.profile), measured, configured | options.given)
    options = options.filled(measured, configured)
    options = options.filled({"schedule_options": options_by_schedule.get(options.schedule, {})})
    if not options.stages:
        raise CommandError("--stages is missing: give the number of pipeline stages")
    if options.stages * options.micro_batches > MAX_UNITS:
        many = f"{options.stages} stages with {options.micro_batches} micro-batches"
        raise CommandError(f"{many} take too long to plan: ask for stages times micro-batches of at most {MAX_UNITS}")
    return options


def from_config(path: str | None) -> dict[str, Any]:
    """Return what a DeepSpeed JSON says; its terapipe section is validated as the engine does, enabled or not."""
    if path is None:
        return {}
    from terapipe_ds.config import TeraPipeConfig

    ds_config = read_json(path, "--config")
    given = ds_config.get("terapipe", {})
    if not isinstance(given, dict):
        raise CommandError(f"terapipe = {show_value(given)} in --config: give an object")
    keys, section = DeepSpeedJson(ds_config), TeraPipeConfig.from_deepspeed({"terapipe": given | {"enabled": False}})
    values = {
        "micro_batches": keys.number("gradient_accumulation_steps"),
        "micro_batch_size": keys.number("train_micro_batch_size_per_gpu"),
        "zero_stage": keys.number("zero_optimization.stage", least=0),
        "granularity": section.granularity_tokens if "granularity_tokens" in given else None,
        "memory_limit_gb": section.planner.memory_limit_gb,
        "chunks_per_stage": section.chunks_per_stage if "chunks_per_stage" in given else None,
        "schedule": section.schedule if "schedule" in given else None,
        "options_by_schedule": {section.schedule: section.schedule_options},
        "dtype": keys.precision,
        "activation_checkpointing": keys.fixed_number("pipeline.activation_checkpoint_interval", 0) > 0 or None,
    }
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _from_profile(profile: Profile) -> dict[str, Any]:
    key, stages = profile.key, profile.pipeline_stages
    return {
        "stages": key.num_stages if stages is None else stages,
        "tensor_parallel": key.tensor_parallel,
        "micro_batch_size": key.micro_batch,
        "dtype": key.dtype,
        "activation_checkpointing": key.activation_checkpointing,
        "sequence_length": key.sequence_length,
    }


def _refuse_other_costs(path: str, measured: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse another dtype or micro-batch size than was measured: no option makes other costs of these."""
    for name in ("dtype", "micro_batch_size", "tensor_parallel", "activation_checkpointing"):
        asked, has = (DTYPE_NAMES.get(str(values.get(name)), values.get(name)) for values in (wanted, measured))
        if asked not in (None, "auto", has):
            raise CommandError(
                f"{path} was measured with {name.replace('_', '-')} {has}, asked for is {asked}: give the same, or "
                "measure again with `terapipe profile`"
            )


def _refuse_unknown_stages(path: str, profile: Profile) -> None:
    """Refuse to guess the stages of a profile of an earlier version, which counts parts only.

    One that was measured between stages (it has links) may have had several on each.
    """
    num_parts = len(profile.parts)
    divides = any(num_parts % stages == 0 for stages in range(2, num_parts))
    if profile.pipeline_stages is None and profile.links and divides:
        raise CommandError(
            f"--stages is missing: {path} has {num_parts} parts, of which a stage may have held several; give the "
            f"number of pipeline stages, --stages {num_parts} if each held one"
        )
