"""Name the layers of a `PipelineModule` alike on every stage; layers that are tied by a key are one layer."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from torch import nn

LayerName = int | str  # the number of a layer, or the key that it is tied by
NOTHING_TRAINED = "terapipe_nothing_is_trained"  # of the module: a parameter for the optimizer of a frozen stage
STOCK_BOUNDS = "terapipe_stock_bounds"  # attribute of a module that was laid out: the bounds of DeepSpeed's cut


def layer_name(specs: Sequence[Any], layer_id: int) -> LayerName:
    """Name the layer with this number."""
    spec = specs[layer_id]
    return spec.key if isinstance(spec, TiedLayerSpec) else layer_id


def layer_of_parameter(name: str) -> LayerName | None:
    """Name the layer that a parameter of a `PipelineModule` belongs to; None: to no layer."""
    first, _, rest = name.partition(".")
    if first == "tied_modules":
        return rest.partition(".")[0]
    return int(first) if first.isdigit() else None


def part_of(bounds: Sequence[int], layer_id: int) -> int:
    """Return the part that has a layer; part k has the layers from `bounds[k]` up to `bounds[k + 1]`."""
    return bisect_right(bounds, layer_id) - 1


def module_of(layer: Any) -> nn.Module | None:
    """Return the module with the parameters of an entry of `forward_funcs`; None for a function."""
    if isinstance(layer, functools.partial):  # a tied layer with a forward of its own: (forward_fn, module)
        return next((each for each in layer.args if isinstance(each, nn.Module)), None)
    return layer if isinstance(layer, nn.Module) else None


def layers_by_name(module: Any, parts: Iterable[tuple[int, Sequence[Any]]]) -> dict[LayerName, Any]:
    """Return the layers of a stage, functions among them; `parts`: each with its first layer and `forward_funcs`."""
    layers: dict[LayerName, Any] = dict(module.tied_modules.items())
    for start, functions in parts:
        for layer_id, layer in enumerate(functions, start):
            if not isinstance(module._layer_specs[layer_id], TiedLayerSpec):
                layers[layer_id] = layer
    return layers
