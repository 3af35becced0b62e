"""Run the layers of a stage, forward and backward, without leaving a trace of it.

Measurements happen on the very layers that train. Inside `untouched` the layers work on stand-ins: the same weights in
memory, but other `Parameter` objects, with gradients of their own and without the hooks by which optimizers gather
gradients. Buffers, other attributes and random numbers are put back afterwards.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn

from terapipe_ds.runtime.layout.stock_partition import random_states_kept


@contextmanager
def untouched(module: nn.Module, accumulates_in_fp32: bool = False, with_gradients: bool = True) -> Iterator[None]:
    """Put parameters, gradients, buffers and random numbers back after measurements on `module`.

    Autograd records inside, also where the caller evaluates without gradients: a backward has to be measured.

    With `accumulates_in_fp32` each backward adds its gradients to fp32 sums and drops them, as optimizers for half
    precision may do. With `with_gradients` they begin as zeros, to which a backward adds as that of a later slice does;
    otherwise as None, and hooks that change the gradient of a parameter do so here as well.
    """
    with torch.inference_mode(False), torch.enable_grad():
        trackers = ds_checkpointing.get_cuda_rng_tracker(), *getattr(module, "rng_trackers", ())
        stand_ins = _stand_ins(module, accumulates_in_fp32, with_gradients)
        with random_states_kept(), _same_trackers(trackers), _same_state(module), stand_ins:
            yield


@contextmanager
def _same_trackers(trackers: Iterable[Any]) -> Iterator[None]:
    """Put back the random states of `trackers`, from which tensor-parallel layers draw for dropout."""
    before = [(tracker, {name: s.clone() for name, s in tracker.get_states().items()}) for tracker in trackers]
    try:
        yield
    finally:
        for tracker, states in before:
            tracker.set_states(states)


@contextmanager
def _same_state(module: nn.Module) -> Iterator[None]:
    """Put back what the layers, plain functions and the loss keep, such as a mask remembered from the first forward."""
    before = _Before()
    for owner in (*module.modules(), *getattr(module, "forward_funcs", ()), getattr(module, "loss_fn", None)):
        before.remember(getattr(owner, "__dict__", None))
    module.train()
    try:
        yield
    finally:
        before.put_back()


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque, tuple)


class _Before:
    """The former contents of containers and values of tensors. Other objects go back to their places as they are."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}  # by identity: several modules may share one
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def remember(self, value: Any) -> None:
        """Remember `value` and what it contains; a kind of object that is not known is passed over."""
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta:
            self._tensors[id(value)] = value, value.detach().to("cpu", copy=True)
        elif type(value) in _CONTAINERS and id(value) not in self._containers:
            if type(value) is not tuple:
                self._containers[id(value)] = value, copy.copy(value)
            for each in value.values() if isinstance(value, dict) else value:
                self.remember(each)

    def put_back(self) -> None:
        for container, before in self._containers.values():
            if isinstance(container, dict):
                container.update(before)  # never empty in between: it may be that of a module
                for key in [key for key in container if key not in before]:
                    del container[key]
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(before)
        with torch.no_grad():
            for tensor, before in self._tensors.values():
                if not torch.equal(_bytes(tensor), _bytes(before)):  # memory that is not changed may be read-only
                    tensor.copy_(before)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _stand_ins(module: nn.Module, accumulates_in_fp32: bool, with_gradients: bool) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    originals = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    stand_ins = {id(p): _stand_in(p, accumulates_in_fp32, with_gradients) for p, _ in gradients}
    try:
        for parameter, _ in gradients:
            parameter.grad = None  # a layer that keeps a reference of its own leaves its gradient here
        for owner, name, parameter in originals:
            owner[name] = stand_ins[id(parameter)]
        yield
    finally:
        for owner, name, parameter in originals:
            owner[name] = parameter
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _stand_in(parameter: nn.Parameter, accumulates_in_fp32: bool, with_gradients: bool) -> nn.Parameter:
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not torch.is_tensor(value):  # marks such as `model_parallel`; not a main gradient
            setattr(stand_in, name, value)
    if not parameter.requires_grad:
        return stand_in
    if not with_gradients:
        for hook in (parameter._backward_hooks or {}).values():  # they change gradients: those of slices otherwise
            stand_in.register_hook(hook)
    elif accumulates_in_fp32:
        total = torch.zeros_like(parameter, dtype=torch.float32)

        def accumulate(fresh: torch.Tensor) -> None:
            if fresh.grad is not None:
                total.add_(fresh.grad)
                fresh.grad = None

        stand_in.register_post_accumulate_grad_hook(accumulate)
    else:
        stand_in.grad = torch.zeros_like(parameter)
    return stand_in
