"""What ``terapipe plan`` plans for: from the options, a profile and a DeepSpeed JSON."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import DTYPE_NAMES, CommandError, read_json
from terapipe_ds.messages import show_value

if TYPE_CHECKING:
    from terapipe_ds.costs.devices import DeviceCard
    from terapipe_ds.costs.model_sizes import ModelSize
    from terapipe_ds.planner import MemoryModel
    from terapipe_ds.planner.ranking.rank import PartsOf, SecondsOf

MAX_UNITS = 100_000


@dataclass
class PlanSetup:
    """What is planned for, from the options, the profile and the config, in this order of precedence."""

    title: str
    costs_of: PartsOf  # by the number of parts; None where the layers cannot be cut so
    memory_of: PartsOf | None
    both_ways_s_of: SecondsOf  # what bidirectional schedules take besides their makespan
    limit_bytes: float | None
    sequence_length: int
    stages: int
    micro_batches: int
    tensor_parallel: int
    granularity: int  # with that of sequence parallelism
    schedule: str
    chunks_per_stage: int | None  # None: those of the schedule, of "auto" all
    options: dict[str, Any]  # of the schedule, in the config


def plan_setup(arguments: argparse.Namespace) -> PlanSetup:
    """All that the options say.

    Raises:
        CommandError: something is missing, or does not fit together.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    profile = _profile(arguments.profile) if arguments.profile else None
    if profile is None and not (arguments.model and arguments.device):
        raise CommandError("no costs: give --model and --device, or --profile with measured costs")
    values: dict[str, Any] = {
        "tensor_parallel": 1, "data_parallel": 1, "micro_batches": 1, "micro_batch_size": 1, "zero_stage": 0,
        "dtype": "auto", "activation_checkpointing": False, "schedule": "auto",
    }  # fmt: skip
    asked = from_config(arguments.config) | given
    if profile is not None:
        if "stages" not in asked:
            _refuse_unknown_stages(arguments.profile, profile)
        _refuse_other_costs(arguments.profile, _from_profile(profile), asked)
        asked = _from_profile(profile) | asked
    values |= asked
    if "stages" not in values:
        raise CommandError("--stages is missing: give the number of pipeline stages")
    for name in (
        "stages",
        "micro_batches",
        "micro_batch_size",
        "tensor_parallel",
        "data_parallel",
        "granularity",
        "chunks_per_stage",
    ):
        if values.get(name, 1) < 1:
            raise CommandError(f"{name.replace('_', '-')} = {values[name]}: give a number >= 1")
    if values["stages"] * values["micro_batches"] > MAX_UNITS:
        many = f"{values['stages']} stages with {values['micro_batches']} micro-batches"
        raise CommandError(f"{many} take too long to plan: ask for stages times micro-batches of at most {MAX_UNITS}")
    return _measured(values, profile) if profile is not None else _counted(values)


def _refuse_other_costs(path: str, measured: dict[str, Any], asked: dict[str, Any]) -> None:
    """Measured costs are those of one dtype and one micro-batch size: no option makes others of them."""
    for name in ("dtype", "micro_batch_size", "tensor_parallel", "activation_checkpointing"):
        wanted, has = (DTYPE_NAMES.get(str(found.get(name)), found.get(name)) for found in (asked, measured))
        if wanted not in (None, "auto", has):
            raise CommandError(
                f"{path} was measured with {name.replace('_', '-')} {has}, asked for is {wanted}: give the same, or "
                "measure again with `terapipe profile`"
            )


def _counted(values: dict[str, Any]) -> PlanSetup:
    from terapipe_ds.costs.devices import device_card
    from terapipe_ds.costs.model_sizes import model_size

    size, card = model_size(values["model"]), device_card(values["device"])
    values = {"sequence_length": size.max_sequence_length, "limit_bytes": card.memory_bytes} | values
    if size.positions == "learned" and values["sequence_length"] > size.max_sequence_length:
        raise CommandError(
            f"--sequence-length {values['sequence_length']}: {size.name} has learned positions for "
            f"{size.max_sequence_length} tokens; give at most that many"
        )
    dtype = card.resolve_dtype(values["dtype"])
    devices = values["stages"] * values["tensor_parallel"] * values["data_parallel"]
    title = f"{size.name} in {dtype} on {devices} x {card.title}, costs counted"
    values["granularity"] = _granularity(values)
    costs_of = _counted_parts(values, size, card)
    costs_of(values["stages"])  # what cannot be at all is said before anything is searched
    return _finished(title, costs_of, _memory(values, dtype), _counted_both_ways(values, costs_of), values)


def _counted_both_ways(values: dict[str, Any], costs_of: PartsOf) -> SecondsOf:
    """Of counted costs: the parts' parameters over the card's link, Adam, and the reduction over replicas (a ring)."""
    from terapipe_ds.planner.ranking.bidirectional_cost import both_ways_s, gradient_itemsize

    def both_ways_s_of(num_parts: int) -> float | None:
        parts = costs_of(num_parts)
        if parts is None:
            return None
        link, replicas, zero_1 = parts[0].link, values["data_parallel"], values["zero_stage"] == 1
        itemsize = gradient_itemsize(DTYPE_NAMES.get(parts[0].dtype, parts[0].dtype))
        sizes = [itemsize * part.num_parameters() / values["tensor_parallel"] for part in parts]
        reduce_s = [2 * (replicas - 1) / replicas * size / link.bandwidth_bytes_per_s for size in sizes]
        adam_s = [part.step_s() / (replicas if zero_1 else 1) for part in parts]
        step_s = [a + r for a, r in zip(adam_s, reduce_s, strict=True)]
        return both_ways_s(sizes, link.bandwidth_bytes_per_s, step_s)

    return both_ways_s_of


def _counted_parts(values: dict[str, Any], size: ModelSize, card: DeviceCard) -> PartsOf:
    """Counted costs by the number of parts. Several parts of a stage are on one device, and its links those of K."""
    from terapipe_ds.costs.analytic import analytic_costs

    @functools.cache
    def counted(num_parts: int) -> list[Any]:
        return list(
            analytic_costs(
                size,
                card,
                num_stages=num_parts,
                dtype=values["dtype"],
                micro_batch=values["micro_batch_size"],
                tensor_parallel=values["tensor_parallel"],
                activation_checkpointing=values["activation_checkpointing"],
            )
        )

    def costs_of(num_parts: int) -> list[Any] | None:
        if num_parts > max(size.num_layers, values["stages"]):
            return None
        parts, link = counted(num_parts), counted(values["stages"])[0].link
        linked = {id(part): dataclasses.replace(part, link=link) for part in parts}
        return [linked[id(part)] for part in parts]

    return costs_of


def _measured(values: dict[str, Any], profile: Any) -> PlanSetup:
    from terapipe_ds.costs.fitted import CostModel
    from terapipe_ds.planner.ranking.recut import NOT_TIMED, MeasuredParts

    models: list[Any] = CostModel.from_profile(profile)
    values["granularity"] = _granularity(values)
    stages, parts = values["stages"], MeasuredParts.of_profile(profile, models)
    if len(models) == 1:
        parts = dataclasses.replace(
            parts,
            costs=models * stages,
            shares=parts.shares and [*parts.shares] * stages,
            most_parts=parts.most_parts and parts.most_parts * stages,
        )
    if parts.most_parts is None:  # who knows how many layers there are
        parts = dataclasses.replace(parts, most_parts=2 * stages)
    if parts.cut(values["stages"]) is None:
        raise CommandError(
            f"--stages {values['stages']}: {values['profile']} has {len(models)} parts; give --stages {len(models)}"
        )
    title = f"{profile.key.model} in {profile.key.dtype} on {profile.key.device}, costs measured"
    smallest = max(model.min_tokens for model in models)
    if values["granularity"] < smallest:  # constant below: said, since no plan of shorter slices can then be trusted
        title += f"\nslices of fewer than {smallest} tokens were not measured and count as {smallest}"
    memory_of = _memory(values, profile.key.dtype) if values.get("model") else None
    if values.get("device"):
        from terapipe_ds.costs.devices import device_card

        values = {"limit_bytes": device_card(values["device"]).memory_bytes} | values
    setup = _finished(title, parts.cut, memory_of, parts.both_ways_s, values)
    setup.title += f"\nplanned for {stages} stages; the profile has {len(models)} part{'s' * (len(models) != 1)}"
    if profile.pipeline_stages not in (None, len(models)):
        setup.title += f" of {profile.pipeline_stages} stages"
    setup.title += f"; {NOT_TIMED}" if parts.shares is None else ""
    return setup


def _refuse_unknown_stages(path: str, profile: Any) -> None:
    """A profile of an earlier version counts parts only. One that was measured between stages (it has links) may have
    had several on each."""
    num_parts = len(profile.parts)
    divides = any(num_parts % stages == 0 for stages in range(2, num_parts))
    if profile.pipeline_stages is None and profile.links and divides:
        raise CommandError(
            f"--stages is missing: {path} has {num_parts} parts, of which a stage may have held several; give the "
            f"number of pipeline stages, --stages {num_parts} if each held one"
        )


def _granularity(values: dict[str, Any]) -> int:
    """Where slices may end. One that nobody has set is no larger than the sequence, as in training."""
    from terapipe_ds.config import TeraPipeConfig
    from terapipe_ds.planner import granularity_for

    default = TeraPipeConfig.model_fields["granularity_tokens"].default
    given = values.get("granularity")
    found = granularity_for(given or default, values["tensor_parallel"], values["sequence_parallel"])
    return found if given else min(found, max(1, values["sequence_length"]))


def _memory(values: dict[str, Any], dtype: str) -> PartsOf:
    """Counted memory by the number of parts."""
    from terapipe_ds.costs.model_sizes import model_size
    from terapipe_ds.planner import MemoryModel

    size = model_size(values["model"])

    def memory_of(num_parts: int) -> MemoryModel | None:
        if num_parts > max(size.num_layers, values["stages"]):
            return None
        return MemoryModel.of_model(
            size,
            num_stages=num_parts,
            dtype=DTYPE_NAMES.get(dtype, dtype),
            micro_batch=values["micro_batch_size"],
            tensor_parallel=values["tensor_parallel"],
            data_parallel=values["data_parallel"],
            zero_stage=values["zero_stage"],
            activation_checkpointing=values["activation_checkpointing"],
            sequence_parallel=values["sequence_parallel"],
        )

    return memory_of


def _finished(
    title: str, costs_of: PartsOf, memory_of: PartsOf | None, both_ways_s_of: SecondsOf, values: dict[str, Any]
) -> PlanSetup:
    limit_gb = values.get("memory_limit_gb")
    if limit_gb is not None and memory_of is None:
        raise CommandError(f"--memory-limit-gb {limit_gb}: measured costs say nothing of memory; give --model as well")
    limit_bytes = values.get("limit_bytes") if limit_gb is None else limit_gb * 1e9
    parallel = f"{values['stages']} stages, tensor parallel {values['tensor_parallel']}"
    parallel += f", data parallel {values['data_parallel']}" if values["data_parallel"] > 1 else ""
    count, rows, length = values["micro_batches"], values["micro_batch_size"], values["sequence_length"]
    title += f"\n{parallel}, {count} micro-batch{'es' * (count != 1)} of {rows} x {length} tokens"
    return PlanSetup(
        title,
        costs_of,
        memory_of,
        both_ways_s_of,
        limit_bytes if memory_of is not None else None,
        length,
        values["stages"],
        count,
        values["tensor_parallel"],
        values["granularity"],
        values["schedule"],
        values.get("chunks_per_stage"),
        values.get("options_by_schedule", {}).get(values["schedule"], {}),
    )


def _profile(path: str) -> Any:
    from terapipe_ds.costs.profile import Profile

    return Profile.load(path)


def _from_profile(profile: Any) -> dict[str, Any]:
    key, stages = profile.key, profile.pipeline_stages
    return {
        "stages": key.num_stages if stages is None else stages,
        "tensor_parallel": key.tensor_parallel,
        "micro_batch_size": key.micro_batch,
        "dtype": key.dtype,
        "activation_checkpointing": key.activation_checkpointing,
        "sequence_length": key.sequence_length,
    }


def from_config(path: str | None) -> dict[str, Any]:
    """What a DeepSpeed JSON says; its terapipe section is validated as the engine does, enabled or not."""
    if path is None:
        return {}
    from terapipe_ds.config import TeraPipeConfig

    config = read_json(path, "--config")
    if not isinstance(config.get("terapipe", {}), dict):
        raise CommandError(f"{path}: terapipe = {show_value(config['terapipe'])}: give an object")
    section = TeraPipeConfig.from_deepspeed({"terapipe": config.get("terapipe", {}) | {"enabled": False}})
    found = {
        "micro_batches": _count(path, config, "gradient_accumulation_steps", 1),
        "micro_batch_size": _count(path, config, "train_micro_batch_size_per_gpu", 1),
        "zero_stage": _count(path, _object(path, config, "zero_optimization"), "stage", 0),
        "granularity": section.granularity_tokens if "granularity_tokens" in section.model_fields_set else None,
        "memory_limit_gb": section.planner.memory_limit_gb,
        "chunks_per_stage": section.chunks_per_stage if "chunks_per_stage" in config.get("terapipe", {}) else None,
        "schedule": section.schedule if "schedule" in config.get("terapipe", {}) else None,
        "options_by_schedule": {section.schedule: dict(section.schedule_options)},
        "dtype": next((name for name in ("bf16", "fp16") if _object(path, config, name).get("enabled") is True), None),
        "activation_checkpointing": _object(path, config, "pipeline").get("activation_checkpoint_interval", 0) != 0
        or None,
    }
    return {name: value for name, value in found.items() if value not in (None, "auto")}


def _count(path: str, config: dict[str, Any], key: str, least: int) -> int | None:
    """None where it is not given, or "auto"."""
    value = config.get(key)
    if value in (None, "auto"):
        return None
    if type(value) is not int or value < least:
        raise CommandError(f"{path}: {key} = {show_value(value)}: give an integer >= {least}")
    return value


def _object(path: str, config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CommandError(f"{path}: {key} = {show_value(value)}: give an object")
    return value
