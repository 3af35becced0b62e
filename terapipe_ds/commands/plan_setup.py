"""What `terapipe plan` plans for: costs and memory of the parts, measured or counted."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from terapipe_ds.commands import DTYPE_NAMES, CommandError
from terapipe_ds.commands.plan_options import PlanOptions, complete

if TYPE_CHECKING:
    from terapipe_ds.costs.devices import DeviceCard
    from terapipe_ds.costs.model_sizes import ModelSize
    from terapipe_ds.costs.profile import Profile
    from terapipe_ds.planner import MemoryModel
    from terapipe_ds.planner.ranking.rank import PartsOf, SecondsOf


@dataclasses.dataclass(frozen=True)
class PlanSetup:
    """What is planned for; `options` are complete."""

    options: PlanOptions
    title: str
    costs_of: PartsOf  # by the number of parts; None where the layers cannot be cut so
    memory_of: PartsOf | None
    both_ways_s_of: SecondsOf  # what bidirectional schedules take besides their makespan
    limit_bytes: float | None
    sequence_length: int
    granularity: int  # with that of sequence parallelism

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What every search of the planner takes."""
        return self.sequence_length, self.options.stages, self.options.micro_batches, self.granularity


def plan_setup(options: PlanOptions) -> PlanSetup:
    """Return all that the options say.

    Raises:
        CommandError: something is missing, or does not fit together.
    """
    from terapipe_ds.costs.profile import Profile

    profile = None if options.profile is None else Profile.load(options.profile)
    options = complete(options, profile)
    setup = _counted(options) if profile is None else _measured(options, profile)
    if options.memory_limit_gb is not None and setup.memory_of is None:
        limit = f"--memory-limit-gb {options.memory_limit_gb}"
        raise CommandError(f"{limit}: measured costs say nothing of memory; give --model as well")
    return setup


def _setup(options: PlanOptions, title: str, sequence_length: int, notes: str = "", **parts: Any) -> PlanSetup:
    """Return the setup with its heading, the limit of memory and where slices may end."""
    from terapipe_ds.costs.devices import device_card

    limit_bytes = None
    if parts["memory_of"] is not None and options.memory_limit_gb is not None:
        limit_bytes = options.memory_limit_gb * 1e9
    elif parts["memory_of"] is not None and options.device:
        limit_bytes = device_card(options.device).memory_bytes
    parallel = f"{options.stages} stages, tensor parallel {options.tensor_parallel}"
    parallel += f", data parallel {options.data_parallel}" if options.data_parallel > 1 else ""
    count = options.micro_batches
    shape = f"{count} micro-batch{'es' * (count != 1)} of {options.micro_batch_size} x {sequence_length} tokens"
    return PlanSetup(
        options=options,
        title=f"{title}\n{parallel}, {shape}{notes}",
        limit_bytes=limit_bytes,
        sequence_length=sequence_length,
        granularity=_granularity(options, sequence_length),
        **parts,
    )


def _counted(options: PlanOptions) -> PlanSetup:
    from terapipe_ds.costs.devices import device_card
    from terapipe_ds.costs.model_sizes import model_size

    size, card = model_size(options.model), device_card(options.device)
    length = options.sequence_length or size.max_sequence_length
    if size.positions == "learned" and length > size.max_sequence_length:
        raise CommandError(
            f"--sequence-length {length}: {size.name} has learned positions for {size.max_sequence_length} tokens; "
            "give at most that many"
        )
    dtype = card.resolve_dtype(options.dtype)
    devices = options.stages * options.tensor_parallel * options.data_parallel
    costs_of = _counted_parts(options, size, card)
    costs_of(options.stages)  # what cannot be at all is said before anything is searched
    return _setup(
        options,
        f"{size.name} in {dtype} on {devices} x {card.title}, costs counted",
        length,
        costs_of=costs_of,
        memory_of=_memory(options, dtype),
        both_ways_s_of=_counted_both_ways(options, costs_of),
    )


def _counted_both_ways(options: PlanOptions, costs_of: PartsOf) -> SecondsOf:
    """Count the parts' parameters over the card's link, Adam, and the reduction over replicas (a ring)."""
    from terapipe_ds.planner.ranking.bidirectional_cost import both_ways_s, gradient_itemsize

    replicas = options.data_parallel

    def both_ways_s_of(num_parts: int) -> float | None:
        parts = costs_of(num_parts)
        if parts is None:
            return None
        bandwidth = parts[0].link.bandwidth_bytes_per_s
        itemsize = gradient_itemsize(DTYPE_NAMES.get(parts[0].dtype, parts[0].dtype))
        sizes = [itemsize * part.num_parameters() / options.tensor_parallel for part in parts]
        reduce_s = [2 * (replicas - 1) / replicas * size / bandwidth for size in sizes]
        adam_s = [part.step_s() / (replicas if options.zero_stage == 1 else 1) for part in parts]
        return both_ways_s(sizes, bandwidth, [a + r for a, r in zip(adam_s, reduce_s, strict=True)])

    return both_ways_s_of


def _counted_parts(options: PlanOptions, size: ModelSize, card: DeviceCard) -> PartsOf:
    """Count costs by the number of parts. Several parts of a stage are on one device, and its links those of K."""
    from terapipe_ds.costs.analytic import analytic_costs

    @functools.cache
    def counted(num_parts: int) -> list[Any]:
        return list(analytic_costs(size, card, num_stages=num_parts, dtype=options.dtype, **options.shape))

    def costs_of(num_parts: int) -> list[Any] | None:
        if num_parts > max(size.num_layers, options.stages):
            return None
        parts, link = counted(num_parts), counted(options.stages)[0].link
        linked = {id(part): dataclasses.replace(part, link=link) for part in parts}
        return [linked[id(part)] for part in parts]

    return costs_of


def _measured(options: PlanOptions, profile: Profile) -> PlanSetup:
    from terapipe_ds.costs.fitted import CostModel
    from terapipe_ds.planner.ranking.recut import NOT_TIMED, MeasuredParts

    models: list[Any] = CostModel.from_profile(profile)
    stages, parts = options.stages, MeasuredParts.of_profile(profile, models)
    if len(models) == 1:
        parts = dataclasses.replace(
            parts,
            costs=models * stages,
            shares=parts.shares and [*parts.shares] * stages,
            most_parts=parts.most_parts and parts.most_parts * stages,
        )
    if parts.most_parts is None:  # the profile does not say how many layers there are
        parts = dataclasses.replace(parts, most_parts=2 * stages)
    if parts.cut(stages) is None:
        raise CommandError(f"--stages {stages}: {options.profile} has {len(models)} parts; give --stages {len(models)}")
    notes = f"\nplanned for {stages} stages; the profile has {len(models)} part{'s' * (len(models) != 1)}"
    if profile.pipeline_stages not in (None, len(models)):
        notes += f" of {profile.pipeline_stages} stages"
    notes += f"; {NOT_TIMED}" if parts.shares is None else ""
    smallest = max(model.min_tokens for model in models)
    if _granularity(options, options.sequence_length) < smallest:  # no plan of shorter slices can be trusted
        notes += f"\nslices of fewer than {smallest} tokens were not measured and count as {smallest}"
    return _setup(
        options,
        f"{profile.key.model} in {profile.key.dtype} on {profile.key.device}, costs measured",
        options.sequence_length,
        notes,
        costs_of=parts.cut,
        memory_of=_memory(options, profile.key.dtype) if options.model else None,
        both_ways_s_of=parts.both_ways_s,
    )


def _granularity(options: PlanOptions, sequence_length: int) -> int:
    """Return where slices may end. The default is no larger than the sequence, as in training."""
    from terapipe_ds.config import TeraPipeConfig
    from terapipe_ds.planner import granularity_for

    default = TeraPipeConfig.model_fields["granularity_tokens"].default
    granularity = granularity_for(options.granularity or default, options.tensor_parallel, options.sequence_parallel)
    return granularity if options.granularity else min(granularity, sequence_length)


def _memory(options: PlanOptions, dtype: str) -> PartsOf:
    """Count memory by the number of parts."""
    from terapipe_ds.costs.model_sizes import model_size
    from terapipe_ds.planner import MemoryModel

    size = model_size(options.model)

    def memory_of(num_parts: int) -> MemoryModel | None:
        if num_parts > max(size.num_layers, options.stages):
            return None
        return MemoryModel.of_model(
            size,
            num_stages=num_parts,
            dtype=DTYPE_NAMES.get(dtype, dtype),
            data_parallel=options.data_parallel,
            zero_stage=options.zero_stage,
            sequence_parallel=options.sequence_parallel,
            **options.shape,
        )

    return memory_of
