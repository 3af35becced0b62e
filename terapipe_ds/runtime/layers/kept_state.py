"""Remember what layers keep in Python and in tensors outside their parameters, and put it back."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set, deque)
_PLAIN = (bool, int, float, str, bytes, type(None))
_REGISTERED = ("_buffers", "_parameters", "_modules")  # dicts of a module whose entries are its attributes
_MOST_ENTRIES, _MOST_SHOWN = 10_000, 200  # of a container whose entries are looked at one by one, or written as text
_MOST_NUMBERS = 2**24  # of a tensor that is compared, and not only put back
_NOT_THE_USERS = frozenset({"torch", "deepspeed", "terapipe_ds", "megatron", "numpy", *sys.stdlib_module_names})
_GENERATORS = {  # how their states are read and set
    torch.Generator: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
    np.random.RandomState: ("get_state", "set_state"),
    np.random.BitGenerator: ("__getstate__", "__setstate__"),
}


class KeptState:
    """Hold what containers and objects held, the numbers of tensors, and the states of random generators.

    What is of a kind that cannot be put back (an iterator, a global variable) is compared by a text of it.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}  # by identity: several modules may share one
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._texts: list[tuple[str, Callable[[], str], str]] = []
        self._values: dict[str, Callable[[], Any]] = {}
        self._seen: dict[int, Any] = {}
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = [
            (random.getstate, random.setstate, random.getstate()),
            (np.random.get_state, np.random.set_state, np.random.get_state()),
        ]
        for name, owner in owners.items():
            self._remember(owner, name)

    def _remember_class(self, kind: type) -> None:
        if kind in self._classes or not is_the_users(kind):
            return
        self._classes[kind] = _data_of(kind)
        for key, value in self._classes[kind].items():
            self._remember_named(f"{kind.__qualname__}.{key}", value, functools.partial(getattr, kind, key, None))
        self._remember_globals(kind)

    def _remember_function(self, function: FunctionType) -> None:
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType():  # one that is not set yet
                read = functools.partial(getattr, cell, "cell_contents")
                self._remember_variable(f"variable {key} of {function.__qualname__}", read)
        self._remember_globals(function)

    def _remember_globals(self, owner: Any) -> None:
        variables = getattr(sys.modules.get(owner.__module__), "__dict__", {})
        if id(variables) not in self._seen:
            self._seen[id(variables)] = variables
            for name in list(variables):
                read = functools.partial(variables.get, name)
                self._remember_variable(f"global variable {name} of {owner.__module__}", read)

    def _remember_variable(self, name: str, read: Callable[[], Any]) -> None:
        if isinstance(read(), (np.random.Generator, *_GENERATORS)):
            self._remember(read(), name)
        else:
            self._texts.append((name, lambda: _text(read()), _text(read())))

    def _remember_named(self, name: str, value: Any, read: Callable[[], Any]) -> None:
        if type(value) in (int, float) or (type(value) is Tensor and value.numel() <= _MOST_NUMBERS):
            self._values[name] = read
        self._remember(value, name)

    def _remember(self, value: Any, name: str) -> None:
        while isinstance(value, (functools.partial, MethodType)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        if isinstance(value, (*_PLAIN, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # which keeps it alive: no identity is given twice
        value = value.bit_generator if isinstance(value, np.random.Generator) else value
        names = next((names for kind, names in _GENERATORS.items() if isinstance(value, kind)), None)
        if names is not None:
            read, write = (getattr(value, each) for each in names)
            self._generators.append((read, write, read()))
        elif type(value) is Tensor:
            if value.layout is torch.strided and not value.is_meta:
                self._tensors[id(value)] = value, value.detach().to("cpu", copy=True)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self._containers[id(value)] = value, copy.copy(value)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs if len(value) <= _MOST_ENTRIES else ():
                inner = name if key in _REGISTERED else f"{name}.{key}" if name else str(key)
                if isinstance(value, dict):
                    self._remember_named(inner, each, functools.partial(value.get, key))
                else:
                    self._remember(each, inner)
        elif isinstance(value, np.ndarray):
            self._containers[id(value)] = value, value.copy()
        elif isinstance(value, FunctionType):
            if is_the_users(value):
                self._remember_function(value)
        elif isinstance(value, Iterator):
            text = repr(value)  # where it shows no place, the iterator counts as moved
            self._texts.append((name, lambda: repr(value), "" if " at 0x" in text else text))
        elif isinstance(value, (nn.Module, SimpleNamespace)) or is_the_users(type(value)):
            self._remember(getattr(value, "__dict__", None), name)
            for kind in type(value).__mro__:
                self._remember_class(kind)
            if not hasattr(value, "__dict__"):
                self._texts.append((name, lambda: repr(value), repr(value)))

    def values(self) -> dict[str, Any]:
        """Return the numbers and tensors that attributes and dicts hold now, by name."""
        values = {name: read() for name, read in self._values.items()}
        return {name: each.detach().clone() if torch.is_tensor(each) else each for name, each in values.items()}

    def put_back(self) -> None:
        """Put back what was remembered."""
        for container, before in self._containers.values():
            if isinstance(container, dict):
                for key in before:  # never empty in between: it may be that of a module
                    container[key] = before[key]  # `update` of a Counter would add
                for key in [key for key in container if key not in before]:
                    del container[key]
            elif isinstance(container, np.ndarray):
                if container.tobytes() != before.tobytes():
                    container[...] = before
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(before)
        for kind, held in self._classes.items():
            now = _data_of(kind)
            for key in now.keys() - held.keys():
                delattr(kind, key)
            for key in [key for key, value in held.items() if now.get(key, kind) is not value]:
                setattr(kind, key, held[key])
        with torch.no_grad():
            for tensor, before in self._tensors.values():
                if not torch.equal(_bytes(tensor), _bytes(before)):  # memory that is not changed may be read-only
                    tensor.copy_(before)
        self.rewind_generators()

    def rewind_generators(self) -> None:
        """Put back the states of the generators of Python and NumPy, and of those that attributes hold."""
        for _, write, before in self._generators:
            write(before)

    def generator_states(self) -> list[bytes]:
        """Return what tells the states of these generators apart."""
        states = [read() for read, _, _ in self._generators]  # equal tensors may be pickled otherwise
        return [each.numpy().tobytes() if torch.is_tensor(each) else pickle.dumps(each) for each in states]

    def lost(self) -> list[str]:
        """Name what has changed and cannot be put back."""
        return sorted({name for name, read, before in self._texts if read() != before})


def is_the_users(owner: Any) -> bool:
    """Return whether a class or a function is defined in no package that the engine is made of."""
    module = str(getattr(owner, "__module__", ""))
    return module == "__main__" or module.split(".")[0] not in _NOT_THE_USERS


def _data_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither functions nor descriptors."""
    pairs = vars(kind).items()
    return {k: v for k, v in pairs if not (k.startswith("__") or callable(v) or hasattr(type(v), "__get__"))}


def _text(value: Any) -> str:
    """Return the numbers and other plain values of a variable; nothing where there are too many."""
    if isinstance(value, SimpleNamespace) or is_the_users(type(value)):
        value = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, list):
        return repr([each for each in value if isinstance(each, _PLAIN)]) if len(value) <= _MOST_SHOWN else ""
    return repr(value) if type(value) in (int, float) else ""


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
