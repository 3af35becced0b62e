"""Compile the layers of a stage for `"compile": true`, one graph for all layers of a kind.

The forward of each layer is compiled by itself, as is usual for pipelines; hooks run outside of it. Lengths are dynamic
from the first call. The operators of `attention/opaque.py` read the values that differ between slices and layers. A
layer that reads the active slice in another way would be compiled again for each slice, or keep the values of the first
one. So only layers whose class says `compile_safe = True` are compiled, and the others run uncompiled.

A layer that wraps the modules of others names its compiled modules by `compiled_parts()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from terapipe_ds.attention import running_layer
from terapipe_ds.compat.replaced import replaced
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.messages import logger
from terapipe_ds.runtime.agreement import gather
from terapipe_ds.runtime.layout.parted_module import functions_of

Backend = str | Callable[..., Any]
DEFAULT_BACKEND: Backend = "inductor"  # of torch.compile; tests have others
_MOST_GRAPHS = 16  # of a kind of layer: torch's own limit of 8 counts training, evaluation and recompute alike
_MARK = "_terapipe_compiled"  # of calls that run what was compiled here
_as_they_are = 0  # blocks of `layers_as_they_are` that are open; of the process: autograd has threads of its own


@contextmanager
def layers_as_they_are() -> Iterator[None]:
    """Run compiled layers uncompiled for the body, in which other code inspects each of their operations."""
    global _as_they_are
    _as_they_are += 1
    try:
        yield
    finally:
        _as_they_are -= 1


def compile_layers(module: nn.Module) -> None:
    """Compile the layers that `module` runs, of all parts that the stage holds."""
    kinds: set[str] = set()
    others: set[str] = set()
    for index, layer in enumerate(layers_run_by(module)):
        parts = compiled_parts(layer)
        (kinds if parts else others).add(type(layer).__name__)
        for number, piece in enumerate(parts):
            compile_layer(piece, f"layer {index} of the stage, part {number}")
    logger.info("terapipe.compile: layers of %s are compiled", ", ".join(sorted(kinds)) or "no kind")
    if others:
        logger.warning(
            "terapipe.compile: layers of %s run as they are: their class does not say compile_safe = True, or they ask "
            "for the slice in other ways than sliced_attention (docs/compile.md)",
            ", ".join(sorted(others)),
        )


def uncompile_layers(module: nn.Module) -> None:
    """Run layers without the compilation of `compile_layers`; layers that the user compiled stay compiled."""
    for layer in module.modules():
        if hasattr(layer._compiled_call_impl, _MARK):
            layer._compiled_call_impl = None


def problem_of_compile(module: nn.Module, profiles_flops: bool, has_sequence_ranks: bool) -> str | None:
    """Return why `"compile": true` is not possible here; a collective over all ranks."""
    if profiles_flops:
        return (
            "terapipe.compile = true with flops_profiler: it counts operations one by one, and sees none inside of a "
            "compiled layer; switch one of the two off"
        )
    if has_sequence_ranks:
        return (
            "terapipe.compile = true with a 'sequence' axis of the topology: heads are exchanged between operations of "
            "attention, which a compiled layer does not show; set compile to false, or leave the axis out"
        )
    # a stage without such layers runs beside others that have some
    layers = [layer for layer in layers_run_by(module) if compiled_parts(layer)]
    if any(gather(bool(layers))):
        return None
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers_run_by(module)}))
    return (
        f"terapipe.compile = true: no layer can be compiled, of {kinds} here. A layer may be where it asks for the "
        "slice by sliced_attention and carry alone, and its class then says compile_safe = True (docs/compile.md). "
        "Those of Megatron ask in other ways. Set compile to false"
    )


def tell_of_schedules(config: TeraPipeConfig) -> None:
    """Log once which schedules the comparison leaves out."""
    if config.compile and config.schedule == "auto":
        logger.info(
            'terapipe.compile with schedule "auto": schedules that split backwards are left out, because the backward '
            "of a compiled layer gives all its gradients at once"
        )


def layers_run_by(module: nn.Module) -> list[nn.Module]:
    """Return the layers that `module` runs, of all parts that the stage holds."""
    return [layer for layer in functions_of(module) if isinstance(layer, nn.Module)]


def compiled_parts(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of `layer` to compile: itself, or those that it names; none if it is not compile-safe."""
    named = getattr(layer, "compiled_parts", None)
    if named is not None:
        return list(named())
    return [layer] if getattr(type(layer), "compile_safe", False) else []


def compile_layer(layer: nn.Module, name: str, backend: Backend | None = None) -> None:
    """Have calls of `layer` run its compiled forward; `name` is unique within the stage.

    torch leaves the attribute that is set here out of copies and pickles of a module.
    """
    from torch._dynamo import config as of_compiler  # this import takes seconds, so do it only to compile

    limit = {"recompile_limit": _MOST_GRAPHS}
    has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters  # not before torch 2.13
    options: dict[str, Any] = {"backend": backend or DEFAULT_BACKEND, **(limit if has_limit else {})}
    # lengths change from slice to slice: a graph per length would never end
    compiled = torch.compile(layer.forward, dynamic=True, **options)
    settings: dict[str, Any] = {} if has_limit else limit
    traced: set[tuple[bool, bool]] = set()

    def call(*args: Any, **kwargs: Any) -> Any:
        if _as_they_are:
            return layer._call_impl(*args, **kwargs)  # noqa: SLF001 (what torch's own Module.compile compiles)
        case = torch.is_grad_enabled(), layer.training
        # numbers of a layer are constants of its graph in the end, and torch takes half the time if it knows
        wanted = settings if case in traced else {**settings, "specialize_float": True}
        traced.add(case)
        tracing = of_compiler.patch(**wanted) if wanted else nullcontext()
        # hooks run around it as usual: torch's own call does the rest
        with running_layer(name), tracing, replaced(layer, "forward", compiled):
            return layer._call_impl(*args, **kwargs)  # noqa: SLF001

    setattr(call, _MARK, True)
    layer._compiled_call_impl = call
