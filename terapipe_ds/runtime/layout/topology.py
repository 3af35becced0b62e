"""Apply a strategy's grid to the ranks: its DeepSpeed topology, and its sizes of a batch."""

from __future__ import annotations

import math

import torch.distributed as torch_dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.topology import ProcessTopology

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.strategy_file import sizes_of
from terapipe_ds.strategy import Strategy

BUILD_ON_IT = "build the module with topology=terapipe_ds.topology_of(strategy)"


def topology_of(strategy: Strategy) -> ProcessTopology:
    """Return DeepSpeed's topology of a strategy, for `PipelineModule(topology=...)`.

    Raises:
        TeraPipeConfigError: the job runs already, and has another number of ranks.
    """
    if torch_dist.is_initialized():
        refuse_other_world(strategy, "the strategy")
    return ProcessTopology(axes=list(strategy.axes), dims=list(strategy.dims))


def take_batch_sizes(config: TeraPipeConfig, ds_config: DeepSpeedConfig) -> None:
    """Give DeepSpeed's config the strategy's sizes of a batch, before it computes the sizes that are left open.

    Raises:
        TeraPipeConfigError: the number of ranks of the job, or of replicas of the module, differs from the strategy's.
    """
    strategy = config.planned
    if strategy is None:
        return
    shown, replicas = f"terapipe.strategy = {config.strategy!r}", strategy.grid["data"]
    refuse_other_world(strategy, shown)
    if ds_config.world_size != replicas:
        raise TeraPipeConfigError(
            f"{shown}: it has {replicas} replicas, and the topology of the module {ds_config.world_size}; {BUILD_ON_IT}"
        )
    for name, size in sizes_of(strategy).items():
        setattr(ds_config, name, size)


def refuse_other_world(strategy: Strategy, shown: str) -> None:
    """Raise TeraPipeConfigError if the job has another number of ranks than the strategy."""
    wanted, there = math.prod(strategy.dims), torch_dist.get_world_size()
    if wanted != there:
        raise TeraPipeConfigError(
            f"{shown}: it is for {wanted} ranks ({dict(zip(strategy.axes, strategy.dims, strict=True))}), and the job "
            f"has {there}: start {wanted}, or plan again for {there}"
        )
