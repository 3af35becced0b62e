"""Give DeepSpeed's process groups to megatron-core, and check that both mean the same ranks.

There is no second set of groups: tensor-parallel collectives run in the grid's own group. If megatron-core looks
groups up in its `parallel_state` instead of taking arguments, it finds the same groups, entered there.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from terapipe_ds.models.megatron.refusals import MegatronConfigError

_ORDERS = (("pipe", "data", "model"), ("data", "pipe", "model"))
"""Of the axes of DeepSpeed's topology, the last one varying fastest: those that Megatron knows, too."""
_ranks_of = torch_dist.get_process_group_ranks


def process_groups(grid: PipelineParallelGrid, config: TransformerConfig) -> ProcessGroupCollection:
    """Return the groups for layers of this rank, checked. A collective over all ranks.

    `pp` is a group of this rank alone: DeepSpeed cuts the model into stages, and a layer that knew of them would add
    an offset to its number. The groups of context and expert parallelism hold one rank as well.

    Raises:
        MegatronConfigError: on every rank, if grid and config or DeepSpeed's and Megatron's groups differ.
    """
    _require_everywhere(_problem(grid, config) or _problem_of_members(grid) or _problem_of_parallel_state(grid))
    tensor = alone = grid.get_slice_parallel_group()  # DeepSpeed has made a group of its own for each single rank
    if grid.get_slice_parallel_world_size() > 1:
        alone = torch_dist.new_group([torch_dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroupCollection(
        mp=grid.get_model_parallel_group(),
        **dict.fromkeys(("tp", "tp_cp", "expt_tp", "tp_ep", "tp_ep_pp", "tp_dp_cp"), tensor),
        **dict.fromkeys(("dp", "dp_cp", "expt_dp"), grid.get_data_parallel_group()),
        **dict.fromkeys(("pp", "cp", "ep", "embd", "pos_embd"), alone),
    )
    _enter(groups, grid, alone)
    return groups


def _problem(grid: PipelineParallelGrid, config: TransformerConfig) -> str | None:
    """Return what is wrong with the layout on this rank, or None."""
    topology = grid.topology()
    if "sequence" in topology.get_axis_names():
        return "Megatron's layers take no sequence ranks: leave the axis sequence out of the topology"
    tensor, stages = grid.get_slice_parallel_world_size(), grid.get_pipe_parallel_world_size()
    given_tensor, given_stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if given_tensor != tensor:
        config_has = f"TransformerConfig has tensor_model_parallel_size={given_tensor}"
        return f"{config_has}, but the topology has {tensor} tensor-parallel ranks; give both the same number"
    if given_stages not in (1, stages):
        config_has = f"TransformerConfig has pipeline_model_parallel_size={given_stages}, but the topology has {stages}"
        return f"{config_has} stages; give the same number, or 1 to leave stages to DeepSpeed"
    names = topology.get_axis_names()
    divided = [axis for axis in names if topology.get_dim(axis) > 1]  # the others change no order
    if not any(divided == [axis for axis in order if axis in divided] for order in _ORDERS):
        return (
            f"DeepSpeed's topology (axes {names}) puts its ranks in another order than Megatron's (tp-cp-ep-dp-pp or "
            "tp-cp-ep-pp-dp, the fastest first). Build the topology with PipeModelDataParallelTopology, whose axes are "
            f"{[*_ORDERS[0]]}, or with the order data, pipe, model"
        )
    return None


def _problem_of_members(grid: PipelineParallelGrid) -> str | None:
    """Compare the ranks in this rank's groups with the topology, in its order: vocabulary shares follow it."""
    rank = torch_dist.get_rank()
    for axis, group in zip(("model", "data", "pipe"), _groups(grid), strict=True):
        expected = next((row for row in grid.topology().get_axis_comm_lists(axis) if rank in row), [rank])
        if (ranks := _ranks_of(group)) != expected:
            problem = f"the {axis} group of rank {rank} holds the ranks {ranks}, by the topology it is {expected}"
            return f"{problem}. Leave DeepSpeed's grid the groups that it has made"
    return None


def _groups(grid: PipelineParallelGrid) -> tuple[Any, Any, Any]:
    return grid.get_slice_parallel_group(), grid.get_data_parallel_group(), grid.get_pipe_parallel_group()


def _problem_of_parallel_state(grid: PipelineParallelGrid) -> str | None:
    """Compare a `parallel_state` that another program has initialized."""
    if not parallel_state.model_parallel_is_initialized() or _entered_by_us():
        return None
    for name, group in zip(("tensor_model", "data", "pipeline_model"), _groups(grid), strict=True):
        theirs, ours = _ranks_of(getattr(parallel_state, f"get_{name}_parallel_group")()), _ranks_of(group)
        if theirs != ours:
            rank = f"rank {torch_dist.get_rank()} is in {theirs} there and in {ours} of DeepSpeed's"
            problem = f"Megatron's parallel_state was initialized with other {name.split('_')[0]} groups: {rank}"
            return f"{problem}. Leave it uninitialized, or use the same sizes and order"
    return None


_MARK = "_terapipe_entered"


def _entered_by_us() -> bool:
    """Return whether `parallel_state` still holds our groups: a program may have initialized it anew."""
    ours = getattr(parallel_state, _MARK, None)
    return ours is not None and parallel_state._TENSOR_MODEL_PARALLEL_GROUP is ours


def _enter(groups: ProcessGroupCollection, grid: PipelineParallelGrid, alone: Any) -> None:
    """Put the groups where megatron-core's own functions look them up."""
    if parallel_state.model_parallel_is_initialized() and not _entered_by_us():
        return  # another program did, and it agrees
    # megatron-core 0.16.1 looks these up in places that take no group
    pipe = grid.get_pipe_parallel_group()
    entries: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": _ranks_of(groups.tp),
        "_PIPELINE_MODEL_PARALLEL_GROUP": pipe,
        "_PIPELINE_GLOBAL_RANKS": _ranks_of(pipe),
        "_MODEL_PARALLEL_GROUP": groups.mp,
        "_DATA_PARALLEL_GROUP": groups.dp,
        "_DATA_PARALLEL_GROUP_WITH_CP": groups.dp,
        "_DATA_PARALLEL_GLOBAL_RANKS": _ranks_of(groups.dp),
        "_CONTEXT_PARALLEL_GROUP": alone,
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": [torch_dist.get_rank()],
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": groups.tp,
        "_EXPERT_MODEL_PARALLEL_GROUP": alone,
        "_EXPERT_TENSOR_PARALLEL_GROUP": groups.tp,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": groups.tp,
    }
    # a newer megatron-core may have other names: better no model than a wrong group
    missing = [name for name in entries if not hasattr(parallel_state, name)]
    if missing:
        raise MegatronConfigError(
            f"this megatron-core has no {', '.join(missing)} in megatron.core.parallel_state: install 0.16.1"
        )
    for name, value in entries.items():
        setattr(parallel_state, name, value)
    setattr(parallel_state, _MARK, groups.tp)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _require_everywhere(problem: str | None) -> None:
    """Raise on every rank if one of them has a problem."""
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, problem)
    problems = {rank: text for rank, text in enumerate(everyone) if text is not None}
    if problems:
        texts = "; ".join(sorted(set(problems.values())))
        raise MegatronConfigError(f"on rank{'s' * (len(problems) > 1)} {', '.join(map(str, problems))}: {texts}")
