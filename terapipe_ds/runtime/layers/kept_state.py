"""Remember what layers keep in Python and in tensors outside their parameters, and put it back."""

from __future__ import annotations

import pickle
import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, bytes, type(None))
_REGISTERED = ("_buffers", "_parameters", "_modules")  # dicts of a module whose entries are its attributes
_MOST_ENTRIES = 10_000  # of a container whose entries are looked at one by one
_MOST_OBJECTS = 200_000  # that are looked at
_MOST_BYTES = 2**31  # of all copies
_MOST_BYTES_COMPARED = 2**26  # of a tensor
_MOST_BYTES_OF_STATISTICS = 2**20
_NOT_THE_USERS = frozenset({"torch", "deepspeed", "terapipe_ds", "megatron", "numpy", *sys.stdlib_module_names})
_CONCURRENT = frozenset({"_thread", "threading", "queue", "_queue", "multiprocessing", "concurrent"})
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.BitGenerator)


class KeptState:
    """Hold what the owners reach (containers, objects, classes, variables, tensors), and the states of generators.

    Of what cannot be put back it holds a text (an iterator), or how often it was written to (a trained parameter).
    `passed_over` names what is too large or too much, has threads, or raises where it is looked at. What is `apart` is
    not looked at.
    """

    def __init__(self, owners: Mapping[str, object], apart: Iterable[object] = ()) -> None:
        self.passed_over: list[str] = []
        self._put_backs: list[tuple[str, Callable[[], object]]] = []
        self._stuck: set[str] = set()  # what could not be put back
        self._texts: list[tuple[str, Callable[[], str], str]] = []
        self._values: dict[str, Callable[[], Any]] = {}
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        self._bytes_left = _MOST_BYTES
        self._seen = {id(each) for each in apart}
        self._reached: list[tuple[Any, str]] = []  # no identity is given twice while they live
        for name, owner in (("random", random.seed), ("numpy.random", np.random.get_state), *owners.items()):
            self._remember(owner, name)
        for value, name in self._reached:  # which grows; no recursion: objects may be a long chain
            if isinstance(_result_of(partial(self._look_at, value, name)), Exception):
                self.passed_over.append(name)

    def _remember(self, value: Any, name: str, read: Callable[[], Any] | None = None) -> None:
        is_small = _holds_numbers(value) and value.nbytes <= _MOST_BYTES_COMPARED
        if read is not None and (is_small or type(value) in (int, float, list)):
            self._values[name] = read
        if isinstance(value, _PLAIN) or id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if len(self._seen) <= _MOST_OBJECTS:
            self._reached.append((value, name))
        else:
            self.passed_over.append(f"{name} and what comes after it")

    def _look_at(self, value: Any, name: str) -> None:
        if isinstance(value, _GENERATORS):
            is_torch = isinstance(value, torch.Generator)
            names = ("get_state", "set_state") if is_torch else ("__getstate__", "__setstate__")
            read, write = (getattr(value, each) for each in names)
            self._generators.append((read, write, read()))
        elif isinstance(value, (Tensor, np.ndarray)):
            self._look_at_numbers(value, name)
        elif isinstance(value, (dict, list, tuple, set, deque)):
            self._look_at_entries(value, name, partial(dict.get, value) if isinstance(value, dict) else None)
        elif isinstance(value, (MethodType, BuiltinMethodType, partial, np.random.Generator)):
            for attribute in ("__self__", "__func__", "func", "args", "keywords", "bit_generator"):
                self._remember(getattr(value, attribute, None), name)
        elif isinstance(value, FunctionType):
            self._look_at_function(value)
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            text = repr(value)  # where it shows no place, the iterator counts as moved
            self._texts.append((name, lambda: repr(value), "" if " at 0x" in text else text))
        else:
            self._look_at_object(value, name)

    def _look_at_numbers(self, value: Any, name: str) -> None:
        """Keep a copy of a tensor or an array; of a parameter that is trained or large, how often it was written to."""
        if _holds_numbers(value):
            self._keep(value, name, value.nbytes, lambda: value.detach().to("cpu", copy=True))
        elif isinstance(value, Tensor):
            self._texts.append((name, lambda: str(value._version), str(value._version)))
        else:
            self._keep(value, name, _MOST_BYTES + 1 if isinstance(value, np.memmap) else value.nbytes, value.copy)

    def _keep(self, value: Any, name: str, num_bytes: int, copied: Callable[[], Any]) -> Any:
        """Keep a copy to put back, where there is room."""
        if num_bytes > self._bytes_left:
            self.passed_over.append(name)
            return ()
        self._bytes_left -= num_bytes
        before = copied()
        self._put_backs.append((name, partial(_put_back, value, before)))
        return before

    def _look_at_entries(self, value: Any, name: str, read: Callable[[Any], Any] | None) -> None:
        held = self._keep(value, name, sys.getsizeof(value), partial(_entries_of, value))
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        for key, each in pairs if len(held) <= _MOST_ENTRIES else ():
            self._remember(each, _inner(name, key), read and partial(read, key))

    def _look_at_object(self, value: Any, name: str) -> None:
        """Look at the attributes of a module, of a class or object of the user's, and at the classes of an object."""
        if isinstance(value, type):
            if is_the_users(value):
                self._look_at_entries(value, value.__qualname__, lambda key: getattr(value, key, None))
                functions = (getattr(each, "__func__", each) for each in vars(value).values())
                self._remember(tuple(each for each in functions if isinstance(each, FunctionType)), name)
            return
        if not (isinstance(value, (nn.Module, SimpleNamespace, Namespace)) or is_the_users(type(value))):
            return
        held = getattr(value, "__dict__", {})
        kinds = (type(each).__module__.split(".")[0] for each in held.values())
        # a thread may change its owner meanwhile: a loader that reads ahead
        if not isinstance(value, nn.Module) and not _CONCURRENT.isdisjoint(kinds):
            self.passed_over.append(name)
            return
        self._remember(held, name)
        for kind in filter(is_the_users, type(value).__mro__):
            self._remember(kind, kind.__qualname__)

    def _look_at_function(self, function: FunctionType) -> None:
        """Remember what a function closes over, and the globals that it names; not classes and functions elsewhere."""
        if not is_the_users(function):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != CellType():  # one that is not set yet
                read, write = (partial(act, cell, "cell_contents") for act in (getattr, setattr))
                self._remember_variable(f"variable {key} of {function.__qualname__}", read, write)
        held, module = function.__globals__, function.__module__
        for key in sorted(held.keys() & names_in(function.__code__)):
            if not isinstance(held[key], (FunctionType, type)) or held[key].__module__ == module:
                read, write = partial(held.get, key), partial(held.__setitem__, key)
                self._remember_variable(f"global variable {key} of {module}", read, write)

    def _remember_variable(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        value = read()
        self._put_backs.append((name, lambda: read() is value or write(value)))
        self._remember(value, name, read)

    def values(self) -> dict[str, Any]:
        """Return the numbers, copies of the tensors and lengths of the lists that have names, as they are now."""
        pairs = ((name, read()) for name, read in self._values.items())
        values = ((name, len(each) if isinstance(each, list) else each) for name, each in pairs)
        return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in values}

    def put_back(self) -> None:
        """Put back what was remembered, but for the states of generators."""
        with torch.no_grad():
            self._stuck = {name for name, act in self._put_backs if isinstance(_result_of(act), Exception)}

    def changed(self) -> list[str]:
        """Name what is not as it was, but for generators and iterators that do not show their place."""
        acts = [(name, act) for name, act in self._put_backs if isinstance(act, partial) and act.func is _put_back]
        names = {inner for name, act in acts for inner in _changes(name, *act.args)}
        return sorted(names | {name for name, read, before in self._texts if before and _result_of(read) != before})

    def rewind_generators(self) -> None:
        """Put back the states of the generators of Python and NumPy, and of those that the owners reach."""
        for _, write, before in self._generators:
            write(before)

    def generator_states(self) -> list[bytes]:
        """Return what tells the states of these generators apart."""
        states = (read() for read, _, _ in self._generators)  # equal tensors may be pickled otherwise
        return [pickle.dumps(each.tolist() if torch.is_tensor(each) else each) for each in states]

    def lost(self) -> list[str]:
        """Name what has changed and cannot be put back."""
        return sorted(self._stuck | {name for name, read, before in self._texts if _result_of(read) != before})


def _inner(name: str, key: object) -> str:
    """Name an entry of what has a name."""
    return name if key in _REGISTERED else f"{name}.{key}" if name else str(key)


def _result_of(act: Callable[[], object]) -> object:
    """Return what a call gives, or the exception that it raises: methods of the user's may do anything."""
    try:
        return act()
    except Exception as error:
        return error


def _changes(name: str, owner: Any, before: Any) -> list[str]:
    """Name what `_put_back` would write."""
    if isinstance(owner, (Tensor, np.ndarray)):
        return [] if same_bytes(owner, before) else [name]
    now = _entries_of(owner)
    if isinstance(now, dict):
        keys = (key for key in {**before, **now} if not _is_same(now.get(key, now), before.get(key, now)))
        return [_inner(name, key) for key in keys]
    return [] if len(now) == len(before) and all(map(_is_same, now, before)) else [name]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _put_back(owner: Any, before: Any) -> None:
    """Write only where something has changed: memory may be read-only, and the methods may be the user's."""
    if isinstance(owner, (Tensor, np.ndarray)):
        if not same_bytes(owner, before):
            owner[...] = before
    elif isinstance(owner, (dict, type)):  # never empty in between: it may be that of a module
        now, in_class = _entries_of(owner), (partial(setattr, owner), partial(delattr, owner))
        write, remove = (owner.__setitem__, owner.__delitem__) if isinstance(owner, dict) else in_class
        for key in [key for key, value in before.items() if now.get(key, now) is not value]:
            write(key, before[key])
        for key in now.keys() - before.keys():
            remove(key)
    elif len(owner) != len(before) or any(a is not b for a, b in zip(owner, before, strict=True)):
        owner.clear()
        (owner.update if isinstance(owner, set) else owner.extend)(before)


def same_bytes(one: Any, other: Any) -> bool:
    """Return whether two tensors or arrays of one dtype have the same bits, those of NaN among them."""
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def _entries_of(owner: Any) -> Any:
    """Return what a container holds, by no method of the user's; of a class no functions and descriptors."""
    if isinstance(owner, type):
        pairs = vars(owner).items()
        return {k: v for k, v in pairs if not (k.startswith("__") or callable(v) or hasattr(type(v), "__get__"))}
    return dict(dict.items(owner)) if isinstance(owner, dict) else tuple(owner)


def _holds_numbers(value: Any) -> bool:
    """Return whether a layer may keep numbers in a tensor: not in parameters that are trained or large."""
    is_statistic = type(value) is nn.Parameter and not value.requires_grad and value.nbytes <= _MOST_BYTES_OF_STATISTICS
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_meta or value.is_nested)
    return is_dense and (type(value) is Tensor or is_statistic)


def is_the_users(owner: Any) -> bool:
    """Return whether a class or a function is defined in no package that the engine is made of."""
    module = str(getattr(owner, "__module__", ""))
    return module == "__main__" or module.split(".")[0] not in _NOT_THE_USERS


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses, and the functions within it."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)
