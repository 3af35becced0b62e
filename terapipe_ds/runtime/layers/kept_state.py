"""Let layers work on copies of the state that they keep in attributes, outside their parameters.

`copy.deepcopy` makes the copies. Functions, modules and trained parameters are not copied, nor is the state that
functions use: variables that they close over, globals, attributes of classes.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from argparse import Namespace
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from terapipe_ds.runtime.layout.parted_module import PartedModule

_PLAIN = (bool, int, float, str, bytes, type(None), FunctionType, type)
_SEQUENCES = (list, tuple, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MOST_ENTRIES = 1_000  # of a sequence whose entries are named
_MOST_BYTES = 2**26  # of a tensor, an array or a module that is copied
_MOST_BYTES_OF_STATISTICS = 2**20  # of a parameter that is not trained, but may be a running mean
_NOT_THE_USERS = frozenset({"torch", "deepspeed", "terapipe_ds", "megatron", "numpy", *sys.stdlib_module_names})


_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # registries of submodules, parameters, buffers and hooks


class KeptState:
    """Hold the attributes of modules, and objects to which functions are bound, without the objects in `apart`.

    `stuck` holds by name all objects that cannot be copied (an iterator, an object with a thread) or are too large.
    """

    def __init__(self, owners: Mapping[str, object], apart: Iterable[object] = ()) -> None:
        self._scopes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # name, attributes, and their old values
        self._shared: dict[int, Any] = {id(each): each for each in apart}  # not copied, as a memo of `deepcopy`
        self._versions: dict[str, tuple[Tensor, int]] = {}  # of parameters that are not copied
        self.stuck: dict[str, object] = {}
        self._generators: list[Any] = [*_GLOBAL_GENERATORS]
        self._states = [_state_of(each) for each in self._generators]
        queue = list(owners.items())
        for name, owner in queue:  # which grows
            if id(owner) not in self._shared:
                self._shared[id(owner)] = owner
                queue += self._open(name, owner)

    def _open(self, name: str, owner: Any) -> Iterable[tuple[str, Any]]:
        """Take the state of an owner, and return the owners that it leads to."""
        if isinstance(owner, MethodType):
            return [(name, owner.__self__)]
        if isinstance(owner, partial):
            return [(name, each) for each in (owner.func, *owner.args, *owner.keywords.values())]
        if not _is_space(owner) or isinstance(owner, torch.jit.ScriptModule):  # whose registries are not of Python
            return []
        held = vars(owner)
        self._scopes.append((name, held, dict(held)))
        return self._open_module(name, owner) if isinstance(owner, nn.Module) else []

    def _open_module(self, name: str, module: nn.Module) -> list[tuple[str, Any]]:
        """Take the registries of a module, whose entries count, and return its submodules and its loss."""
        held = vars(module)
        stays = _OF_MODULES | OF_DEEPSPEED if isinstance(module, PipelineModule) else _OF_MODULES
        self._shared |= {id(value): value for key, value in held.items() if key in stays}
        self._shared |= {id(each): each for each in getattr(module, "shared_by_copies", ())}
        for registry in (module._buffers, module._parameters, module._modules):
            self._scopes.append((name, registry, dict(registry)))  # type: ignore[arg-type]
        # a parameter that is trained or large is no statistic: only watch it
        for key, parameter in module._parameters.items():
            if parameter is not None and (parameter.requires_grad or _bytes_of(parameter) > _MOST_BYTES_OF_STATISTICS):
                self._shared[id(parameter)] = parameter
                self._versions[_inner(name, key)] = parameter, parameter._version
        inner = {**module._modules, **({"loss_fn": held["loss_fn"]} if "loss_fn" in held else {})}
        return [(_inner(name, key), child) for key, child in inner.items() if child is not None]

    def renew(self) -> None:
        """Put fresh copies in the place of what is kept, and rewind all generators."""
        memo: dict[object, Any] = {}
        self._generators, self._states = [*_GLOBAL_GENERATORS], self._states[: len(_GLOBAL_GENERATORS)]
        for name, held, before in self._scopes:
            copies = {key: self._copied(_inner(name, key), value, memo) for key, value in before.items()}
            _write(held, copies)
            own = [each for each in copies.values() if isinstance(each, _GENERATORS)]
            self._generators += own
            self._states += map(_state_of, own)
        self.rewind_generators()

    def _copied(self, name: str, value: Any, memo: dict[object, Any]) -> Any:
        """Return a copy; `memo` lets what several attributes share be one thing in the copies as well."""
        if isinstance(value, _PLAIN) or id(value) in self._shared:
            return value
        if not _is_large(value):
            trial = ChainMap[Any, Any]({}, memo, self._shared)  # of a copy that fails nothing remains
            try:
                result = copy.deepcopy(value, trial)  # type: ignore[arg-type]
            except Exception:  # methods of the user's may do anything
                result = value
            else:
                # what `deepcopy` keeps alive stays alive, but not under the id of `trial`, which another object may get
                alive = trial.maps[0].pop(id(trial), None)
                memo.update({**trial.maps[0], f"alive {len(memo)}": alive})
                return result
        self._shared[id(value)] = self.stuck[name] = value
        return value

    def put_back(self) -> None:
        """Put the originals back, and the states of the generators of Python and NumPy."""
        for _, held, before in self._scopes:
            _write(held, before)
        self.rewind_generators()

    def rewind_generators(self) -> None:
        """Put back the states of the generators of Python and NumPy, and of the copies of those in attributes."""
        for generator, state in zip(self._generators, self._states, strict=True):
            (generator.set_state if isinstance(generator, torch.Generator) else generator.__setstate__)(state)

    def generator_states(self) -> list[bytes]:
        """Return values that tell the states of these generators apart."""
        states = map(_state_of, self._generators)  # equal tensors may be pickled differently
        return [pickle.dumps(each.tolist() if torch.is_tensor(each) else each) for each in states]

    def lost(self) -> list[str]:
        """Name parameters that were written to although they are no copies, and iterators that cannot be copied."""
        written = [name for name, (each, version) in self._versions.items() if each._version != version]
        return sorted({*written, *(name for name, each in self.stuck.items() if isinstance(each, Iterator))})

    def values(self, with_entries: bool = False) -> dict[str, Any]:
        """Return the present numbers, tensors and lengths of lists by name; or all values that can be compared."""
        seen = set(self._shared)
        values: dict[str, Any] = {}
        for name, held, _ in self._scopes:
            for key in list(held):
                values |= leaves(_inner(name, key), held[key], seen, with_entries)
        return values


def leaves(name: str, value: Any, seen: set[int], with_entries: bool) -> dict[str, Any]:
    """Return all comparable values that a value holds, by name, with copies of tensors; skip those that were `seen`."""
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not (value.is_meta or value.is_nested or value.is_quantized)
        is_kept = is_dense and _bytes_of(value) <= _MOST_BYTES and id(value) not in seen
        return {name: value.detach().clone()} if is_kept else {}
    if isinstance(value, _PLAIN):
        return {name: value} if with_entries or type(value) in (int, float) else {}
    if id(value) in seen:
        return {}
    seen.add(id(value))
    found = {name: len(value)} if isinstance(value, list) or (with_entries and isinstance(value, _SEQUENCES)) else {}
    held = value if isinstance(value, dict) else vars(value) if _is_space(value) else {}
    if with_entries and isinstance(value, _SEQUENCES) and len(value) <= _MOST_ENTRIES:
        held = dict(enumerate(value))
    for key in list(held):
        found |= leaves(_inner(name, key), held[key], seen, with_entries)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name the differences between two results of `KeptState.values`."""
    names = {*before, *after}
    return sorted(name for name in names if not same(before.get(name, names), after.get(name, names)))


def same(one: Any, other: Any) -> bool:
    """Return whether two values are alike; for tensors, whether all bits are, also in NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        bits = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        return is_alike and torch.equal(*bits)
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _write(held: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a dict these values, without emptying it in between: it may belong to a module."""
    for key in [key for key, value in values.items() if held.get(key, held) is not value]:
        held[key] = values[key]
    for key in held.keys() - values.keys():
        del held[key]


def _is_large(value: Any) -> bool:
    """Return whether a value, or one in it, is too large for a copy: a memory map, another model."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    for each in entries if len(entries) <= _MOST_BYTES else ():
        tensors = (each, *each.parameters()) if isinstance(each, nn.Module) else (each,)
        if isinstance(each, np.memmap) or sum(map(_bytes_of, tensors)) > _MOST_BYTES:
            return True
    return False


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else getattr(value, "nbytes", 0)


def _is_space(value: Any) -> bool:
    """Return whether a value is a module, or another object in whose attributes a layer keeps state."""
    if isinstance(value, (nn.Module, SimpleNamespace, Namespace)):
        return True
    return hasattr(value, "__dict__") and is_the_users(type(value)) and not isinstance(value, _PLAIN)


def _state_of(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.__getstate__()


def _inner(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def is_the_users(owner: Any) -> bool:
    """Return whether a class or a function comes from the user, not from a package that the engine is made of."""
    module = str(getattr(owner, "__module__", ""))
    return module == "__main__" or module.split(".")[0] not in _NOT_THE_USERS


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses, and the functions within it."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


_GLOBAL_GENERATORS = (random.seed.__self__, np.random.get_state.__self__)  # type: ignore[attr-defined]
_FUNCTIONS = [f for kind in (PipelineModule, PartedModule) for f in vars(kind).values() if isinstance(f, FunctionType)]
OF_DEEPSPEED = {name for f in _FUNCTIONS for name in names_in(f.__code__)} - {"loss_fn", "_modules", "_buffers"}
