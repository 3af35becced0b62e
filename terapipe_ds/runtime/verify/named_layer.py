"""Name the layers of a stage, and call them as training does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terapipe_ds.runtime.batch.sliceable import Tensors
from terapipe_ds.runtime.layers.activation_checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.layers.finite import layer_title
from terapipe_ds.runtime.layout.layer_names import module_of


@dataclass(frozen=True)
class NamedLayer:
    """Name a layer by its number, with the activation checkpointing that training runs it under."""

    layer_id: int
    function: Callable[[Any], Any]
    checkpoint: Callable[..., Any] | None = None

    @property
    def module(self) -> nn.Module | None:
        """Return what holds its parameters; None for a plain function."""
        return module_of(self.function)

    def __call__(self, inputs: Tensors, is_tuple: bool) -> Any:
        if self.checkpoint is None:
            return self.function(inputs if is_tuple else inputs[0])
        return self.checkpoint(lambda *tensors: self.function(tensors[0] if len(tensors) == 1 else tensors), *inputs)

    def __str__(self) -> str:
        if isinstance(self.function, _Chain):
            return " with ".join(map(str, self.function.layers))
        return layer_title(self.function, self.layer_id)


class _Chain(nn.Module):
    """Layers that are compared as one."""

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.modules_of_layers = nn.ModuleList([layer.module for layer in layers if layer.module is not None])

    def forward(self, values: Any) -> Any:
        for layer in self.layers:
            values = layer((values,) if torch.is_tensor(values) else values, not torch.is_tensor(values))
        return values


def chained(layers: Sequence[NamedLayer]) -> NamedLayer:
    """Return consecutive layers as one, each with its own checkpointing."""
    return layers[0] if len(layers) == 1 else NamedLayer(layers[0].layer_id, _Chain(layers))


def layers_of(module: Any) -> list[NamedLayer]:
    """Return the layers of a stage, each with the checkpointing that `PipelineModule.forward` runs it under."""
    interval = module.activation_checkpoint_interval
    layers = []
    for index, function in enumerate(module.forward_funcs):
        is_checkpointed = interval > 0 and module.is_checkpointable_results[index // interval]
        checkpoint = checkpoint_with_gradients(module.activation_checkpoint_func) if is_checkpointed else None
        layers.append(NamedLayer(index + module._local_start, function, checkpoint))
    return layers
