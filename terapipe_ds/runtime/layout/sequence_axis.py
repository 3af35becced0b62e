"""Give DeepSpeed's grid the axis `sequence` of its topology, whose ranks divide the tokens of each slice.

DeepSpeed (0.19.8) lets a topology have such an axis, but its grid makes no group for it: gradients would not be summed,
and norms would count each of its ranks as one with layers of its own. Here these ranks become replicas that train on
the same rows. DeepSpeed broadcasts parameters, averages gradients and divides ZeRO's states over data and sequence. The
rows, the sizes of a batch and the sampler depend on the data axis alone. Since the average over sequence ranks has to
be a sum, each of them multiplies its share of the loss by their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from torch import Tensor
from torch.utils._pytree import tree_map_only

from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.compat.replaced import replaced
from terapipe_ds.compat.tied_groups import further_axes
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.messages import logger

AXIS = "sequence"
_AXES = ("pipe", "data", AXIS)


def sequence_size(module: PipelineModule) -> int:
    """Return how many ranks divide the tokens of a slice, by the topology that the module was built on."""
    return max(1, int(module.topology().get_dim(AXIS)))


def slice_length_multiple(module: Any) -> int:
    """Return the number that must divide every slice length: the module's attribute of this name, by default 1.

    A module sets it if its layers divide the tokens of a slice over ranks, as sequence parallelism does.
    """
    multiple = getattr(module, "slice_length_multiple", 1)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise TeraPipeConfigError(
            f"slice_length_multiple = {multiple!r} of {type(module).__name__}: give an integer >= 1, the number of "
            "ranks that the tokens of a slice are divided over"
        )
    return multiple


def shortest_slice_on(module: PipelineModule) -> int:
    """Return the fewest tokens of a slice that give each sequence rank as many as the layers need.

    A module sets `shortest_slice` if its layers take a single token for a step of generation.
    """
    shortest = int(getattr(module, "shortest_slice", 1))
    return shortest * sequence_size(module) if shortest > 1 else shortest


def problem_of_lengths(what: str, lengths: Sequence[int], multiple: int, shortest: int = 1) -> str | None:
    """Return why slices of these lengths cannot run; None if they can. `what` names their source."""
    if len(lengths) > 1 and min(lengths) < shortest:
        return (
            f"{what} = {list(lengths)}: a slice has {min(lengths)} token, which layers of the model take for a step of "
            f"generation: give slices of {shortest} tokens or more"
        )
    bad = [str(length) for length in lengths if length % multiple]
    if not bad:
        return None
    return (
        f"{what} = {list(lengths)}: slices of {', '.join(dict.fromkeys(bad[:4]))} tokens are no multiples of "
        f"{multiple}, the model's slice_length_multiple (sequence parallelism divides the tokens of a slice over so "
        "many ranks, and fp8 divides them into blocks). Give multiples of it, or switch the two off."
    )


def with_multiple(config: TeraPipeConfig, multiple: int, rank: int) -> TeraPipeConfig:
    """Return the config with a granularity that every slice can be cut by; listed slices do not change."""
    raised = math.lcm(config.granularity_tokens, multiple)
    is_cut = config.slices != 1 and not isinstance(config.slices, tuple)
    if raised != config.granularity_tokens and is_cut and rank == 0:
        shorter = "" if "granularity_tokens" in config.model_fields_set else ", of fewer where sequences are short"
        logger.info(
            f"terapipe.granularity_tokens is raised from {config.granularity_tokens} to {raised}{shorter}: slices must "
            f"be multiples of {multiple} tokens, the model's slice_length_multiple"
        )
    return config.with_multiple(multiple)


def problem_of_sequence_axis(module: PipelineModule, raw: Mapping[str, Any]) -> str | None:
    """Return why this module cannot be trained with its axis `sequence`, or without one; None if it can."""
    size, wanted = sequence_size(module), raw.get("sequence_parallel_size")
    axes = module.topology().get_axis_names()
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted != size and wanted > 1:
        return (
            f"sequence_parallel_size = {wanted}, but the topology of the module has the axes {axes} of sizes "
            f"{module.topology().dims}: build it with topology=ProcessTopology(axes={list(_AXES)}, dims=[stages, "
            f"replicas, {wanted}]), or remove the key"
        )
    others = [axis for axis in further_axes(module.topology()) if axis != AXIS]
    if others and raw.get("gradient_clipping", 1.0):
        return (
            f"gradient_clipping = {raw.get('gradient_clipping', 1.0)} with the axis {others[0]!r} of the topology: "
            "DeepSpeed's norm does not know which gradients its ranks divide and which they repeat. Name the axis of "
            f"tensor-parallel ranks 'model' and of ranks that divide tokens {AXIS!r}, or set gradient_clipping to 0"
        )
    if size == 1:
        return None
    shown = f"a topology with {size} ranks on the axis {AXIS!r}"
    if not set(axes) <= set(_AXES):
        return (
            f"{shown} cannot be combined with the axes {sorted(set(axes) - set(_AXES))}: tensor parallelism divides "
            f"the same heads. Take the axes {list(_AXES)}"
        )
    if str(raw.get("gradient_allreduce_op")).lower() == "sum":
        return (
            f'gradient_allreduce_op = "sum" with {shown}: DeepSpeed would take them for replicas, and gradients would '
            f"be {size} times as large. Remove the key, and let loss_fn multiply by the number of replicas"
        )
    return None


def take_sequence_axis(grid: PipelineParallelGrid) -> SequenceRanks:
    """Make the groups of the axis, and add them to DeepSpeed's `grid`. A collective over all ranks.

    From now on DeepSpeed's `groups` gets from the grid the group of data and sequence, over which ZeRO divides states.
    The grid's group of model parallelism holds the stages of one pipeline.
    """
    topology, rank = grid.topology(), grid.get_global_rank()
    # without the axis there are none, and an engine before this one may have made them
    if topology.get_dim(AXIS) <= 1 or hasattr(grid, "get_sequence_data_parallel_group"):
        return sequence_ranks_of(grid)
    # ranks of one stage that share the tokens of its slices
    grid.sequence_group = group_of(rank, topology.get_axis_comm_lists(AXIS))
    stages = [sorted(topology.filter_match(pipe=stage_id)) for stage_id in range(grid.pipe_parallel_size)]
    replicas = group_of(rank, stages)
    # ranks of one stage whose gradients add up, over data and sequence
    grid.replicas_group = replicas
    grid.get_sequence_data_parallel_group = lambda: replicas
    grid.get_sequence_data_parallel_world_size = lambda: torch_dist.get_world_size(replicas)
    grid.get_sequence_data_parallel_rank = lambda: torch_dist.get_rank(replicas)
    # DeepSpeed would take the sequence ranks for owners of other layers
    grid.ds_model_proc_group = grid.get_pipe_parallel_group()
    grid.ds_model_world_size, grid.ds_model_rank = len(grid.pp_group), grid.pp_group.index(rank)
    _leave_out_of_names(topology)
    return sequence_ranks_of(grid)


def sequence_ranks_of(grid: PipelineParallelGrid) -> SequenceRanks:
    """Return the ranks that `take_sequence_axis` has grouped; only this one if there is no such axis."""
    group = getattr(grid, "sequence_group", None)
    if group is None:
        return SequenceRanks()
    exchange = functools.partial(torch_dist.all_to_all_single, group=group)
    return SequenceRanks(torch_dist.get_world_size(group), torch_dist.get_rank(group), exchange, group)


def peers_of(grid: PipelineParallelGrid) -> tuple[int, ...] | None:
    """Return the ranks of one stage that draw the same rows, including this one; None if it is alone.

    They hold parts of the same layers (tensor parallelism) or run parts of the same slices (the axis `sequence`).
    """
    if grid.get_slice_parallel_world_size() > 1:
        return tuple(grid.slice_group)
    lists = grid.topology().get_axis_comm_lists(AXIS)
    ranks = next((tuple(each) for each in lists if grid.get_global_rank() in each), ())
    return ranks if len(ranks) > 1 else None


def group_of(rank: int, lists: list[list[int]], backend: str | None = None) -> Any:
    """Make a group of each list; return the one with `rank`. Every rank makes every group: torch requires it."""
    own = None
    for ranks in lists:
        group = torch_dist.new_group(ranks, backend=backend)
        own = group if rank in ranks else own
    return own


def _leave_out_of_names(topology: ProcessTopology) -> None:
    """Leave the axis out of the names of layer files: its ranks have the same layers, and one of them saves them."""
    stock = topology.get_rank_repr

    def get_rank_repr(rank: int, omit_axes: Any = ("data", "pipe"), **options: Any) -> str:
        return str(stock(rank, omit_axes=[*omit_axes, AXIS], **options))

    topology.get_rank_repr = get_rank_repr


@contextmanager
def counted_as_replicas(grid: PipelineParallelGrid, ranks: SequenceRanks) -> Iterator[None]:
    """Let DeepSpeed's pipeline engine take all ranks of a stage for replicas inside the context, to sum and save."""
    if ranks.size == 1:
        yield
        return
    group = grid.replicas_group
    with (
        replaced(grid, "dp_proc_group", group),
        replaced(grid, "data_parallel_id", torch_dist.get_rank(group)),
        replaced(grid, "data_parallel_size", torch_dist.get_world_size(group)),
    ):
        yield


def mean_over_ranks(booked: Any, ranks: SequenceRanks) -> Any:
    """Return the means over the sequence ranks of all tensors in `booked`: losses, lists or dicts of them, or None."""
    if ranks.size == 1:
        return booked

    def mean(loss: Tensor) -> Tensor:
        total = loss.detach().clone()
        torch_dist.all_reduce(total, group=ranks.group)
        return total / ranks.size

    return tree_map_only(Tensor, mean, booked)


def gathered(output: Any, ranks: SequenceRanks) -> list[Any]:
    """Return each sequence rank's `output`, a tensor or a tuple of them, in the order of their tokens."""
    if ranks.size == 1:
        return [output]
    if not torch.is_tensor(output):
        return list(zip(*(gathered(each, ranks) for each in output), strict=True))
    everyone = [torch.empty_like(output, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
    torch_dist.all_gather(everyone, output.detach().contiguous(), group=ranks.group)
    return everyone
