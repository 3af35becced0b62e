"""Name the layers of a stage, call them as training does, and identify their authors."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from terapipe_ds.attention.kept import KeptCalls
from terapipe_ds.compat.replaced import packages_of, replaced
from terapipe_ds.runtime.layers.activation_checkpointing import (
    checkpoint_with_gradients,
    checkpointing_with_gradients,
    kept_calls,
)
from terapipe_ds.runtime.layers.finite import layer_title
from terapipe_ds.runtime.layers.sliceable import HOOKS_OF_MODULES, hooks_of_all_modules
from terapipe_ds.runtime.layout.layer_names import module_of
from terapipe_ds.runtime.layout.parted_module import functions_of


@dataclass(frozen=True)
class NamedLayer:
    """Name a layer by its number, with the activation checkpointing that training runs it under.

    It may begin or end the range of layers that is checkpointed, where a tuple of one element becomes that element, and
    a named tuple a plain one. Within the range layers hand on what they return.
    """

    layer_id: int
    function: Callable[[Any], Any]
    checkpoint: Callable[..., Any] | None = None
    begins: bool = True
    ends: bool = True

    @property
    def module(self) -> nn.Module | None:
        """Return the module that holds its parameters; None for a plain function."""
        return module_of(self.function)

    def __call__(self, inputs: Any) -> Any:
        if self.checkpoint is None:
            return self.function(inputs)
        several = inputs if isinstance(inputs, tuple) else (inputs,)
        returned: list[Any] = []

        def call(*tensors: Any) -> Any:
            value = tensors[0] if len(tensors) == 1 else tensors
            outputs = self.function(value if self.begins else _formed_as(inputs, tensors))
            returned[:] = [outputs]
            return outputs

        outputs = self.checkpoint(call, *several)
        return outputs if self.ends else _formed_as(returned[0], outputs if isinstance(outputs, tuple) else (outputs,))

    def __str__(self) -> str:
        if isinstance(self.function, _Chain):
            return " with ".join(map(str, self.function.layers))
        if isinstance(self.function, _WholePart):
            return str(self.function)
        return layer_title(self.function, self.layer_id)


def _formed_as(like: Any, values: tuple[Any, ...]) -> Any:
    """Return values as `like`: a named or a plain tuple, or the only value."""
    if not isinstance(like, tuple):
        return values[0] if len(values) == 1 else values
    return type(like)(*values) if hasattr(like, "_fields") else values


class _Chain(nn.Module):
    """Join layers that are compared as one."""

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.modules_of_layers = nn.ModuleList([layer.module for layer in layers if layer.module is not None])

    def forward(self, values: Any) -> Any:
        for layer in self.layers:
            values = layer(values)
        return values


class _WholePart(nn.Module):
    """Run a part as training does: by the forward and the hooks that the user has given to the `PipelineModule`."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def forward(self, values: Any) -> Any:
        with ExitStack() as stack:
            # DeepSpeed's hooks belong to its engine, which does not run here
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = [
                    (key, hook) for key, hook in vars(self.part)[name].items() if not packages_of(hook) <= _WATCHERS
                ]
                stack.enter_context(replaced(self.part, name, OrderedDict(hooks)))  # torch keeps weak references
            stack.enter_context(replaced(self.part, "micro_offset", self.part.micro_offset))  # counted by DeepSpeed
            stack.enter_context(checkpointing_with_gradients(self.part))
            return self.part(values)

    def __str__(self) -> str:
        first, last, kind = self.part._local_start, self.part._local_stop - 1, type(self.part).__name__
        return f"layers {first} to {last} with the forward and the hooks of the PipelineModule ({kind})"


def chained(layers: Sequence[NamedLayer]) -> NamedLayer:
    """Return consecutive layers as one, each with its own checkpointing."""
    return layers[0] if len(layers) == 1 else NamedLayer(layers[0].layer_id, _Chain(layers))


def _run(function: Callable[..., Any], *inputs: Any) -> Any:
    """Run a range of layers that is not checkpointed among others: it gets a named tuple as a plain one, too."""
    return function(*inputs)


def layers_of(module: Any) -> list[NamedLayer]:
    """Return the layers of a stage, each with the checkpointing that `PipelineModule.forward` runs it under.

    If the user's code runs around the layers, all are one.
    """
    if _has_own_forward(module):
        return [NamedLayer(module._local_start, _WholePart(module))]
    interval = module.activation_checkpoint_interval
    layers = []
    for index, function in enumerate(module.forward_funcs):
        is_checkpointed = interval > 0 and module.is_checkpointable_results[index // interval]
        kept = None if kept_calls(module) is None else KeptCalls()  # training counts its own
        around: Callable[..., Any] | None = _run if interval > 0 and index % interval == 0 else None
        if is_checkpointed:
            around = checkpoint_with_gradients(module.activation_checkpoint_func, kept=kept)
        begins, ends = (
            interval == 0 or place in (0, len(module.forward_funcs)) or place % interval == 0
            for place in (index, index + 1)
        )
        layers.append(NamedLayer(index + module._local_start, function, around, begins, ends))
    return layers


# -- authors of layers -------------------------------------------------------------------------------------------------

_PACKAGE = "terapipe_ds"
_BUILDING_BLOCKS = {_PACKAGE, "torch", "megatron"}  # packages that the package's layers are made of
_WATCHERS = {_PACKAGE, "deepspeed"}  # their hooks only measure


def all_own(module: Any) -> bool:
    """Return whether all layers of this stage and `loss_fn` are the package's own, which are tested with slices."""
    if _has_own_forward(module) or any(map(_is_foreign, hooks_of_all_modules())):
        return False
    return all(map(_is_own, functions_of(module))) and (module.loss_fn is None or _is_own(module.loss_fn))


def _has_own_forward(module: Any) -> bool:
    """Return whether the user's code runs around the layers: a forward of the `PipelineModule`, or a hook of it."""
    hooks = [hook for name in HOOKS_OF_MODULES for hook in vars(module).get(name, {}).values()]
    forwards = [kind.forward for kind in (module, *type(module).__mro__) if "forward" in vars(kind)]
    return any(map(_is_foreign, (*hooks, *forwards)))


def _is_own(layer: Any) -> bool:
    """Return whether a layer and all its contents are the package's; a derived class belongs to its author."""
    if isinstance(layer, functools.partial):  # DeepSpeed makes one of a tied layer's own forward
        return all(_is_own(each) for each in (layer.func, *layer.args) if callable(each))
    inner = layer.modules() if isinstance(layer, nn.Module) else ()
    return packages_of(layer) == {_PACKAGE} and all(map(_is_as_built, inner))


def _is_as_built(module: nn.Module) -> bool:
    """Return whether `module` runs no foreign code: as forward, hook, parametrization or function in an attribute."""
    # functions in attributes are activations, for example
    own = vars(module)
    functions = [value for value in own.values() if callable(value)] + [getattr(type(module), "forward", module)]
    hooks = [hook for name in HOOKS_OF_MODULES for hook in own.get(name, {}).values()]
    hooks += [hook for each in module.parameters(recurse=False) for hook in (each._backward_hooks or {}).values()]
    is_built = all(packages_of(each) <= _BUILDING_BLOCKS for each in (module, *functions))
    return is_built and all(packages_of(hook) <= _WATCHERS for hook in hooks) and not is_parametrized(module)


def _is_foreign(thing: Any) -> bool:
    return not packages_of(thing) <= {*_BUILDING_BLOCKS, "deepspeed"}
