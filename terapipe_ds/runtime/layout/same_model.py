"""Refuse models that ranks have built differently, or on a grid that differs from their strategy's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CodeType, MethodType
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.runtime.agreement import by_text, digest, gather
from terapipe_ds.runtime.layout.stock_partition import PARTITION_METHOD
from terapipe_ds.runtime.layout.topology import BUILD_ON_IT, refuse_other_world, topology_of
from terapipe_ds.strategy import Coordinate


def require_equal_models(module: Any) -> None:
    """Raise TeraPipeConfigError on every rank if they have not built the same model. A collective over all ranks.

    The error names the difference: the number of layers, else the first layer that differs, else the partition, by
    which each stage builds its share; and `loss_fn`.
    """
    layers = {f"layer {layer_id}": described(spec) for layer_id, spec in enumerate(module._layer_specs)}
    method = getattr(module, PARTITION_METHOD, None)
    partition = str([int(layer_id) for layer_id in module.parts]) + (
        f" (partition_method {method!r})" if method else ""
    )
    facts = {"the number of layers": f"{len(layers)} layers", **layers, "the first layers of the stages": partition}
    facts["loss_fn"] = described(module.loss_fn)
    if len(set(gather(digest(facts)))) == 1:
        return
    everyone = gather(facts)
    other = [key for key in facts if len({of_rank.get(key) for of_rank in everyone}) > 1]  # the number before layers
    shown = dict.fromkeys([other[0], *({"loss_fn"} & {*other})])
    lines = [f"{key}: {by_text({rank: facts[key] for rank, facts in enumerate(everyone)})}" for key in shown]
    raise TeraPipeConfigError(
        "\n  ".join(["the ranks have built different models:", *lines])
        + "\nGive every rank's PipelineModule the same layers, partition_method and loss_fn; each builds its own share."
    )


def refuse_other_grid(module: PipelineModule, config: TeraPipeConfig) -> None:
    """Raise TeraPipeConfigError if the grid of `module` differs from the grid of the strategy of `config`."""
    strategy = config.planned
    if strategy is None:
        return
    shown = f"terapipe.strategy = {config.strategy!r}"
    refuse_other_world(strategy, shown)
    wanted, there = _ranks_of(topology_of(strategy)), _ranks_of(module.topology())
    if wanted != there:
        place, rank = next((place, rank) for place, rank in wanted.items() if there.get(place) != rank)
        names = dict(zip(("pipe", "data", strategy.axes[2]), place, strict=True))
        raise TeraPipeConfigError(
            f"{shown}: it has the axes {strategy.axes} of sizes {strategy.dims}, and the topology of the module "
            f"{module.topology().get_axis_names()} of {module.topology().dims}: {names} is on rank {rank}, and on rank "
            f"{there.get(place)} there; {BUILD_ON_IT}"
        )


def refuse_other_tensor_ranks(module: PipelineModule, raw: Mapping[str, Any]) -> None:
    """Raise TeraPipeConfigError if `tensor_parallel.autotp_size` is not the number of ranks that divide the layers."""
    wanted, divided = (raw.get("tensor_parallel") or {}).get("autotp_size", 0), getattr(module, "autotp_size", 1)
    if wanted in (0, divided):
        return
    shown = f"tensor_parallel.autotp_size = {wanted}"
    if not hasattr(module, "autotp_size"):
        raise TeraPipeConfigError(
            f"{shown}: AutoTP would replace layers without knowing of pipeline stages. from_pretrained and from_config "
            "divide layers; remove the key if your layers divide themselves"
        )
    raise TeraPipeConfigError(
        f"{shown}, and the layers of the module are divided over {divided} ranks: build it with the topology "
        f"PipeModelDataParallelTopology(num_pp=..., num_mp={wanted}, num_dp=...)"
    )


def _ranks_of(topology: ProcessTopology) -> dict[Coordinate, int]:
    """Return the rank of each (pipe, data, model or sequence), which is (pipe, data, 0) without such an axis."""
    return {
        (getattr(at, "pipe", 0), getattr(at, "data", 0), getattr(at, "model", 0) or getattr(at, "sequence", 0)): rank
        for at, rank in topology.mapping.items()
    }


def described(thing: Any) -> str:
    """Describe a layer, a spec or a loss by its class or its function, alike in every process that has built it so.

    The names and constants in a function's code distinguish it from others of its name. The text has no address.
    """
    if isinstance(thing, LayerSpec):
        tied = f"tied by {thing.key!r} " if isinstance(thing, TiedLayerSpec) else ""
        return tied + described(thing.typename)
    if isinstance(thing, functools.partial):
        return f"partial of {described(thing.func)}"
    if isinstance(thing, MethodType):
        return f"{thing.__func__.__qualname__} of {_named(type(thing.__self__))}"
    code = getattr(thing, "__code__", None)
    if isinstance(code, CodeType):
        return f"{_named(thing)} (code {digest(_contents(code)):010x})"
    return _named(thing if hasattr(thing, "__qualname__") else type(thing))


def _named(thing: Any) -> str:
    module = str(getattr(thing, "__module__", "")).replace("__mp_main__", "__main__")  # of processes that are spawned
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _contents(value: Any) -> object:
    """Return the contents of a code object and its constants, without the places of files and in one order."""
    if isinstance(value, CodeType):
        return value.co_names, [_contents(each) for each in value.co_consts]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return [_contents(each) for each in value] if isinstance(value, tuple) else repr(value)
