"""Tell whether layers and the loss are the package's own: these are tested with slices, those of others are not."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from terapipe_ds.runtime.parted import each_part

_PACKAGE = "terapipe_ds"
_BUILDING_BLOCKS = (_PACKAGE, "torch", "megatron")  # what the package's layers are made of
_WATCHERS = (_PACKAGE, "deepspeed")  # their hooks only measure
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def all_own(module: Any) -> bool:
    """Return whether every layer of this stage and `loss_fn` are the package's own."""
    functions = [function for _ in each_part(module) for function in module.forward_funcs]
    return all(map(_is_own, functions)) and (module.loss_fn is None or _is_own(module.loss_fn))


def _is_own(layer: Any) -> bool:
    """Return whether a layer and all that it holds are the package's; a derived class belongs to its author."""
    pieces = list(_pieces(layer))
    inner = [part for piece in pieces if isinstance(piece, nn.Module) for part in piece.modules()]
    return all(_root(piece) == _PACKAGE for piece in pieces) and all(map(_is_as_built, inner))


def _is_as_built(module: nn.Module) -> bool:
    """Return whether a module is a building block as its class makes it.

    Another forward, a hook, a parametrization, or a function in an attribute (an activation, say) changes what it does.
    """
    own = vars(module)
    forward = own.get("forward")  # the package gives linear layers one
    functions = [value for value in own.values() if callable(value)]
    hooks = [hook for name in _HOOKS for hook in own.get(name, {}).values()]
    return (
        all(_root(each) in _BUILDING_BLOCKS for each in (module, *functions))
        and all(_root(hook) in _WATCHERS for hook in hooks)
        and (forward is None or _root(forward) == _PACKAGE)
        and not is_parametrized(module)
    )


def _pieces(layer: Any) -> Iterator[Any]:
    """Yield the functions and modules of a layer: DeepSpeed makes a partial function of a tied layer's own forward."""
    if isinstance(layer, functools.partial):
        yield from _pieces(layer.func)
        yield from (argument for argument in layer.args if isinstance(argument, nn.Module))
    else:
        yield layer


def _root(thing: Any) -> str:
    """Return the package of a function, or of an object's class."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__module__", "")).split(".")[0]
