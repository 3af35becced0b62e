"""Bring a strategy's grid to the ranks: DeepSpeed's topology of it, and the check that a module was built on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch.distributed as torch_dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.topology import ProcessTopology

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.strategy_file import sizes_of
from terapipe_ds.runtime.agreement import gather_results
from terapipe_ds.runtime.layout.same_model import require_equal_models
from terapipe_ds.strategy import Coordinate, Strategy

_BUILD_ON_IT = "build the module with topology=terapipe_ds.topology_of(strategy)"


def topology_of(strategy: Strategy) -> ProcessTopology:
    """Return DeepSpeed's topology of a strategy, for `PipelineModule(topology=...)`.

    Raises:
        TeraPipeConfigError: the job runs already, and has another number of ranks.
    """
    if torch_dist.is_initialized():
        _refuse_other_world(strategy, "the strategy")
    return ProcessTopology(axes=list(strategy.axes), dims=list(strategy.dims))


def refuse_other_models(module: PipelineModule, config: TeraPipeConfig) -> None:
    """Raise TeraPipeConfigError on every rank where ranks differ in their model, or have not the strategy's one."""
    require_equal_models(module)
    gather_results(lambda: _refuse_other_module(module, config))


def _refuse_other_module(module: PipelineModule, config: TeraPipeConfig) -> None:
    """Raise TeraPipeConfigError where `module` is not what the strategy of `config` was planned for.

    That is another number of ranks or layers, or another placement of the grid.
    """
    strategy = config.planned
    if strategy is None:
        return
    shown = f"terapipe.strategy = {config.strategy!r}"
    _refuse_other_world(strategy, shown)
    if bounds_in(module, strategy.partition) is None:
        of_model = f" of {strategy.model}" if strategy.model else ""
        raise TeraPipeConfigError(
            f"{shown}: it is for the {strategy.partition[-1]} layers{of_model}, embedding and head among them, and the "
            f"module has {len(module._layer_specs)}, {_decoder_layers(module)[1]} of them decoder layers: plan again "
            "for this model, or build the one that was planned for"
        )
    wanted, there = _ranks_of(topology_of(strategy)), _ranks_of(module.topology())
    if wanted != there:
        place, rank = next((place, rank) for place, rank in wanted.items() if there.get(place) != rank)
        names = dict(zip(("pipe", "data", "model"), place, strict=True))
        raise TeraPipeConfigError(
            f"{shown}: it has the axes {strategy.axes} of sizes {strategy.dims}, and the topology of the module "
            f"{module.topology().get_axis_names()} of {module.topology().dims}: {names} is on rank {rank}, and on rank "
            f"{there.get(place)} there; {_BUILD_ON_IT}"
        )


def bounds_in(module: PipelineModule, partition: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first layer of each part in `module`, and the end; None where it has other layers than that.

    A model that was planned by its size is an embedding, decoder layers, and a head. A module has more in front of its
    decoder layers and behind them, such as positions and the last norm: these go with the embedding and with the head.
    """
    bounds, layers = tuple(partition), len(module._layer_specs)
    if bounds[-1] == layers:
        return bounds
    first, count = _decoder_layers(module)
    if bounds[-1] != count + 2 or not 0 < first < layers - count:
        return None
    return (0, *(first + bound - 1 for bound in bounds[1:-1]), layers)


def _decoder_layers(module: PipelineModule) -> tuple[int, int]:
    """Return the first and the number of the most layers of one kind that follow one another."""
    kinds = [getattr(spec, "typename", type(spec)) for spec in module._layer_specs]
    runs = [list(run) for _, run in itertools.groupby(range(len(kinds)), key=lambda index: kinds[index])]
    longest = max(runs, key=len)
    return longest[0], len(longest)


def take_batch_sizes(config: TeraPipeConfig, ds_config: DeepSpeedConfig) -> None:
    """Give DeepSpeed's config the strategy's sizes of a batch, before it computes those that are left open.

    Raises:
        TeraPipeConfigError: the job has other ranks, or the module other replicas, than the strategy.
    """
    strategy = config.planned
    if strategy is None:
        return
    shown, replicas = f"terapipe.strategy = {config.strategy!r}", strategy.grid["data"]
    _refuse_other_world(strategy, shown)
    if ds_config.world_size != replicas:
        raise TeraPipeConfigError(
            f"{shown}: it has {replicas} replicas, and the topology of the module {ds_config.world_size}; "
            f"{_BUILD_ON_IT}"
        )
    for name, size in sizes_of(strategy).items():
        setattr(ds_config, name, size)


def _refuse_other_world(strategy: Strategy, shown: str) -> None:
    wanted, there = math.prod(strategy.dims), torch_dist.get_world_size()
    if wanted != there:
        raise TeraPipeConfigError(
            f"{shown}: it is for {wanted} ranks ({dict(zip(strategy.axes, strategy.dims, strict=True))}), and the job "
            f"has {there}: start {wanted}, or plan again for {there}"
        )


def _ranks_of(topology: ProcessTopology) -> dict[Coordinate, int]:
    """Return the rank of each (pipe, data, model), which is (pipe, data, 0) where the topology has no model axis."""
    return {
        (getattr(place, "pipe", 0), getattr(place, "data", 0), getattr(place, "model", 0)): rank
        for place, rank in topology.mapping.items()
    }
