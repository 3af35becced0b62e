"""Rank all schedules for `"schedule": "auto"`, and choose among them.

With a profile from a file this is done before the layers move, and the layout is that of the best schedule of all
(`first_layout`). Else costs are known only after the engine is built, and the best schedule counts that needs no layer
to move (`best_without_moving`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner import (
    MemoryLimitError,
    MemoryModel,
    PlanResult,
    Ranking,
    best_order,
    best_schedule,
    choose,
    describe_ranking,
    plan_slices,
    rank_given,
    rank_schedules,
)
from terapipe_ds.planner.ranking.measured_parts import NOT_TIMED, MeasuredParts, balanced_bounds
from terapipe_ds.runtime.agreement import gather_results
from terapipe_ds.runtime.layout.cut_module import can_move
from terapipe_ds.runtime.layout.layout import Layout, cut_by_hand, layout_of, partition_by_hand
from terapipe_ds.runtime.layout.parted_module import PartedModule
from terapipe_ds.runtime.layout.stock_partition import PARTITION_METHOD, bounds_by, guessed_method
from terapipe_ds.runtime.layout.tied_and_copied import can_have
from terapipe_ds.runtime.log import first_line, show_log
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.runtime.profiling.key import kinds_of_layers, parameters_of_layer
from terapipe_ds.runtime.refusals import slice_length_multiple
from terapipe_ds.schedule import SEARCH, placement_for

logger = logging.getLogger("terapipe_ds")

_Moved = tuple[str, int]
"""A schedule whose layout is not plain, and the parts per stage."""

WORTH_MOVING = 0.01  # of the time; a smaller difference cannot be measured


def best_without_moving(
    stage: StageToPlan, cuts: Cuts, length: int, limit_bytes: float | None
) -> tuple[PlanResult, list[str]]:
    """Return the plan and schedule to run, where `cuts` are of the stage's module, and lines for the log.

    With "auto" these lines are the ranking, and which layout would be faster by 1 %.

    Raises:
        MemoryLimitError: no schedule fits that leaves the layers where they are; says which one fits elsewhere.
    """
    layout = stage.layout
    if stage.config.schedule != "auto":
        return _on_layout(stage, cuts, length, limit_bytes), []
    ranking = cuts.ranking(stage.config, length, stage.engine.micro_batches, limit_bytes)
    possible = [one for one in ranking.results if can_have(one.schedule, getattr(stage.engine, "optimizer", None))]
    try:
        result = _plain(ranking) if layout.is_plain else _on_layout(stage, cuts, length, limit_bytes)
    except MemoryLimitError as error:
        raise _with_other_layout(error, possible, layout) from None
    if layout.has_copies:
        result = dataclasses.replace(result, extra_s=cuts.both_ways_s(layout.num_parts))
    notes = [NOT_TIMED] if not cuts.parts.has_layers else []
    return result, ["", *describe_ranking(ranking), *notes, *_advice(possible, result, layout)]


def _with_other_layout(error: MemoryLimitError, possible: Sequence[PlanResult], layout: Layout) -> MemoryLimitError:
    elsewhere = [one for one in possible if not _leaves(one, layout)]
    if not elsewhere:
        return error
    best = choose(elsewhere)
    text = f"{error}. Schedule {best.schedule!r} fits, but wants the layers at other places: {_to_write(best)}"
    return MemoryLimitError(text, error.need_bytes, error.stage_id)


def _leaves(result: PlanResult, layout: Layout) -> bool:
    """Return whether the layers may stay where they are."""
    return placement_for(result.schedule, layout.num_stages, result.chunks_per_stage) == layout.placement


def _to_write(result: PlanResult) -> str:
    return f'set "schedule": "{result.schedule}", "chunks_per_stage": {result.chunks_per_stage}'


def _plain(ranking: Ranking) -> PlanResult:
    results = (result for result in ranking.results if result.chunks_per_stage == 1)
    return Ranking.of(results, (refusal for refusal in ranking.refused if refusal.chunks_per_stage == 1)).best


def _on_layout(stage: StageToPlan, cuts: Cuts, length: int, limit_bytes: float | None) -> PlanResult:
    """Return the best plan of the config's schedule, or of all that run on the layout, with the whole budget."""
    layout, config = stage.layout, stage.config
    limits: dict[str, Any] = {"memory": cuts.memory(layout.num_parts), "memory_limit_bytes": limit_bytes}
    options: dict[str, Any] = {"chunks_per_stage": layout.chunks_per_stage, "placement": layout.placement, **limits}
    costs, shape = cuts.costs(layout.num_parts), (layout.num_stages, stage.engine.micro_batches)
    if config.slices != "auto" and config.schedule == SEARCH:
        return best_order(
            costs, config.plans_for(length, shape[1]), *shape, chunks_per_stage=layout.chunks_per_stage, **limits
        )
    if config.slices != "auto":
        return best_schedule(costs, config.plans_for(length, shape[1]), *shape, **options)
    shape_and_name = *shape, config.granularity_for(length), config.schedule
    return plan_slices(costs, length, *shape_and_name, schedule_options=config.schedule_options, **options)


def _advice(possible: Sequence[PlanResult], result: PlanResult, layout: Layout) -> list[str]:
    """Return what to write in the config to train faster than by `result`, where that is worth it."""
    best = choose(possible) if possible else result
    gain = _gain(best, result)
    if _leaves(best, layout) or gain <= WORTH_MOVING:
        return []
    besides = "" if best.extra_s is not None else ", the sum of gradients not counted"
    return [
        f"schedule {best.schedule!r} would take {gain:.1%} less time than {result.schedule!r}{besides}, but wants "
        f"the layers at other places: {_to_write(best)} to try it"
    ]


def _gain(best: PlanResult, result: PlanResult) -> float:
    return 1 - best.total_s / result.total_s if result.total_s > 0 else 0.0


class Cuts:
    """Give measured costs and memory by the number of parts, cut as DeepSpeed would cut `module`, which has `layout`.

    Without layers `parts` were measured with the cut of `module`.
    """

    def __init__(self, module: Any, layout: Layout, parts: MeasuredParts, offloads: bool = False) -> None:
        self.parts, self.offloads = parts, offloads
        self._module, self._layout = module, layout
        self._dry_runs: dict[int, list[int] | None] = {}

    def ranking(
        self, config: TeraPipeConfig, length: int, num_micro_batches: int, limit_bytes: float | None = None
    ) -> Ranking:
        """Return all schedules for sequences of `length` tokens, with the slices of `config`, or the planner's.

        Raises:
            TeraPipeConfigError: the slices of `config` are not those of `length` tokens.
        """
        shape = self._layout.num_stages, num_micro_batches
        limits = {"memory_of": self.memory if self.has_memory else None, "memory_limit_bytes": limit_bytes}
        options: dict[str, Any] = {"both_ways_s_of": self.both_ways_s, **limits}
        if config.slices == "auto":
            return rank_schedules(self.costs, length, *shape, config.granularity_for(length), **options)
        return rank_given(self.costs, config.plans_for(length, num_micro_batches), *shape, **options)

    def costs(self, num_parts: int) -> list[Any] | None:
        """Return the costs of so many parts; None where the layers cannot be cut so."""
        bounds = self._bounds(num_parts)
        return None if bounds is None else self.parts.cut(num_parts, bounds)

    def memory(self, num_parts: int) -> MemoryModel | None:
        """Return the memory of so many parts; None where it or the cut is not known."""
        bounds = self._bounds(num_parts)
        memory = None if bounds is None else self.parts.memory(num_parts, bounds)
        return memory if memory is None else dataclasses.replace(memory, offloads=self.offloads)

    @property
    def has_memory(self) -> bool:
        """Return whether memory was measured."""
        return self.parts.has_memory

    def both_ways_s(self, num_parts: int) -> float | None:
        """Return what a pipeline that goes both ways takes besides its makespan; None where that is not known."""
        bounds = self._bounds(num_parts)
        return None if bounds is None else self.parts.both_ways_s(num_parts, bounds)

    def _bounds(self, num_parts: int) -> list[int] | None:
        if not self.parts.has_layers:
            return list(self.parts.bounds_measured) if num_parts == self._layout.num_parts else None
        if (by_hand := self._layout.bounds) is not None:  # never moved
            return list(by_hand) if len(by_hand) == num_parts + 1 else None
        if num_parts == self._layout.num_parts:
            return list(self._module.parts)
        if num_parts not in self._dry_runs:  # it may take long, and what fails is logged
            counts = [unit.trained or 0 for unit in self.parts.units]
            self._dry_runs[num_parts] = bounds_of(self._module, num_parts, counts)
        return self._dry_runs[num_parts]


def bounds_of(module: Any, num_parts: int, parameters: Sequence[int]) -> list[int] | None:
    """Return where DeepSpeed's partition method would cut `module`, without building or printing anything.

    None: some parts would be empty, or the method fails (a program may have its own), which is logged. `parameters` are
    the trained ones of each layer; DeepSpeed builds every layer once more to count them.
    """
    if len(module._layer_specs) < num_parts or len(parameters) != len(module._layer_specs):
        return None
    try:
        method = getattr(module, PARTITION_METHOD, None) or guessed_method(module, parameters)
        if method is None:  # what DeepSpeed's own default aims at
            return balanced_bounds(parameters, num_parts)
        bounds = bounds_by(module, method, num_parts, parameters)
        whole = (len(bounds), bounds[0], bounds[-1]) == (num_parts + 1, 0, len(parameters))
        return bounds if whole and all(start < stop for start, stop in itertools.pairwise(bounds)) else None
    except Exception as error:  # of the program's own code, so of any kind
        problem = f"the layers cannot be cut in {num_parts} parts ({first_line(error)})"
        logger.warning(f"{problem}; schedules that want so many are left out")
        return None


# -- before the layers move ------------------------------------------------------------------------------------------


def first_layout(
    config: TeraPipeConfig, raw: Mapping[str, Any], module: Any, parameters: Any = None, optimizer: Any = None
) -> tuple[Layout, Any]:
    """Return the layout of `module`, and `parameters`, which are read once where they are an iterator.

    It is the layout of the config's schedule. With "auto" and a profile from a file it is that of the schedule with the
    least predicted time, if the gain can be measured; this is a collective over all ranks.

    Args:
        raw: DeepSpeed's config.
        parameters, optimizer: as of `deepspeed.initialize`; if they are made of layers, the layers may have to stay.

    Raises:
        TeraPipeConfigError: the schedule has no layout on so many stages.
        ProfileError: on every rank: rank 0 cannot read the profile.
        Exception: on every rank: what else one of them raised meanwhile, in the program's own code for example.
    """
    stages, by_hand = module.num_stages, partition_by_hand(config, module)
    stays = config.chunks_per_stage > 1 or isinstance(config.recompute, tuple)  # a layer that moves costs the same
    if config.schedule != "auto" or config.planner.profile == "measure" or stays:
        return cut_by_hand(layout_of(config, stages), by_hand), parameters
    if isinstance(module, PartedModule):  # terapipe_ds.lay_out() was here before
        return cut_by_hand(module.terapipe_layout, by_hand), parameters
    rank = torch_dist.get_rank()

    def answer_of_rank() -> tuple[bool, tuple[_Moved | None, str]]:
        nonlocal parameters
        if isinstance(parameters, Iterator):
            parameters = list(parameters)
        movable = can_move(module, parameters, optimizer, by_hand is not None)
        return movable, _best_move(config, raw, module, by_hand) if rank == 0 else (None, "")

    everyone = [answer for answer in gather_results(answer_of_rank) if answer is not None]
    _, (moved, why) = everyone[0]
    if moved is not None and not all(movable for movable, _ in everyone):
        moved, why = None, f"{why}; but they stay, for the optimizer or its parameters are made of them"
    if rank == 0:
        show_log(0)
        logger.info('schedule "auto": %s', why)
    if moved is None:
        return cut_by_hand(Layout.plain(stages), by_hand), parameters
    schedule, chunks = moved
    return cut_by_hand(Layout(stages, placement_for(schedule, stages, chunks)), by_hand), parameters


def _best_move(
    config: TeraPipeConfig, raw: Mapping[str, Any], module: Any, by_hand: tuple[int, ...] | None
) -> tuple[_Moved | None, str]:
    """Return the schedule whose layout is best, if layers have to move for it, and why."""
    profile = Profile.load(config.planner.profile)
    parts = MeasuredParts.of_profile(profile)
    if not parts.has_layers or profile.key.layers_fingerprint is None:
        return None, f"layers stay; {config.planner.profile} does not tell what each layer takes"
    if not _may_be_of(profile, parts, module):
        return None, f"layers stay; {config.planner.profile} is the profile of other layers"
    length, count = profile.key.sequence_length, micro_batches_of(raw, module)
    try:
        layout = dataclasses.replace(Layout.plain(module.num_stages), bounds=by_hand)
        ranking = Cuts(module, layout, parts.without_memory()).ranking(config, length, count)
    except ValueError as error:  # slices of another length, say: the first batch has its own
        return None, f"layers stay; no schedules were compared ({error})"
    results = [one for one in ranking.results if can_have(one.schedule, raw=raw) and one.extra_s is not None]
    case, plain_ones = f"for {length} tokens and {count} micro-batches", [r for r in results if r.chunks_per_stage == 1]
    if not results:
        return None, f"layers stay; no schedule has the {len(by_hand or ()) - 1} parts of the partition {case}"
    best = choose(results)
    if not plain_ones:  # a partition by hand has more parts than there are stages
        why = f"layers are laid out for {best.schedule}, {best.chunks_per_stage} parts per stage, as the partition asks"
        return (best.schedule, best.chunks_per_stage), f"{why} {case}"
    plain = choose(plain_ones)
    gain = _gain(best, plain)
    if best.chunks_per_stage == 1 or gain <= WORTH_MOVING:
        return None, f"layers stay, no other layout is better than that of {plain.schedule} {case}"
    chunks = best.chunks_per_stage
    why = f"layers are laid out for {best.schedule}, {chunks} parts per stage, predicted to take {gain:.1%} less time "
    return (best.schedule, chunks), f"{why}than {plain.schedule} {case}"


def _may_be_of(profile: Profile, parts: MeasuredParts, module: Any) -> bool:
    """Return whether the profile may be of these layers: their kinds agree, and the sizes of those on this rank.

    The fingerprint is compared once the engine is built (`require_profile`), because DeepSpeed casts first.
    """
    layers = [unit.parameters for unit in parts.units]
    if len(layers) != len(module._layer_specs):
        return False
    sizes = [parameters_of_layer(function)[0] for function in module.forward_funcs]
    same_sizes = sizes == layers[module._local_start : module._local_stop]
    return same_sizes and profile.key.model == kinds_of_layers(module, slice_length_multiple(module))


def micro_batches_of(raw: Mapping[str, Any], module: Any) -> int:
    """Return `gradient_accumulation_steps`, as it is set or from the other two sizes of a batch, as DeepSpeed does."""
    names = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    steps, batch, rows = (value if type(value := raw.get(name)) is int and value > 0 else None for name in names)
    if steps is not None:
        return steps
    if batch is None or rows is None:
        return 1
    return max(1, batch // (rows * max(1, int(module._grid.data_parallel_size))))
