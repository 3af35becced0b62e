"""Collect the input of `terapipe plan`, measured or counted costs and memory of the parts, and search with it.

An option that the user does not set comes from the profile, then from the DeepSpeed JSON, then from the model: see
`complete`. Commands import this module when they run: it loads numpy.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from terapipe_ds.commands.plan_options import CostOptions, PlanOptions
from terapipe_ds.commands.user_model import read_config
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.config.conflicts import conflicting_keys
from terapipe_ds.costs.analytic import analytic_costs
from terapipe_ds.costs.devices import device_card
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.costs.profile import Profile
from terapipe_ds.costs.utilisation import Utilisation
from terapipe_ds.files.user_json import DTYPE_NAMES, CommandError, DeepSpeedJson, is_on, says_nothing, value_at
from terapipe_ds.messages import bytes_of_gb, show_value
from terapipe_ds.planner import (
    MemoryLimitError,
    MemoryModel,
    PlanResult,
    Ranking,
    num_parts_of,
    plan_slices,
    rank_schedules,
)
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import TRY_FEWER_SEQUENCES, TRY_RECOMPUTE
from terapipe_ds.planner.layers.both_ways import both_ways_s, gradient_itemsize
from terapipe_ds.planner.layers.measured_parts import NOT_TIMED, MeasuredParts
from terapipe_ds.planner.layers.parts import bytes_summed
from terapipe_ds.planner.model_memory import ITEMSIZE, OPTIMIZER_STATES
from terapipe_ds.planner.ranking.rank import PartsOf, SecondsOf
from terapipe_ds.planner.recompute import PartLayers, costs_of, plan_with_recompute, recomputable_parts
from terapipe_ds.planner.strategy import USABLE, size_for, size_of
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES, SEARCH, count_parts
from terapipe_ds.schedule.show import many
from terapipe_ds.strategy import Grid, bounds_among

MAX_UNITS = 100_000
_BUCKET = 500_000_000  # numbers that ZeRO reduces at once where a DeepSpeed JSON does not say
NO_COSTS = "no costs: give --model and --device, or --profile with measured costs"


def plan_setup(options: PlanOptions) -> PlanSetup:
    """Return the setup that the options describe; raise CommandError where one is missing, or two do not agree."""
    profile = None if options.profile is None else Profile.load(options.profile)
    configured = from_config(options.config, is_measured=profile is not None)
    bounds, wire_formats = configured.pop("partition", None), configured.pop("wire_formats", (None, None))
    section, ds_config = configured.pop("section", {}), configured.pop("ds_config", None)
    own = dict(ds_config or {})
    if "zero_stage" in options.given and isinstance(zero := own.get("zero_optimization"), dict):
        kept = {key: value for key, value in zero.items() if not key.endswith("offload_param")}  # those are for ZeRO-3
        own["zero_optimization"] = kept | {"stage": options.zero_stage}
    if (conflicts := list(conflicting_keys(own))) and is_on(section.get("enabled")):  # as a job with the plan would
        raise CommandError(" - ".join(conflicts))
    if "strategy" in configured:
        raise CommandError(
            f"terapipe.strategy = {show_value(configured['strategy'])} in --config: it has its schedule and slices; "
            "take the key out to find others, or price it with `terapipe strategy --against`"
        )
    unknown = configured.pop("unknown", {})
    # a profile knows the others if it was measured with them
    if refused := [key for key in unknown if profile is None or key == "terapipe.offload_activations"]:
        shown = " and ".join(f"{key} = {show_value(unknown[key])}" for key in refused)
        counts = "" if "torch_autocast.enabled" in refused else "; only `terapipe strategy` has that among its choices"
        raise CommandError(f"{shown} in --config: not among the costs of this command{counts}; take it out to plan")
    options = complete(options, profile, configured)
    if bounds and (profile is None or options.recompute):
        raise CommandError(
            f"terapipe.partition = {list(bounds)} in --config: "
            + ("--choose-recompute" if options.recompute else "counted costs of a named model")
            + " cut the layers evenly; give --profile without it, or take the key out to plan for an even cut"
        )
    setup = (
        counted_setup(options, wire_formats, ds_config)
        if profile is None
        else _measured(options, profile, bounds, ds_config)
    )
    limits = {"--memory-limit-gb": options.memory_limit_gb, "--device": options.device or None}
    for name, value in limits.items():
        if value is not None and setup.memory_of is None and not options.recompute:
            raise CommandError(f"{name} {value}: the profile has no memory of all parts; give --model as well")
    if section.get("compile") and options.schedule in ("auto", SEARCH):  # the engine refuses split backwards
        setup = dataclasses.replace(setup, costs_of=_unsplit(setup.costs_of))
    notes, otherwise = setup.notes, ", ".join(_uncounted(ds_config or {}) if options.model else ())
    notes += f"\ncounted otherwise: {otherwise}" if otherwise else ""
    kinds = "times" if options.model or setup.memory_of is None else "times and memory"
    notes += "" if profile is None else _notes_of_measured(options, ds_config or {}, unknown, kinds)
    notes += _note("not taken from --config", _not_taken(options, section, configured.get("train_batch_size")))
    notes += "".join(f"\nto train with this plan: {conflict}" for conflict in conflicts)
    return dataclasses.replace(setup, section=section, notes=notes)


def _notes_of_measured(options: PlanOptions, ds_config: Mapping[str, Any], unknown: dict[str, Any], kinds: str) -> str:
    measured = {key: value_at(ds_config, key) for key in _MEASURED} | unknown
    if measured["pipeline.activation_checkpoint_interval"] == 1:  # as the key of the profile has it
        del measured["pipeline.activation_checkpoint_interval"]
    alone = f"\nthe profile decides the {kinds}: --sequence-parallel only decides the multiples of slice lengths"
    decides = f"the profile decides the {kinds}, not these keys of --config"
    return _note(decides, measured) + alone * options.sequence_parallel


def _note(title: str, values: Mapping[str, Any]) -> str:
    shown = [f"{key} = {show_value(value)}" for key, value in values.items() if not says_nothing(key, value)]
    return f"\n{title}: {', '.join(shown)}" if shown else ""


_UNCOUNTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "optimizer.type": ("Adam", lambda value: str(value).lower() not in OPTIMIZER_STATES),
    "optimizer.legacy_fusion": ("false", is_on),
    "zero_optimization.overlap_comm": ("false", is_on),
    "data_types.keep_in_fp32_modules": ("none", bool),
    "communication_data_type": ("that of the gradients", bool),
    "terapipe.compile": ("false", bool),
    "terapipe.links.exact_until_part": ("no link in another format", bool),
    "pipeline.activation_checkpoint_interval": ("1", lambda value: value > 1),
    "activation_checkpointing.cpu_checkpointing": ("false", is_on),
    "activation_checkpointing.partition_activations": ("false", is_on),
    "activation_checkpointing.contiguous_memory_optimization": ("false", is_on),
}
"""Key of a DeepSpeed JSON -> how costs and memory are counted for all values, and whether a value is another one."""

_MEASURED = (
    *(*_UNCOUNTED, "data_types.grad_accum_dtype", "bf16.bf16_optimizer_states", "terapipe.links.forward"),
    *("terapipe.links.backward", "zero_optimization.stage", "zero_optimization.offload_optimizer.device"),
    *("zero_optimization.contiguous_gradients", "zero_optimization.reduce_bucket_size"),
)
"""Keys of a DeepSpeed JSON whose costs are in a profile, which does not tell their values."""


def _not_taken(options: PlanOptions, section: Mapping[str, Any], total: int | None) -> dict[str, Any]:
    """Return the settings of `--config` that the plan replaces by others, although no option says so."""
    batch = options.data_parallel * options.micro_batches * options.micro_batch_size
    values = {"slices": section.get("slices"), "planner.profile": value_at(section, "planner.profile")}
    if values["planner.profile"] in ("measure", options.profile):
        del values["planner.profile"]
    if not options.schedule_options:
        values |= {f"schedule_options.{key}": value for key, value in (section.get("schedule_options") or {}).items()}
    values = {f"terapipe.{key}": value for key, value in values.items()}
    return values if total in (None, batch) else values | {"train_batch_size": total}


def _unsplit(costs_of: PartsOf) -> PartsOf:
    """Hide the seconds of W of costs, so that no schedule that splits backwards is planned."""

    def without_weights(num_parts: int) -> list[Any] | None:
        parts = costs_of(num_parts)
        copies = {id(part): copy.copy(part) for part in parts or ()}  # equal parts stay one object
        for each in copies.values():
            vars(each)["weight_s"] = None
        return parts and [copies[id(part)] for part in parts]

    return without_weights


def complete(options: PlanOptions, profile: Profile | None, configured: dict[str, Any]) -> PlanOptions:
    """Return the options; those that the user did not set come from the profile, the DeepSpeed JSON, or the model.

    Raises CommandError where an option is missing, or asks for something that the profile did not measure.
    """
    # a profile says how many it has
    has_stages = options.stages or "stages" in configured or profile is not None
    missing = [] if has_stages else ["--stages is missing: give the number of pipeline stages"]
    if profile is None and not (options.model and options.device):
        missing = [NO_COSTS, *missing]
    if missing := [*missing, *unknown_names(options)]:
        raise CommandError("; ".join(missing))
    options_by_schedule = configured.pop("options_by_schedule", {})
    if profile is None:
        usual = {"sequence_length": size_of(options.model).max_sequence_length}
    else:
        usual = _from_profile(profile, options, configured)
    options = options.filled(usual, configured, _rest_of_batch(options, usual | configured))
    options = options.filled({"schedule_options": options_by_schedule.get(options.schedule, {})})
    if options.sequence_parallel and options.tensor_parallel == 1:
        raise CommandError(
            "--sequence-parallel divides tokens over tensor ranks, and there is one: give --tensor-parallel"
        )
    if options.sequence_parallel and options.sequence_length % options.tensor_parallel:
        problem = f"--sequence-length {options.sequence_length}: --sequence-parallel divides the tokens over"
        raise CommandError(f"{problem} {options.tensor_parallel} ranks; give a multiple of {options.tensor_parallel}")
    if options.stages * options.micro_batches > MAX_UNITS:
        many = f"{options.stages} stages with {options.micro_batches} micro-batches"
        raise CommandError(f"{many} take too long to plan: ask for stages times micro-batches of at most {MAX_UNITS}")
    return options


def _rest_of_batch(options: PlanOptions, values: dict[str, Any]) -> dict[str, int]:
    """Return the number that `train_batch_size` leaves: of sequences, micro-batches or replicas, as DeepSpeed counts.

    With an option for one of the others it leaves no number of replicas: the plan need not be for the JSON's batch.
    """
    numbers = values | options.given
    total, names = numbers.get("train_batch_size"), ("micro_batch_size", "micro_batches", "data_parallel")
    missing = next((name for name in names if name not in numbers), None)
    is_free = missing == "data_parallel" and any(name in options.given for name in names)
    if total is None or missing is None or is_free:
        return {}
    known = math.prod(numbers.get(name, 1) for name in names)
    if total % known:
        problem = f"train_batch_size = {total} in --config is no multiple of {known}, the replicas times the sequences"
        raise CommandError(f"{problem} or micro-batches of each; give --micro-batches and --micro-batch-size")
    return {missing: total // known}


def unknown_names(options: CostOptions) -> list[str]:
    """Return a message for a model and for a device that nobody knows."""
    problems = []
    for name, look_up in ((options.model, size_of), (options.device, device_card)):
        try:
            if name:
                look_up(name)
        except ValueError as error:
            problems.append(str(error))
    return problems


def from_config(path: str | None, *, is_measured: bool) -> dict[str, Any]:
    """Return the options that a DeepSpeed JSON sets; validate its terapipe section as the engine, even if disabled.

    Without a precision in the JSON, DeepSpeed keeps the dtype of the parameters: the profile has it, or it is fp32.
    """
    if path is None:
        return {}
    ds_config = read_config(path)
    given = ds_config.get("terapipe", {})
    if not isinstance(given, dict):
        raise CommandError(f"terapipe = {show_value(given)} in --config: give an object")
    # an enabled section must go with its own schedule, and a disabled one has no documents
    section = TeraPipeConfig.from_deepspeed({"terapipe": given | {"enabled": False, "documents": "off"}})
    keys = DeepSpeedJson(ds_config)
    checkpoints = keys.fixed_number("pipeline.activation_checkpoint_interval", 0) > 0 or None
    ranks, links = keys.number("sequence_parallel_size"), section.links
    unknown = {  # no counted costs of this command know them
        "terapipe.recompute": section.recompute not in ("full", "off", None) and given["recompute"],
        "terapipe.keep_attention": section.keep_attention,
        "terapipe.offload_activations": section.offload_activations,
        "torch_autocast.enabled": keys.is_on("torch_autocast.enabled"),
        "sequence_parallel_size": ranks != 1 and ranks,
    }
    values = {
        "stages": keys.number("pipeline.stages"),
        "micro_batches": keys.number("gradient_accumulation_steps"),
        "micro_batch_size": keys.number("train_micro_batch_size_per_gpu"),
        "zero_stage": keys.number("zero_optimization.stage", least=0),
        "tensor_parallel": keys.number("tensor_parallel.autotp_size", least=0) or None,
        "granularity": section.granularity_tokens if "granularity_tokens" in given else None,
        "memory_limit_gb": section.planner.memory_limit_gb,
        "chunks_per_stage": section.chunks_per_stage if "chunks_per_stage" in given else None,
        "schedule": section.schedule if "schedule" in given else None,
        "options_by_schedule": {section.schedule: section.schedule_options},
        "dtype": keys.precision or (None if is_measured or keys.leaves_precision else "fp32"),
        "activation_checkpointing": {"full": True, "off": False}.get(str(section.recompute), checkpoints),
        "partition": section.partition,
        # the planner has one price for all links: the widest one's
        "wire_formats": None if links.exact_until_part else (links.forward, links.backward),
        "strategy": section.strategy,
        "section": given,
        "ds_config": ds_config,
        "unknown": {key: value for key, value in unknown.items() if value},
        "train_batch_size": keys.number("train_batch_size"),
    }
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _from_profile(profile: Profile, options: PlanOptions, configured: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the profile fixes; no option can turn it into another dtype or micro-batch size.

    The stages are not guessed where a profile of an earlier version counts parts only: one that was measured between
    stages (it has links) may have had several on each.
    """
    path, key, num_parts = options.profile, profile.key, len(profile.parts)
    divides = any(num_parts % stages == 0 for stages in range(2, num_parts))
    wanted = configured | options.given
    if "stages" not in wanted and profile.pipeline_stages is None and profile.links and divides:
        raise CommandError(
            f"--stages is missing: {path} has {num_parts} parts, of which a stage may have held several; give the "
            f"number of pipeline stages, --stages {num_parts} if each held one"
        )
    fixed = {
        "dtype": key.parameter_dtype,
        "micro_batch_size": key.micro_batch,
        "tensor_parallel": key.tensor_parallel,
        "activation_checkpointing": key.activation_checkpointing,
    }
    for name, has in fixed.items():
        asked, has = (DTYPE_NAMES.get(str(value), value) for value in (wanted.get(name), has))
        if asked not in (None, "auto", has):
            problem = f"{path} was measured with {name.replace('_', '-')} {has}, asked for is {asked}"
            raise CommandError(f"{problem}: give the same, or measure again with `terapipe profile`")
    if "zero_stage" in options.given and not options.model:
        problem = f"--zero-stage: the states of optimizers in {path} have the bytes of the job that measured them"
        raise CommandError(f"{problem}; leave it out, or measure again with `terapipe profile`")
    stages = key.num_stages if profile.pipeline_stages is None else profile.pipeline_stages
    return {**fixed, "stages": configured.get("stages", stages), "sequence_length": key.sequence_length}


@dataclasses.dataclass(frozen=True)
class PlanSetup:
    """Hold the input of the planner; `options` are complete."""

    options: PlanOptions
    subject: str  # of the heading: model, dtype, devices
    costs_of: PartsOf  # by the number of parts; None where the layers cannot be cut so
    memory_of: PartsOf | None
    both_ways_s_of: SecondsOf  # seconds of bidirectional schedules on top of their makespan
    notes: str = ""
    size: ModelSize | None = None  # of a counted model
    bounds_of: Callable[[int], Sequence[int] | None] = lambda num_parts: None  # where the engine has to be told
    section: dict[str, Any] = dataclasses.field(default_factory=dict)  # `terapipe` of --config
    measured: MeasuredParts | None = None  # of a profile

    @property
    def title(self) -> str:
        options, micro_batches = self.options, many(self.options.micro_batches, "micro-batch")
        parallel = f"{many(options.stages, 'stage')}, tensor parallel {options.tensor_parallel}"
        parallel += f", data parallel {options.data_parallel}" if options.data_parallel > 1 else ""
        shape = f"{micro_batches} of {options.micro_batch_size} x {options.sequence_length}"
        return f"{self.subject}\n{parallel}, {shape} tokens{self.notes}"

    def utilisation(self, seconds: float) -> Utilisation | None:
        """Return model FLOP/s and MFU of a device for a pipeline's step; None where nobody counts the FLOPs."""
        options = self.options
        if self.size is None:
            return None
        step = options.micro_batches * options.micro_batch_size, options.sequence_length
        devices = options.stages * options.tensor_parallel
        return Utilisation.of(self.size, device_card(options.device), options.dtype, step, seconds, devices)

    @functools.cached_property
    def recomputable(self) -> list[PartLayers]:
        """Return the parts of a measured model, whose layers may recompute, with the bytes of their processes."""
        assert self.measured is not None, "refused before"
        return recomputable_parts(self.measured, self.measured.bounds(self.options.stages) or ())

    def costs_of_result(self, result: PlanResult) -> list[Any] | None:
        """Return the costs of the parts of a plan, with the layers that it recomputes."""
        if result.recompute is not None:
            return costs_of(self.recomputable, result.recompute)
        return self.costs_of(count_parts(result.schedule, result.num_stages, result.chunks_per_stage))

    @property
    def limit_bytes(self) -> float | None:
        """Return a device's memory by the options or its card; None where it is unknown."""
        if self.memory_of is not None and self.options.memory_limit_gb is not None:
            return max(1.0, bytes_of_gb(self.options.memory_limit_gb))
        if not (self.memory_of and self.options.device):
            return None
        return USABLE * device_card(self.options.device).memory_bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the arguments that every search takes."""
        return self.options.sequence_length, self.options.stages, self.options.micro_batches, self.options.granule


def counted_setup(
    options: PlanOptions, wire_formats: tuple[str | None, str | None], ds_config: Mapping[str, Any] | None = None
) -> PlanSetup:
    """Return the input of the planner from a model's sizes and a device card."""
    size = size_of(options.model)
    if size.positions == "learned" and options.sequence_length > size.max_sequence_length:
        problem = f"{size.name} has learned positions for {size.max_sequence_length} tokens"
        raise CommandError(f"--sequence-length {options.sequence_length}: {problem}; give at most that many")
    card = device_card(options.device)
    dtype = card.resolve_dtype(options.dtype)
    devices = options.stages * options.tensor_parallel
    shape: dict[str, Any] = {"devices": devices, "wire_formats": wire_formats, **options.shape}
    shape["splits_tokens"] = options.sequence_parallel
    count = functools.partial(analytic_costs, size, card, dtype=options.dtype, **shape)

    @functools.cache
    def costs_of(num_parts: int) -> list[Any] | None:
        return None if num_parts > max(size.num_layers, options.stages) else count(num_stages=num_parts)

    return PlanSetup(
        options,
        f"{size.name} in {dtype} on {devices * options.data_parallel} x {card.title}, costs counted",
        costs_of,
        _memory(options, ds_config, dtype),
        _counted_both_ways(options, costs_of),
        "".join(f"\n{name}: {text}" for name, text in size.notes(options.tensor_parallel).items()),
        size=size,
    )


def _uncounted(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of a DeepSpeed JSON for which the counts take others."""
    for key, (counted, is_other) in _UNCOUNTED.items():
        if (value := value_at(ds_config, key)) not in (None, "auto") and is_other(value):
            yield f"{key} = {show_value(value)} (as {counted})"


def _counted_both_ways(options: PlanOptions, costs_of: PartsOf) -> SecondsOf:
    """Return a function that counts the seconds of link, Adam and reduction over replicas (a ring)."""
    replicas = options.data_parallel

    def both_ways_s_of(num_parts: int) -> float:
        parts = costs_of(num_parts)  # which are known: only then is a bidirectional schedule planned
        bandwidth = parts[0].link.bandwidth_bytes_per_s
        dtype = DTYPE_NAMES.get(parts[0].dtype, parts[0].dtype)
        counts = [part.num_parameters() / options.tensor_parallel for part in parts]
        ring_s = 2 * (replicas - 1) / replicas * bytes_summed(dtype, options.zero_stage) / bandwidth  # per parameter
        # DeepSpeed's optimizer for bfloat16 divides its states whatever the ZeRO stage
        divided = replicas if options.zero_stage == 1 or dtype == "bfloat16" else 1
        steps = [part.step_s() / divided + ring_s * count for part, count in zip(parts, counts, strict=True)]
        itemsize = gradient_itemsize(dtype) if options.zero_stage else ITEMSIZE[dtype]
        return both_ways_s([itemsize * count for count in counts], bandwidth, steps)

    return both_ways_s_of


def _measured(
    options: PlanOptions, profile: Profile, bounds: Sequence[int] | None, ds_config: Mapping[str, Any] | None
) -> PlanSetup:
    """Return the planner's input with measured costs; with `bounds` the layers are cut there and nowhere else."""
    models, key = CostModel.from_profile(profile), profile.key
    stages, parts = options.stages, MeasuredParts.of_profile(profile).for_stages(options.stages)
    parts = dataclasses.replace(parts, process_bytes=_process_bytes(options))
    if (wanted := bounds) is not None and profile.layers is not None and parts.is_whole:
        bounds = bounds_among(profile.layers.kind_of, wanted)  # as the engine reads a partition for a model's size
    if wanted and not (parts.is_whole and parts.has_layers and bounds):
        raise CommandError(
            f"terapipe.partition = {list(wanted)} in --config: {options.profile} knows no such layers (it has "
            f"{many(len(models), 'part')} and {len(parts.layers)} to cut); measure with the same config, or take "
            "the key out"
        )

    def costs_of(num_parts: int) -> list[Any] | None:
        return None if bounds and num_parts != len(bounds) - 1 else parts.cut(num_parts, bounds)

    def memory_of(num_parts: int) -> MemoryModel | None:
        return parts.memory(num_parts, bounds)

    def bounds_of(num_parts: int) -> Sequence[int] | None:
        # the planner evens out other numbers of parts, where the module's own method may cut elsewhere
        is_new = parts.has_layers and parts.is_whole and num_parts != len(models)
        return parts.bounds(num_parts) if bounds is None and is_new else bounds

    if not bounds and parts.cut(stages) is None:
        most, few = len(parts.layers), len(models)
        is_cut = parts.has_layers and parts.is_whole
        has = f"{most} layers; give at most --stages {most}" if is_cut else f"{few} parts; give --stages {few}"
        raise CommandError(f"--stages {stages}: {options.profile} has {has}")
    _check_same_model(options, profile, parts)
    notes = f"\nplanned for {stages} stages; the profile has {many(len(models), 'part')}"
    if profile.pipeline_stages not in (None, len(models)):
        notes += f" of {profile.pipeline_stages} stages"
    notes += "" if parts.has_layers else f"; {NOT_TIMED}"
    notes += f"\nlayers cut at {', '.join(map(str, bounds))}, as terapipe.partition says" if bounds else ""
    ranks = profile.state_ranks
    if parts.has_memory and not options.model and (options.data_parallel > 1 or ranks not in (None, 1)):
        notes += "\noptimizer states have the bytes of the job that was measured, whatever the replicas"
        notes += f": it divided them over {many(ranks, 'rank')}" if ranks else ""
    unsaid = "\nmemory counted as on a GPU, without its context: --device names another, --device cpu a CPU"
    notes += unsaid if options.model and not options.device else ""
    smallest = max(model.min_tokens for model in models)
    if options.granule < smallest:  # no plan of shorter slices can be trusted
        notes += f"\nslices of fewer than {smallest} tokens were not measured and count as {smallest}"
    return PlanSetup(
        options,
        f"{key.model} in {key.dtype} on {key.device}, costs measured",
        costs_of,
        _memory(options, ds_config, key.parameter_dtype) if options.model else memory_of if parts.has_memory else None,
        parts.both_ways_s,
        notes,
        bounds_of=bounds_of,
        measured=parts,
    )


def _check_same_model(options: PlanOptions, profile: Profile, parts: MeasuredParts) -> None:
    """Refuse a model with less than half, or over twice, of the parameters of the measured layers: another one."""
    if (layers := profile.layers) is None or not (options.model and parts.is_whole):
        return
    counted = size_of(options.model).num_parameters()
    measured = options.tensor_parallel * sum(layers.kinds[kind].parameters for kind in layers.kind_of)
    if not counted / 2 <= measured <= 2 * counted:  # tied weights may count twice
        has = f"has {counted:,} parameters, the layers of {options.profile} {measured:,}"
        raise CommandError(f"--model {options.model} {has}: give the model that was measured")


def _process_bytes(options: PlanOptions) -> int:
    """Return the bytes of a process outside of torch's allocator; 0 where nobody names the device."""
    grid = Grid(options.stages, options.data_parallel, options.tensor_parallel)
    return Cluster(options.device, 1, 1).process_bytes(grid) if options.device else 0


def _memory(options: PlanOptions, ds_config: Mapping[str, Any] | None, dtype: str) -> PartsOf:
    """Return a function that counts memory by the number of parts."""
    size, process_bytes = size_for(options.model, options.sequence_length), _process_bytes(options)
    on_cpu, dtype = bool(options.device) and device_card(options.device).is_cpu, DTYPE_NAMES.get(dtype, dtype)
    training = {"reduce_bucket": _BUCKET} if ds_config is None else _training(ds_config, options, size, dtype)

    def memory_of(num_parts: int) -> MemoryModel | None:
        if num_parts > max(size.num_layers, options.stages):
            return None
        return MemoryModel.of_model(
            size,
            num_stages=num_parts,
            dtype=dtype,
            data_parallel=options.data_parallel,
            zero_stage=options.zero_stage,
            sequence_parallel=options.sequence_parallel,
            process_bytes=process_bytes,
            on_cpu=on_cpu,
            **options.shape,
            **training,
        )

    return memory_of


def offloads_optimizer(ds_config: Mapping[str, Any]) -> bool | None:
    """Return whether a DeepSpeed JSON puts the states of the optimizer on the host; None: it does not say."""
    device = value_at(ds_config, "zero_optimization.offload_optimizer.device")
    return None if device is None else device != "none"


def _training(ds_config: Mapping[str, Any], options: PlanOptions, size: ModelSize, dtype: str) -> dict[str, Any]:
    """Return what decides the bytes of gradients and optimizer states, as `MemoryModel.of_model` takes it."""
    names = "contiguous_gradients", "reduce_bucket_size"
    contiguous, bucket = (value_at(ds_config, f"zero_optimization.{name}") for name in names)
    offloads = bool(offloads_optimizer(ds_config))
    if not offloads and contiguous is not None and not is_on(contiguous):  # an offloaded optimizer has one anyway
        bucket = 0
    elif bucket == "auto":  # in whose place Trainer puts the square of the hidden size
        bucket = size.hidden_size**2
    elif type(bucket) not in (int, float) or not math.isfinite(bucket):
        bucket = _BUCKET
    name = str(value_at(ds_config, "optimizer.type")).lower()
    if name == "sgd" and value_at(ds_config, "optimizer.params.momentum"):
        name = "lion"  # which keeps one number per parameter, too
    # DeepSpeed sums in the dtype of the parameters where its JSON does not say
    sums = str(value_at(ds_config, "data_types.grad_accum_dtype") or dtype).removeprefix("torch.")
    return {
        "optimizer": name if name in OPTIMIZER_STATES else "adam",
        "gradient_dtype": {"half": "float16", "float": "float32", **DTYPE_NAMES}.get(sums, sums),
        "offload_optimizer": offloads and options.zero_stage == 1,
        "reduce_bucket": max(0, int(bucket)),
        "narrow_states": is_on(value_at(ds_config, "bf16.bf16_optimizer_states")),
    }


def search_plan(setup: PlanSetup, progress: Callable[[str, float, float], None]) -> tuple[PlanResult, Ranking | None]:
    """Return the best plan, and with "auto" the ranking of all schedules; no error advises what the user has done."""
    options = setup.options
    tried = [TRY_RECOMPUTE] * options.activation_checkpointing + [TRY_FEWER_SEQUENCES] * (options.micro_batch_size == 1)
    try:
        return _search(setup, progress)
    except MemoryLimitError as error:
        raise error.without(*tried) from None


def _search(setup: PlanSetup, progress: Callable[[str, float, float], None]) -> tuple[PlanResult, Ranking | None]:
    options = setup.options
    if options.schedule_options and options.schedule == "auto":
        name = next(iter(options.schedule_options))
        raise CommandError(f"--option {name}: it goes with one schedule; give --schedule too")
    if options.recompute:
        return _search_recompute(setup), None
    limits: Any = {"memory_limit_bytes": setup.limit_bytes, "max_slices": options.max_slices, "progress": progress}
    if options.schedule != "auto":
        return _search_one(setup, limits), None
    ranking = rank_schedules(
        setup.costs_of,
        *setup.shape,
        memory_of=setup.memory_of,
        both_ways_s_of=setup.both_ways_s_of,
        chunks_per_stage=options.chunks_per_stage,
        with_order=options.order is not None,
        **limits,
    )
    return ranking.best, ranking


def _search_recompute(setup: PlanSetup) -> PlanResult:
    options = setup.options
    if setup.measured is None or options.memory_limit_gb is None:
        raise CommandError("--choose-recompute: give --profile, of a measured model, and --memory-limit-gb")
    if options.activation_checkpointing:
        problem = f"--choose-recompute: in {options.profile} layers recompute already"
        raise CommandError(f"{problem}; measure without activation checkpointing")
    given = f"--chunks-per-stage {options.chunks_per_stage}" if options.chunks_per_stage not in (None, 1) else None
    given = f"--schedule {options.schedule}" if options.schedule in (*CHUNKED_SCHEDULES, SEARCH) else given
    if given := given or (options.order and "--order"):
        raise CommandError(
            f"{given}: --choose-recompute is for a schedule by its name, with one part per stage; leave one of them out"
        )
    result = plan_with_recompute(
        setup.recomputable,
        options.sequence_length,
        options.micro_batches,
        options.granule,
        options.schedule,
        bytes_of_gb(options.memory_limit_gb),
        schedule_options=options.schedule_options,
        max_slices=options.max_slices,
    )
    if setup.section.get("keep_attention") and not result.keeps_attention:
        problem = f"terapipe.keep_attention = true in --config: nobody timed that for {options.profile}"
        raise CommandError(f"{problem}; measure in a job with this key, or leave it out")
    return result


def _search_one(setup: PlanSetup, limits: dict[str, Any]) -> PlanResult:
    """Return the best plan of one schedule; the planner refuses an unknown one."""
    options = setup.options
    chunks, num_parts = options.chunks_per_stage or 1, options.stages
    if options.schedule in (*SCHEDULE_NAMES, SEARCH):
        num_parts = num_parts_of(options.schedule, num_parts, chunks, None)
    if (costs := setup.costs_of(num_parts)) is None:
        problem = f"the layers cannot be cut in {num_parts} parts"
        raise CommandError(f"--schedule {options.schedule}: {problem}; ask for fewer")
    result = plan_slices(
        costs,
        *setup.shape,
        options.schedule,
        memory=None if setup.memory_of is None else setup.memory_of(num_parts),
        chunks_per_stage=chunks,
        schedule_options=options.schedule_options,
        **limits,
    )
    if num_parts < result.chunks_per_stage * options.stages:
        result = dataclasses.replace(result, extra_s=setup.both_ways_s_of(num_parts))
    return result
