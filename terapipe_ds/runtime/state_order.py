"""In which order optimizers hold parameters: the names of each stage and group, here and in DeepSpeed's own cut.

DeepSpeed saves optimizer states by stage, and in a stage by number, so that a number means another parameter where
another layout has cut the layers. Names do not: they are made of the number of the layer, or of its tied key.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import TiedLayerSpec

Groups = tuple[tuple[str, ...], ...]
"""Names of parameters by group of the optimizer."""

Orders = tuple[Groups, ...]
"""By stage."""

STOCK_BOUNDS = "terapipe_stock_bounds"  # attribute of a module that was laid out: how DeepSpeed had cut it


@dataclass(frozen=True)
class StageParameters:
    """What a stage tells the others of its parameters.

    Args:
        named: name -> shape, as the module lists them.
        groups: those that the optimizer holds, in its order.
    """

    named: Mapping[str, tuple[int, ...]]
    groups: Groups

    @property
    def problem(self) -> str | None:
        """Why nobody knows how another engine would order these; None where it is the module's order."""
        for group in self.groups:
            here = set(group)
            if group != tuple(name for name in self.named if name in here):
                return "the groups of the optimizer are not in the order of module.named_parameters()"
        strange = [name for name in self.named if layer_of(name) is None]
        return f"{strange[0]} is no parameter of a layer" if strange else None


Name = int | str
"""Of a layer: its number, or the key that it is tied by."""


def name_of(specs: Sequence[Any], layer_id: int) -> Name:
    """Of the layer with this number."""
    spec = specs[layer_id]
    return spec.key if isinstance(spec, TiedLayerSpec) else layer_id


def layer_of(name: str) -> Name | None:
    """The number of the layer that a parameter belongs to, or the key that it is tied by."""
    first, _, rest = name.partition(".")
    if first == "tied_modules":
        return rest.partition(".")[0]
    return int(first) if first.isdigit() else None


def stage_parameters(engine: Any) -> StageParameters:
    """Of this rank."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = tuple(
        tuple(names.get(id(parameter), f"not in the module: {position}") for position, parameter in enumerate(group))
        for group in _optimized(engine.optimizer)
    )
    return StageParameters({name: tuple(p.shape) for name, p in engine.module.named_parameters()}, groups)


def _optimized(optimizer: Any) -> list[list[Any]]:
    """The parameters of an optimizer by group; DeepSpeed's wrappers keep them beside flat copies of their own."""
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [list(group["params"]) for group in optimizer.param_groups]


def shapes_of(stages: Sequence[StageParameters]) -> dict[str, tuple[int, ...]]:
    """Of all parameters of a pipeline."""
    return {name: tuple(shape) for stage in stages for name, shape in stage.named.items()}


def orders_of(stages: Sequence[StageParameters]) -> Orders:
    """As the optimizers of the engine hold them."""
    return tuple(stage.groups for stage in stages)


def stock_orders(module: Any, stages: Sequence[StageParameters]) -> Orders:
    """As the optimizers of DeepSpeed's own engine hold them, where it cuts the module as it did at first: tied layers,
    and then the others by number."""
    by_layer: dict[Name, list[str]] = {}
    for name in shapes_of(stages):
        layer = layer_of(name)
        assert layer is not None
        by_layer.setdefault(layer, []).append(name)
    group_of = {name: index for stage in stages for index, group in enumerate(stage.groups) for name in group}
    num_groups = max(len(stage.groups) for stage in stages)
    bounds = getattr(module, STOCK_BOUNDS, module.parts)
    orders = []
    for start, stop in itertools.pairwise(bounds):
        found = dict.fromkeys(name_of(module._layer_specs, layer_id) for layer_id in range(start, stop))
        layers = sorted(found, key=lambda layer: isinstance(layer, int))  # stable: tied ones, then the others
        names = [name for layer in layers for name in by_layer.get(layer, ())]
        orders.append(
            tuple(tuple(name for name in names if group_of.get(name) == index) for index in range(num_groups))
        )
    return tuple(orders)
