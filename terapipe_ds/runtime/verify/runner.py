"""One layer, run on whole sequences and on slices, forward and backward, as the engine runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import Tensors, as_tuple

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Values:
    """What goes into a layer or comes out: detached, each telling whether it requires a gradient."""

    tensors: Tensors
    is_tuple: bool

    def with_tensors(self, tensors: Sequence[Tensor]) -> Values:
        return Values(tuple(tensors), self.is_tuple)


NOTHING = Values((), False)


@dataclass
class Ran:
    """A forward: the leaves that went in, what came out with its graph, and the slice that was active."""

    active: ActiveSlice
    leaves: Tensors
    outputs: Tensors
    is_tuple: bool

    def values(self) -> Values:
        return Values(
            tuple(t.detach().requires_grad_(t.requires_grad) for t in self.outputs), self.is_tuple
        )


@dataclass(frozen=True)
class NamedLayer:
    """A layer of a pipeline: its place among all layers, what it is called, and how it is called."""

    layer_id: int
    function: Callable[[Any], Any]

    @property
    def module(self) -> nn.Module | None:
        """What holds its parameters; None for a plain function."""
        function = self.function
        while isinstance(function, functools.partial):  # a tied layer with a forward_fn
            modules = [a for a in function.args if isinstance(a, nn.Module)]
            if modules:
                return modules[0]
            function = function.func
        return function if isinstance(function, nn.Module) else None

    @property
    def name(self) -> str:
        """The class of the layer."""
        if self.module is not None:
            return type(self.module).__name__
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __str__(self) -> str:
        return f"layer {self.layer_id} ({self.name})"


@dataclass
class Runner:
    """Runs layers of ``module`` (the stage) with ``plan``. Use it inside ``untouched(module)``.

    Args:
        checkpoint: DeepSpeed's activation checkpointing, for layers that training checkpoints.
        autocast: a context in which the engine runs the layers.
    """

    module: nn.Module
    plan: SlicePlan
    part_id: int = 0
    checkpoint: Callable[..., Any] | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    store: SliceStore = field(default_factory=SliceStore)

    def whole_sequence(self, length: int | None = None) -> ActiveSlice:
        """A sequence of ``length`` tokens (None: that of the plan) in one slice."""
        length = self.plan.sequence_length if length is None else length
        return ActiveSlice(start=0, stop=length, sequence_length=length, part_id=self.part_id, store=self.store)

    def slice(self, slice_id: int) -> ActiveSlice:
        start, stop = self.plan.span(slice_id)
        return ActiveSlice(
            start=start, stop=stop, sequence_length=self.plan.sequence_length, slice_id=slice_id,
            part_id=self.part_id, store=self.store,
        )  # fmt: skip

    def forward(self, layer: NamedLayer, inputs: Values, active: ActiveSlice) -> Ran:
        """F of one layer on one slice."""
        leaves = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs.tensors)
        copies = tuple(leaf.clone() for leaf in leaves)  # a layer may work in place
        with push_slice(active), self.autocast():
            if self.checkpoint is None:
                outputs = layer.function(copies if inputs.is_tuple else copies[0])
            else:
                outputs = self.checkpoint(functools.partial(_unpacked, layer.function), *copies)
        return Ran(active, leaves, as_tuple(outputs, "the outputs of a layer"), not torch.is_tensor(outputs))

    def backward(self, ran: Ran, gradients: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
        """B: the gradients of the leaves. ``gradients``: of the outputs, by index."""
        used = [i for i in gradients if ran.outputs[i].requires_grad]
        if used:
            with push_slice(ran.active.replace(mode="recompute")):
                torch.autograd.backward([ran.outputs[i] for i in used], [gradients[i] for i in used])
        ran.outputs = ()
        return tuple(leaf.grad for leaf in ran.leaves)

    @contextmanager
    def fresh_store(self) -> Iterator[None]:
        """For a probe: slices run again from the first one."""
        store, self.store = self.store, SliceStore()
        try:
            yield
        finally:
            self.store = store


def _unpacked(function: Callable[[Any], Any], *inputs: Tensor) -> Any:
    """As ``PipelineModule`` calls the layers of a checkpointed range."""
    return function(inputs[0] if len(inputs) == 1 else inputs)


class ParameterGradients:
    """The gradients that backwards leave in the parameters of ``module``. Those in half precision are added up in fp32,
    as DeepSpeed's optimizers do: their own rounding would hide faults."""

    def __init__(self, module: nn.Module) -> None:
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._sums: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> ParameterGradients:
        for name, parameter in self._named:
            parameter.grad = None
            if parameter.dtype in HALF:
                hook = functools.partial(self._add, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        return self

    def _add(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        fresh = parameter.grad.float()
        self._sums[name] = self._sums[name] + fresh if name in self._sums else fresh
        parameter.grad = None

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for _, parameter in self._named:
            parameter.grad = None

    def take(self) -> dict[str, Tensor]:
        """By name, of the parameters that got any; they begin at nothing again."""
        for name, parameter in self._named:
            if parameter.grad is not None:
                self._sums[name] = parameter.grad.detach()
                parameter.grad = None
        sums, self._sums = self._sums, {}
        return sums


def random_state(module: nn.Module) -> list[Tensor]:
    """All random states that a layer may draw from, to see whether it did."""
    trackers = [ds_checkpointing.get_cuda_rng_tracker(), *getattr(module, "rng_trackers", ())]
    states = [torch.get_rng_state()]
    if not get_accelerator().is_synchronized_device():
        states.append(get_accelerator().get_rng_state().cpu())
    for tracker in trackers:
        states += [state.cpu() for state in tracker.get_states().values() if torch.is_tensor(state)]
    return [state.clone() for state in states]


def drew(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether random numbers were drawn between two :func:`random_state`."""
    return len(before) != len(after) or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
