"""Compile the layers of a stage for `"compile": true`, one graph for all layers of a kind.

The forward of each layer is compiled by itself, as is usual for pipelines; hooks run outside of it. Lengths are dynamic
from the first call, and what differs between slices and layers is read by the operators of `attention/opaque.py`.
A layer that asks for the active slice in another way would be compiled again for each slice, or keep what it read: only
layers whose class says `compile_safe = True` are compiled, and the others run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from terapipe_ds.attention import running_layer

logger = logging.getLogger("terapipe_ds")


def compile_layers(module: nn.Module, backend: str | Callable[..., Any] = "inductor") -> list[str]:
    """Compile the layers that `module` runs, of all parts that the stage holds; return their kinds."""
    kinds: set[str] = set()
    others: set[str] = set()
    for part_id, part in enumerate(getattr(module, "held_parts", (module,))):
        for index, layer in enumerate(getattr(part, "forward_funcs", ())):
            if isinstance(layer, nn.Module):
                is_safe = getattr(type(layer), "compile_safe", False)
                (kinds if is_safe else others).add(type(layer).__name__)
                if is_safe:
                    compile_layer(layer, f"layer {index} of chunk {part_id}", backend)
    logger.info("terapipe.compile: layers of %s are compiled", ", ".join(sorted(kinds)) or "no kind")
    if others:
        logger.warning(
            "terapipe.compile: layers of %s run as they are, because their class does not say compile_safe = True",
            ", ".join(sorted(others)),
        )
    return sorted(kinds)


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

    layer._compiled_call_impl = call
