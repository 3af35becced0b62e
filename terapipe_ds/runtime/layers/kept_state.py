"""Remember what layers keep in Python and in tensors outside their parameters, and put it back."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONTAINERS = (dict, list, set, deque)
_PLAIN = (bool, int, float, str, bytes, type(None))
_REGISTERED = ("_buffers", "_parameters", "_modules")  # dicts of a module whose entries are its attributes
_MOST_ENTRIES = 10_000  # of a container whose entries are looked at one by one
_NOT_THE_USERS = frozenset({"torch", "deepspeed", "terapipe_ds", "megatron", "numpy", *sys.stdlib_module_names})
_GENERATORS = {  # how their states are read and set
    torch.Generator: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
    np.random.RandomState: ("get_state", "set_state"),
    np.random.BitGenerator: ("__getstate__", "__setstate__"),
}


class KeptState:
    """Hold what containers and objects held, the numbers of tensors, and the states of random generators.

    What is of a kind that cannot be put back (an iterator, a global variable) is compared by what it prints as.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}  # by identity: several modules may share one
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._printed: dict[str, tuple[Callable[[], Any], str]] = {}
        self._numbers: dict[str, Callable[[], Any]] = {}
        self._seen: dict[int, Any] = {}
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = [
            (random.getstate, random.setstate, random.getstate()),
            (np.random.get_state, np.random.set_state, np.random.get_state()),
        ]
        for name, owner in owners.items():
            while isinstance(owner, functools.partial):
                owner = owner.func
            self._remember(getattr(owner, "__dict__", None), name)
            function = owner.__func__ if isinstance(owner, MethodType) else owner
            for kind in () if isinstance(function, FunctionType) else type(owner).__mro__:
                self._remember_class(kind)
            if isinstance(function, FunctionType) and _is_the_users(function):
                for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    read = functools.partial(getattr, cell, "cell_contents", None)
                    self._print(f"variable {key} of {function.__qualname__}", read)
                self._remember_globals(function)

    def _remember_class(self, kind: type) -> None:
        if kind in self._classes or not _is_the_users(kind):
            return
        self._classes[kind] = _data_of(kind)
        for key, value in self._classes[kind].items():
            self._remember_named(f"{kind.__qualname__}.{key}", value, functools.partial(getattr, kind, key, None))
        self._remember_globals(kind)

    def _remember_globals(self, owner: Any) -> None:
        variables = vars(sys.modules.get(owner.__module__, sys))
        for name in [key for key, value in variables.items() if type(value) in (int, float, dict, list)]:
            self._print(f"global variable {name} of {owner.__module__}", functools.partial(variables.get, name))

    def _print(self, name: str, read: Callable[[], Any]) -> None:
        """Remember a number or a small container of such by what it prints as."""
        value = read()
        entries = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,))
        if len(entries) <= 100 and all(isinstance(each, _PLAIN) for each in entries):
            self._printed[name] = read, repr(value)

    def _remember_named(self, name: str, value: Any, read: Callable[[], Any]) -> None:
        if type(value) in (int, float):
            self._numbers[name] = read
        self._remember(value, name)

    def _remember(self, value: Any, name: str) -> None:
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
                read = functools.partial(value.get, key) if isinstance(value, dict) else lambda: None
                self._remember_named(inner, each, read)
        elif isinstance(value, np.ndarray):
            self._containers[id(value)] = value, value.copy()
        elif hasattr(value, "__dict__"):
            if _is_the_users(type(value)) or isinstance(value, SimpleNamespace):
                self._remember(vars(value), name)
        elif not type(value).__module__.startswith("torch") and repr(value) != object.__repr__(value):
            self._printed[name] = lambda: value, repr(value)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that attributes and dicts hold now, by name."""
        return {name: read() for name, read in self._numbers.items()}

    def put_back(self, rewinds: bool = True) -> None:
        """Put back what was remembered; the states of generators only if `rewinds`."""
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
        if rewinds:
            self.rewind_generators()

    def rewind_generators(self) -> None:
        """Put back the states of the generators of Python and NumPy, and of those that attributes hold."""
        for _, write, before in self._generators:
            write(before)

    def generator_states(self) -> list[bytes]:
        """Return what tells the states of these generators apart."""
        return [pickle.dumps(read()) for read, _, _ in self._generators]

    def lost(self) -> list[str]:
        """Name what has changed and cannot be put back."""
        return sorted(name for name, (read, before) in self._printed.items() if repr(read()) != before)


def _is_the_users(owner: Any) -> bool:
    module = str(getattr(owner, "__module__", ""))
    return module == "__main__" or module.split(".")[0] not in _NOT_THE_USERS


def _data_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither functions nor descriptors."""
    pairs = vars(kind).items()
    return {k: v for k, v in pairs if not (k.startswith("__") or callable(v) or hasattr(type(v), "__get__"))}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
