"""Remember what layers keep in Python and in tensors outside their parameters, and put it back."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set, deque)
_PLAIN = (bool, int, float, str, bytes, type(None))
_REGISTERED = ("_buffers", "_parameters", "_modules")  # dicts of a module whose entries are its attributes
_MOST_ENTRIES = 10_000  # of a container whose entries are looked at one by one
_MOST_OBJECTS = 20_000  # that are looked at
_MOST_NAMES = 4  # of those that are not
_MOST_BYTES = 2**31  # of all copies
_MOST_BYTES_COMPARED = 2**26  # of a tensor
_MOST_BYTES_OF_STATISTICS = 2**20
_NOT_THE_USERS = frozenset({"torch", "deepspeed", "terapipe_ds", "megatron", "numpy", *sys.stdlib_module_names})
_CONCURRENT = frozenset({"_thread", "threading", "queue", "multiprocessing", "concurrent"})
_GENERATORS = {  # how their states are read and set
    torch.Generator: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
    np.random.RandomState: ("get_state", "set_state"),
    np.random.BitGenerator: ("__getstate__", "__setstate__"),
}


class KeptState:
    """Hold what containers and objects held, the numbers of tensors, and the states of random generators.

    Of what cannot be put back (an iterator, a global number, a trained parameter) it holds how it prints, or how often
    it was written to. `passed_over` names what is too large or too much, has threads, or raises where it is looked at.
    """

    def __init__(self, owners: Mapping[str, object]) -> None:
        self.passed_over: list[str] = []
        self._containers: dict[int, tuple[Any, Any]] = {}  # by identity: several modules may share one
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._printed: dict[str, tuple[Callable[[], Any], str]] = {}
        self._numbers: dict[str, Callable[[], Any]] = {}
        self._seen: dict[int, Any] = {}
        self._waiting: deque[tuple[Any, str]] = deque()  # no recursion: objects may be a long chain
        self._bytes_left = _MOST_BYTES
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = [
            (random.getstate, random.setstate, random.getstate()),
            (np.random.get_state, np.random.set_state, np.random.get_state()),
        ]
        for name, owner in owners.items():
            self._remember(getattr(owner, "__dict__", None), name)
            self._remember(owner, name)
        while self._waiting:
            value, name = self._waiting.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value  # which keeps it alive: no identity is given twice
                try:
                    self._look_at(value, name)
                except Exception:  # of a method of the user's, such as __repr__
                    self.passed_over.append(name)

    def _remember(self, value: Any, name: str, read: Callable[[], Any] = int) -> None:
        if type(value) in (int, float, list, Tensor) or _is_statistic(value):
            self._numbers[name] = read
        if isinstance(value, (*_PLAIN, type)) or id(value) in self._seen:
            return
        if len(self._seen) + len(self._waiting) < _MOST_OBJECTS:
            self._waiting.append((value, name))
        elif len(self.passed_over) < _MOST_NAMES:
            self.passed_over.append(name)

    def _look_at(self, value: Any, name: str) -> None:
        value = value.bit_generator if isinstance(value, np.random.Generator) else value
        names = next((names for kind, names in _GENERATORS.items() if isinstance(value, kind)), None)
        if names is not None:
            read, write = (getattr(value, each) for each in names)
            self._generators.append((read, write, read()))
        elif isinstance(value, Tensor):
            self._look_at_tensor(value, name)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self._containers[id(value)] = value, copy.copy(value)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs if len(value) <= _MOST_ENTRIES else ():
                inner = name if key in _REGISTERED else f"{name}.{key}" if name else str(key)
                self._remember(each, inner, functools.partial(value.get, key) if isinstance(value, dict) else int)
        elif isinstance(value, np.ndarray):
            if isinstance(value, np.memmap) or not self._has_room(value.nbytes):
                self.passed_over.append(name)
            elif value.flags.writeable:
                self._containers[id(value)] = value, value.copy()
        elif isinstance(value, (MethodType, functools.partial)):
            for attribute in ("__self__", "__func__", "func", "args", "keywords"):
                self._remember(getattr(value, attribute, None), name)
        elif isinstance(value, FunctionType):
            self._look_at_function(value)
        elif isinstance(value, (SimpleNamespace, Namespace)) or (
            hasattr(value, "__dict__") and _is_the_users(type(value))
        ):
            if not _CONCURRENT.isdisjoint(type(each).__module__.split(".")[0] for each in vars(value).values()):
                self.passed_over.append(name)  # a thread may change it meanwhile: a loader that reads ahead
                return
            self._remember(vars(value), name)
            for kind in type(value).__mro__:
                self._look_at_class(kind)
        elif not type(value).__module__.startswith("torch") and (text := repr(value)) != object.__repr__(value):
            self._printed[name] = lambda: value, text

    def _look_at_tensor(self, value: Tensor, name: str) -> None:
        """Remember the numbers; of parameters that are trained or large, how often they were written to."""
        is_copied = type(value) is Tensor or _is_statistic(value)
        if is_copied and value.layout is torch.strided and not value.is_meta and self._has_room(value.nbytes):
            self._tensors[id(value)] = value, value.detach().to("cpu", copy=True)
        elif not value.is_inference():
            self._print(name, functools.partial(getattr, value, "_version"))

    def _has_room(self, num_bytes: int) -> bool:
        has_room = num_bytes <= self._bytes_left
        self._bytes_left -= num_bytes * has_room
        return has_room

    def _look_at_class(self, kind: type) -> None:
        if kind in self._classes or not _is_the_users(kind):
            return
        self._classes[kind] = _data_of(kind)
        for key, value in self._classes[kind].items():
            self._remember(value, f"{kind.__qualname__}.{key}", functools.partial(getattr, kind, key, None))
        self._remember(tuple(each for each in vars(kind).values() if isinstance(each, FunctionType)), kind.__qualname__)

    def _look_at_function(self, function: FunctionType) -> None:
        """Remember what a function closes over, and the globals that it names."""
        if not _is_the_users(function):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        reads = {
            f"variable {key} of {function.__qualname__}": functools.partial(getattr, cell, "cell_contents", None)
            for key, cell in cells
        }
        for key in function.__globals__.keys() & _names_in(function.__code__):
            name = f"global variable {key} of {function.__module__}"
            reads[name] = functools.partial(function.__globals__.get, key)
        for name, read in reads.items():
            value = read()
            is_elsewhere = isinstance(value, FunctionType) and value.__module__ != function.__module__
            if value is None or is_elsewhere or isinstance(value, ModuleType):
                continue
            self._print(name, functools.partial(_plain_or_identity, read))
            if type(value) in _CONTAINERS or not isinstance(value, _CONTAINERS):
                self._remember(value, name, read)

    def _print(self, name: str, read: Callable[[], Any]) -> None:
        self._printed[name] = read, repr(read())

    def numbers(self) -> dict[str, Any]:
        """Return the numbers, copies of the tensors and lengths of the lists that attributes and dicts hold now."""
        return {name: _number(read()) for name, read in self._numbers.items()}

    def put_back(self, rewinds: bool = True) -> None:
        """Put back what was remembered; the states of generators only if `rewinds`."""
        for container, before in self._containers.values():
            with suppress(Exception):  # of a class of the user's
                _put_back(container, before)
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
        lost = []
        for name, (read, before) in self._printed.items():
            with suppress(Exception):
                lost += [name] * (repr(read()) != before)
        return sorted(lost)


def _put_back(container: Any, before: Any) -> None:
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


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return value.detach().clone() if is_plain and value.nbytes <= _MOST_BYTES_COMPARED else None
    return len(value) if isinstance(value, list) else value


def _plain_or_identity(read: Callable[[], Any]) -> Any:
    value = read()
    return value if isinstance(value, _PLAIN) else id(value)


def _is_statistic(value: Any) -> bool:
    """Return whether a parameter is not trained and so small that a layer may keep a statistic in it."""
    return type(value) is nn.Parameter and not value.requires_grad and value.nbytes <= _MOST_BYTES_OF_STATISTICS


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses, and the functions within it."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _is_the_users(owner: Any) -> bool:
    module = str(getattr(owner, "__module__", ""))
    return module == "__main__" or module.split(".")[0] not in _NOT_THE_USERS


def _data_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither functions nor descriptors."""
    pairs = vars(kind).items()
    return {k: v for k, v in pairs if not (k.startswith("__") or callable(v) or hasattr(type(v), "__get__"))}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
