"""Choose where the layers go for `"schedule": "auto"` with a profile: the layout of the best schedule of all.

Without a profile, costs are known only after the engine is built, and layers stay where they are. Rank 0 reads the
profile and ranks the schedules; all ranks take its answer, an error too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as torch_dist

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner import PlanResult, choose
from terapipe_ds.planner.ranking.recut import MeasuredParts
from terapipe_ds.runtime.agreement import gather_results
from terapipe_ds.runtime.layout.cut_module import can_move
from terapipe_ds.runtime.layout.layout import Layout, layout_of
from terapipe_ds.runtime.layout.parted_module import PartedModule
from terapipe_ds.runtime.layout.tied_and_copied import can_have
from terapipe_ds.runtime.log import show_log
from terapipe_ds.runtime.planning.schedule_choice import WORTH_MOVING, Cuts
from terapipe_ds.runtime.profiling.key import kinds_of_layers
from terapipe_ds.runtime.profiling.layer_times import parameters_of_layer
from terapipe_ds.runtime.refusals import slice_length_multiple
from terapipe_ds.schedule import placement_for

logger = logging.getLogger("terapipe_ds")


class _Answer(NamedTuple):
    """Hold what one rank knows; of rank 0 also the schedule whose layout is best, and why."""

    can_move: bool
    schedule: str | None = None
    chunks_per_stage: int = 1
    why: str = ""


def first_layout(
    config: TeraPipeConfig, raw: Mapping[str, Any], module: Any, parameters: Any = None, optimizer: Any = None
) -> tuple[Layout, Any]:
    """Return the layout of `module`, and `parameters`, which are read once where they are an iterator.

    It is the layout of the config's schedule. With "auto" and a profile from a file it is that of the schedule with the
    least predicted time, if the gain can be measured; this is a collective over all ranks.

    Args:
        raw: DeepSpeed's config.
        parameters, optimizer: as of `deepspeed.initialize`; layers stay where these were made of layers that then could
            not move.

    Raises:
        TeraPipeConfigError: the schedule has no layout on so many stages.
        ProfileError: on every rank: rank 0 cannot read the profile.
        Exception: on every rank: what else one of them raised meanwhile, in the program's own code for example.
    """
    stages = module.num_stages
    if config.schedule != "auto" or config.planner.profile == "measure" or config.chunks_per_stage > 1:
        return layout_of(config, stages), parameters
    if isinstance(module, PartedModule):  # terapipe_ds.lay_out() was here before
        return module.terapipe_layout, parameters
    rank = torch_dist.get_rank()

    def answer_of_rank() -> _Answer:
        nonlocal parameters
        if isinstance(parameters, Iterator):
            parameters = list(parameters)
        movable = can_move(module, parameters, optimizer)
        return _answer_of_rank_0(movable, config, raw, module) if rank == 0 else _Answer(movable)

    everyone = [each for each in gather_results(answer_of_rank) if each is not None]
    answer = everyone[0]
    moves = answer.schedule is not None and all(each.can_move for each in everyone)
    if rank == 0:
        show_log(0)
        stay = "; but they stay, for the optimizer or its parameters are made of them"
        kept = "" if moves or answer.schedule is None else stay
        logger.info('schedule "auto": %s%s', answer.why, kept)
    if not moves or answer.schedule is None:
        return Layout.plain(stages), parameters
    return Layout(stages, placement_for(answer.schedule, stages, answer.chunks_per_stage)), parameters


def _answer_of_rank_0(movable: bool, config: TeraPipeConfig, raw: Mapping[str, Any], module: Any) -> _Answer:
    profile = Profile.load(config.planner.profile)
    parts = MeasuredParts.of_profile(profile, CostModel.from_profile(profile))
    if parts.shares is None or profile.key.layers_fingerprint is None:
        return _Answer(movable, why=f"layers stay; {config.planner.profile} does not tell what each layer takes")
    if not _may_be_of(profile, parts, module):
        return _Answer(movable, why=f"layers stay; {config.planner.profile} is the profile of other layers")
    length, count = profile.key.sequence_length, micro_batches_of(raw, module)
    try:
        ranking = Cuts(module, Layout.plain(module.num_stages), parts, None).ranking(config, length, count)
    except ValueError as error:  # slices of another length, say: the first batch has its own
        return _Answer(movable, why=f"layers stay; no schedules were compared ({error})")
    results = [one for one in ranking.results if _can_train(one, raw)]
    plain, best = choose([one for one in results if one.chunks_per_stage == 1]), choose(results)
    case = f"for {length} tokens and {count} micro-batches"
    gain = 1 - best.total_s / plain.total_s if plain.total_s > 0 else 0.0
    if best.chunks_per_stage == 1 or gain <= WORTH_MOVING:
        return _Answer(movable, why=f"layers stay, no other layout is better than that of {plain.schedule} {case}")
    chunks = best.chunks_per_stage
    why = f"layers are laid out for {best.schedule}, {chunks} parts per stage, predicted to take {gain:.1%} less time "
    return _Answer(movable, best.schedule, chunks, f"{why}than {plain.schedule} {case}")


def _may_be_of(profile: Profile, parts: MeasuredParts, module: Any) -> bool:
    """Return whether the profile may be of these layers: their kinds agree, and the sizes of those on this rank.

    The fingerprint is compared once the engine is built (`require_profile`), because DeepSpeed casts first.
    """
    assert parts.shares is not None
    layers = [layer.parameters for part in parts.shares for layer in part]
    if len(layers) != len(module._layer_specs):
        return False
    sizes = [parameters_of_layer(function)[0] for function in module.forward_funcs]
    same_sizes = sizes == layers[module._local_start : module._local_stop]
    return same_sizes and profile.key.model == kinds_of_layers(module, slice_length_multiple(module))


def _can_train(result: PlanResult, raw: Mapping[str, Any]) -> bool:
    """Return whether the engine would train it, and all that it takes is known."""
    return can_have(result.schedule, raw=raw) and result.extra_s is not None


def micro_batches_of(raw: Mapping[str, Any], module: Any) -> int:
    """Return `gradient_accumulation_steps`, as it is set or from the other two sizes of a batch, as DeepSpeed does."""
    names = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    steps, batch, rows = (value if type(value := raw.get(name)) is int and value > 0 else None for name in names)
    if steps is not None:
        return steps
    if batch is None or rows is None:
        return 1
    return max(1, batch // (rows * max(1, int(module._grid.data_parallel_size))))
