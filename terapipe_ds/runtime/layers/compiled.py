"""Compile the layers of a stage for `"compile": true`, one graph for all layers of a kind.

The forward of each layer is compiled by itself, as is usual for pipelines; hooks run outside of it. Lengths are dynamic
from the first call, and what differs between slices and layers is read by the operators of `attention/opaque.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from terapipe_ds.attention import running_layer


def compile_layers(module: nn.Module, backend: str | Callable[..., Any] = "inductor") -> list[str]:
    """Compile the layers that `module` runs, of all parts that the stage holds; return their names."""
    names = []
    for part_id, part in enumerate(getattr(module, "held_parts", (module,))):
        for index, layer in enumerate(getattr(part, "forward_funcs", ())):
            if isinstance(layer, nn.Module):
                compile_layer(layer, f"layer {index} of chunk {part_id}", backend)
                names.append(type(layer).__name__)
    return names


def compile_layer(layer: nn.Module, name: str, backend: str | Callable[..., Any] = "inductor") -> None:
    """Have calls of `layer` run its compiled forward; `name` is unique within the stage.

    torch leaves the attribute that is set here out of copies and pickles of a module.
    """
    compiled = torch.compile(layer.forward, dynamic=True, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        own = vars(layer).get("forward")
        vars(layer)["forward"] = compiled
        try:
            with running_layer(name):
                return layer._call_impl(*args, **kwargs)  # noqa: SLF001 (what torch's own Module.compile compiles)
        finally:
            if own is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = own

    layer._compiled_call_impl = call  # noqa: SLF001 (as Module.compile does)
