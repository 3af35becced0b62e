"""Refuse models that ranks have built differently, or on a grid that differs from their strategy's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping
from types import CellType, CodeType, MethodType
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.runtime.agreement import by_text, digest, gather, meet
from terapipe_ds.runtime.layout.layers_to_parts import PARTITION_METHOD
from terapipe_ds.runtime.layout.topology import BUILD_ON_IT, refuse_other_world, topology_of
from terapipe_ds.schedule.show import many
from terapipe_ds.strategy import Coordinate

_IS_OF_RANK = re.compile(  # names of flags and times that a program may give each rank for itself
    r"(^|[_.: ])(rank\d*|local|main|master|log|logs|logging|verbose|debug|seed|time|start|t0)(_|\.|$)", re.IGNORECASE
)
_PATIENCE_S = 10.0
_grids = itertools.count(1)  # of this process; every rank builds its modules in the same order
_CONFIGS = "Config", "Arguments", "Args", "Namespace"  # ends of the names of classes that hold settings
_TENSOR = re.compile(r"(\w+) \[[^\]]*\] (torch\.\w+(?: frozen)?)")  # in the texts of `_held`
_FLOAT = re.compile(r"-?(\d+\.\d*(e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)")
_SAME = "Give every rank's PipelineModule the same layers, with the same arguments, partition_method and loss_fn"


def require_equal_models(module: Any) -> None:
    """Raise TeraPipeConfigError on every rank if they have not built the same model. A collective over all ranks.

    The error names the difference: the number of layers, else the first layer that differs, else the partition, by
    which each stage builds its share; and `loss_fn`. Replicas of a stage also compare the settings of their layers, and
    tensor-parallel ranks those that do not depend on the share.
    """
    layers = {f"layer {layer_id}": described(spec) for layer_id, spec in enumerate(module._layer_specs)}
    method = getattr(module, PARTITION_METHOD, None)
    partition = str([int(layer_id) for layer_id in module.parts]) + (
        f" (partition_method {method!r})" if method else ""
    )
    facts = {"the number of layers": f"{len(layers)} layers", **layers, "the first layers of the stages": partition}
    held, place = _held(module), module.topology().get_coord(torch_dist.get_rank())
    stage = getattr(place, "pipe", 0), getattr(place, "model", 0)
    of_loss, shared = {"loss_fn": described(module.loss_fn)}, _of_all_shares(held)
    parts = ("model", facts), ("loss", of_loss), (stage, held), (stage[:1], shared)  # with who must have the same
    digests = {each for of_rank in gather([(who, digest(part)) for who, part in parts]) for each in of_rank}
    if len(digests) == len({who for who, _ in digests}):
        return
    model, loss = (_differing(gather(part)) for part in parts[:2])
    lines = [*model, *loss] or _differing(gather(parts[2])) or _differing(gather(parts[3]))
    if lines:
        problem = "\n  ".join(["the ranks have built different models:", *lines])
        raise TeraPipeConfigError(f"{problem}\n{_SAME}; each builds its own share.")


def require_equal_grids(topology: ProcessTopology, world: Any) -> None:
    """Raise TeraPipeConfigError on every rank if ranks build a module on different grids, before these make groups.

    Ranks would wait for one another in different groups. `world` is the group that the module has just made of all
    ranks, so that no rank is far behind; one without `register()` does not come, and the others go on.
    """

    def late(waited_s: float, missing_ranks: Callable[[], list[int]]) -> None:
        if waited_s > _PATIENCE_S:
            raise TimeoutError

    own, rank = dict(zip(topology.get_axis_names(), topology.dims, strict=True)), torch_dist.get_rank()
    with contextlib.suppress(TimeoutError):
        ranks, name = range(torch_dist.get_world_size()), f"grids/{next(_grids)}/{world.group_name}"
        grids = meet(name, ranks, rank, ", ".join(f"{axis} {size}" for axis, size in own.items()), late)
        if len({*grids.values()}) > 1:
            raise TeraPipeConfigError(
                f"the ranks build a PipelineModule on different grids: {by_text(grids)}; give all of them the same "
                "num_stages, or the same topology"
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


def refuse_other_stages(module: PipelineModule, raw: Mapping[str, Any]) -> None:
    """Raise TeraPipeConfigError if `pipeline.stages`, which Trainer alone reads, is not the module's number."""
    wanted = (raw.get("pipeline") or {}).get("stages", "auto")
    if wanted not in ("auto", module.num_stages):
        has = f"the module has {many(module.num_stages, 'stage')}"
        raise TeraPipeConfigError(f"pipeline.stages = {wanted!r}, but {has}: build it so, or leave the key out")


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


# -- layers of replicas --------------------------------------------------------------------------------------


def _held(module: PipelineModule) -> dict[str, str]:
    """Return the modules and functions of this rank, their tensors and their settings, as texts by name."""
    functions = {str(layer_id): layer for layer_id, layer in enumerate(module.forward_funcs, module._local_start)}
    held = {}
    for name, thing in {**functions, "loss_fn": module.loss_fn, **dict(module.named_modules())}.items():
        if name:  # not the module itself
            shown = f"layer {name}" if name[0].isdigit() else name
            tensors = {**thing._parameters, **thing._buffers} if isinstance(thing, nn.Module) else {}
            given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
            frozen = {key: "" if tensor.requires_grad else " frozen" for key, tensor in given.items()}
            texts = [f"{key} {list(tensor.shape)} {tensor.dtype}{frozen[key]}" for key, tensor in given.items()]
            held[shown] = ", ".join([described(thing), *texts])
            held |= _plain(f"{shown}: ", _settings(thing))
    return held


def _of_all_shares(held: Mapping[str, str]) -> dict[str, str]:
    """Return what the ranks that divide layers have alike: floats, and of each tensor the dtype, not the shape."""
    floats = {key: text for key, text in held.items() if ": " in key and _FLOAT.fullmatch(text)}
    return floats | {f"{key}: {name}": kind for key, text in held.items() for name, kind in _TENSOR.findall(text)}


def _settings(thing: Any) -> Mapping[str, Any]:
    """Return the attributes of a layer, or the values that a function was made with."""
    if isinstance(thing, functools.partial):
        return {**_settings(thing.func), "arguments": thing.args, **thing.keywords}
    if isinstance(thing, MethodType):
        return _settings(thing.__self__)
    code = getattr(thing, "__code__", None)
    if isinstance(code, CodeType):
        cells = zip(code.co_freevars, thing.__closure__ or (), strict=True)
        values = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        return {"defaults": thing.__defaults__, **(thing.__kwdefaults__ or {}), **values}
    kept = vars(nn.Module()) if isinstance(thing, nn.Module) else ()  # `training` is set in each batch
    return {key: value for key, value in getattr(thing, "__dict__", {}).items() if key not in kept}


def _plain(name: str, value: Any, depth: int = 3) -> dict[str, str]:
    """Return the contents of a value by name, as texts, as far as ranks can compare them, and `depth` containers."""
    # integers and texts are ranks, offsets, seeds, devices and paths as often as sizes, which the tensors show
    if isinstance(value, bool | float | torch.dtype):
        return {} if _IS_OF_RANK.search(name) else {name: repr(value)}
    if dataclasses.is_dataclass(value) or type(value).__name__.endswith(_CONFIGS):
        value = dict(getattr(value, "__dict__", {}))
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        start, parts = name if name.endswith(": ") else f"{name}.", value.items() if depth else ()
        return {key: text for part, each in parts for key, text in _plain(f"{start}{part}", each, depth - 1).items()}
    return {name: described(value)} if callable(value) and not isinstance(value, nn.Module) else {}


def _differing(everyone: list[tuple[object, dict[str, str]]]) -> list[str]:
    """Return the first difference among ranks that must have the same, if there is one that ranks can tell."""
    for stage in dict.fromkeys(stage for stage, _ in everyone):
        of_rank = {rank: held for rank, (at, held) in enumerate(everyone) if at == stage}
        for key in dict.fromkeys(key for held in of_rank.values() for key in held):
            texts = {rank: held.get(key, "nothing") for rank, held in of_rank.items()}
            # an attribute that one rank lacks says little about what the layers compute
            if len({*texts.values()}) > 1 and not (": " in key and "nothing" in texts.values()):
                return [f"{key}: {by_text(texts)}"]
    return []
