"""Find the first number of a step that is not finite (`"check_finite": "every_step"`), by the place where it arose.

NaN spreads to everything that is computed from it, so a loss of NaN does not show its cause. For each slice, hooks
check every layer's outputs and the gradients of its inputs. The loss, the gradients in the slice store and the
parameters' gradients are checked as well. The extremes of each tensor stay on its device, and the host reads them once,
when the backwards of the batch are done. Then all ranks raise the same error, before anything is reduced or updated. It
names the place that no other place has caused. With a dynamic loss scale gradients may overflow, and are not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from terapipe_ds.attention import ActiveSlice, active_slice
from terapipe_ds.attention.carry.states import CarriedEntry
from terapipe_ds.attention.slice_store import SliceEntry, SliceStore
from terapipe_ds.runtime.agreement import RaisedEverywhere, exchange, largest
from terapipe_ds.runtime.layers.gradient_sums import GradientSums
from terapipe_ds.runtime.layout.layer_names import module_of
from terapipe_ds.runtime.layout.parted_module import each_part, parameters_of_part


class NonFiniteError(ValueError):
    """Say that a step computed NaN or infinity; raised on every rank, before the step has changed anything."""


@dataclass(frozen=True)
class Look:
    """Hold the extremes of a tensor of a slice, not yet read; `layer` is a title like `layer 3 (DecoderLayer)`."""

    active: ActiveSlice
    layer: str
    what: str
    is_backward: bool
    extremes: tuple[Tensor, Tensor]

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Return the sort key that puts causes before effects: in the backward, slices and parts come in reverse."""
        active, sign = self.active, -1 if self.is_backward else 1
        return self.is_backward, active.micro_batch_id, sign * active.slice_id, sign * active.part_id

    def __str__(self) -> str:
        active = self.active
        return (
            f"{self.layer}, micro-batch {active.micro_batch_id}, slice {active.slice_id} (tokens [{active.start}, "
            f"{active.stop}) of {active.sequence_length}), {'backward' if self.is_backward else 'forward'}: {self.what}"
        )


class FiniteCheck:
    """Check one stage; `world` is a group of all ranks on the CPU, None for a single rank.

    `gradients` are checked unless the loss scale is dynamic. With `collected` the optimizer collects them by hooks,
    unless it has `sums`: then they are in these. Products of several slices that are joined come with the last.
    """

    def __init__(
        self,
        module: PipelineModule,
        store: SliceStore,
        stage_id: int,
        world: Any,
        gradients: bool,
        collected: bool,
        sums: GradientSums | None = None,
    ) -> None:
        self._module, self._store, self._stage_id, self._world = module, store, stage_id, world
        # with sums a hook would keep products from being joined, and change numbers
        self._gradients, self._collected, self._sums = gradients, collected and sums is None, sums
        self._looks: list[Look] = []
        self._parameters: dict[nn.Parameter, tuple[str, str]] = {}  # its layer, and the name of its gradient

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep hooks on the layers, and wrap those that are functions, while the actions of a batch run."""
        # functions have no hooks, so functions that check replace them
        parts, owners = [], []
        for _ in each_part(self._module):
            layers, start = self._module.forward_funcs, self._module._local_start
            own = [(layer_title(layer, start + index), layer) for index, layer in enumerate(layers)]
            parts.append([*layers])
            owners += own
            layers[:] = [self._watched(layer, name, layer is layers[-1]) for name, layer in own]
        # modules are hooked once, however many places they have
        handles = self._hook_modules(owners, [part[-1] for part in parts if part])
        self._parameters = _places_of_parameters([*owners, ("the pipeline module", self._module)])
        # check gradients that the store gathers, or that an optimizer takes at once, where they arise
        if self._gradients:
            self._store.on_gradients = self._look_at_accumulators
            self._store.carried.on_gradient = self._look_at_state
            if self._collected:
                handles += [p.register_hook(self._hook(*place)) for p, place in self._parameters.items()]
        try:
            yield
        finally:
            for chunk_id in each_part(self._module):
                self._module.forward_funcs[:] = parts[chunk_id]
            self._store.on_gradients = self._store.carried.on_gradient = None
            for handle in handles:
                handle.remove()
            self._looks.clear()

    def _hook_modules(self, owners: Sequence[tuple[str, Any]], last: Sequence[Any]) -> list[RemovableHandle]:
        """Put hooks on the layers that are modules; one at several places has several titles."""
        names: dict[nn.Module, str] = {}
        for name, layer in owners:
            if isinstance(layer, nn.Module):
                names[layer] = f"{names[layer]} or {name}" if layer in names else name
        handles = []
        for module, name in names.items():
            before, after = self._hooks(name, any(module is other for other in last))
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        return handles

    def _watched(self, layer: Any, name: str, is_last: bool) -> Any:
        """Return a module unchanged, and a function wrapped with the checks of the hooks."""
        if isinstance(layer, nn.Module):
            return layer
        before, after = self._hooks(name, is_last)

        def run(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
            before(None, args)
            outputs = function(*args, **keywords)
            after(None, args, outputs)
            return outputs

        base = layer if isinstance(layer, functools.partial) else functools.partial(layer)
        return functools.partial(run, base.func, *base.args, **base.keywords)

    def _hooks(self, name: str, is_last: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks before and after the forward of a layer; with `is_last` its outputs are sent on."""

        def look_at_gradients(tensors: dict[str, Tensor], what: str) -> None:
            for which, tensor in tensors.items() if torch.is_grad_enabled() and self._gradients else ():
                if tensor.requires_grad:
                    tensor.register_hook(self._hook(name, f"the gradient {what}{which}"))

        def before(layer: object, args: tuple[Any, ...]) -> None:
            look_at_gradients(_tensors(args), "of its input")

        def after(layer: object, args: tuple[Any, ...], outputs: Any) -> None:
            active, inputs, results = active_slice(), _tensors(args), _tensors((outputs,))
            for index, (which, tensor) in enumerate(results.items()):
                # tensors that are handed on are not computed here; later ones without a gradient may be masks
                is_own = not any(tensor is other for other in inputs.values())
                has_numbers = tensor.is_floating_point() or tensor.is_complex()
                is_looked_at = is_own and has_numbers and (index == 0 or tensor.requires_grad)
                if active is not None and active.mode == "train" and is_looked_at:
                    self.look(name, f"its output{which}", tensor)
            if is_last:
                look_at_gradients(results, "that comes to its output")

        return before, after

    def _hook(self, layer: str, what: str) -> Callable[[Tensor], None]:
        return functools.partial(self.look, layer, what, is_backward=True)

    def look(self, layer: str, what: str, tensor: Tensor, is_backward: bool = False) -> None:
        """Keep the extremes of `tensor`, a result of the running slice."""
        active, numbers = active_slice(), tensor.detach()
        if numbers.is_sparse:  # the gradient of an embedding
            numbers = numbers._values()  # noqa: SLF001  # `values` refuses rows that come more than once
        if numbers.is_complex():
            numbers = torch.view_as_real(numbers.resolve_conj())
        if active is not None and numbers.numel() and numbers.layout is torch.strided:
            self._looks.append(Look(active, layer, what, is_backward, torch.aminmax(numbers)))

    def look_at_parameters(self) -> None:
        """Check the parameters' gradients after the backward of the running slice."""
        if self._gradients and not self._collected:
            active = {id(parameter) for parameter in parameters_of_part(self._module)}
            for parameter, (layer, what) in self._parameters.items():
                gradient = parameter.grad if self._sums is None else self._sums.so_far(parameter)
                if gradient is not None and id(parameter) in active:
                    self.look(layer, what, gradient, is_backward=True)

    def _look_at_accumulators(self, entry: SliceEntry, stop: int) -> None:
        start, gradients = entry.accumulated(stop)
        for grads, name in zip(gradients, ("dK", "dV"), strict=True):
            what = f"the accumulated {name} of tokens [{start}, {stop})"
            self.look(f"attention layer {entry.layer!r}", what, grads, is_backward=True)

    def _look_at_state(self, entry: CarriedEntry, token: int, gradient: Tensor) -> None:
        what = f"the gradient of the state {entry.name!r} at token {token}"
        self.look(f"layer {entry.layer!r}", what, gradient, is_backward=True)

    def agree(self, step: int) -> None:
        """Raise NonFiniteError on every rank if one has found a problem. A collective, after the last backward."""
        # the host waits for the device here, once per batch
        texts = zip(self._looks, _problems(self._looks), strict=True)
        places = [(look.order, f"stage {self._stage_id}, {look} {problem}") for look, problem in texts if problem]
        own = min(places, key=lambda place: place[0], default=None)  # the first result of one slice
        self._looks.clear()
        # most steps need one number alone
        firsts = exchange(own, self._world) if largest(own is not None, self._world) else []
        # the order puts causes first, also over ranks
        ranks = sorted((place[0], rank, place[1]) for rank, place in enumerate(firsts) if place is not None)
        if not ranks:
            return
        (_, rank, first), *others = ranks
        came = f" From there it came to ranks {sorted(rank for _, rank, _ in others)} as well." if others else ""
        text = (
            f"step {step} computed a number that is not finite (terapipe.check_finite). The first place, on rank "
            f"{rank}: {first}. What it was computed from is finite, unless a parameter is not: look at what this place "
            f"does with these tokens.{came} Nothing was updated in this step; on all ranks a caller who catches this "
            "error may go on with the next batch."
        )
        raise RaisedEverywhere(NonFiniteError(text))


def _places_of_parameters(owners: Sequence[tuple[str, Any]]) -> dict[nn.Parameter, tuple[str, str]]:
    """Return for each trained parameter the first layer that has it, and the name of its gradient."""
    places: dict[nn.Parameter, tuple[str, str]] = {}
    for owner, layer in owners:
        of_layer = module_of(layer)
        for name, parameter in () if of_layer is None else of_layer.named_parameters():
            if parameter.requires_grad:
                places.setdefault(parameter, (owner, f"the gradient of its parameter {name}"))
    return places


def _tensors(args: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors among arguments or results, with " 0", " 1" if there are several."""
    values = [value for arg in args for value in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {f" {index}" if len(tensors) > 1 else "": tensor for index, tensor in enumerate(tensors)}


def _problems(looks: Sequence[Look]) -> list[str]:
    """Return the problem of the tensor in each look, "" without one; read from the device once per dtype."""
    problems = [""] * len(looks)
    kinds = [(look.extremes[0].dtype, look.extremes[0].device) for look in looks]
    for kind in set(kinds):
        indices = [index for index, entry in enumerate(kinds) if entry == kind]
        extremes = torch.stack([entry for index in indices for entry in looks[index].extremes]).view(-1, 2).cpu()
        for row in (~torch.isfinite(extremes)).any(dim=1).nonzero().flatten().tolist():
            problems[indices[row]] = "has NaN" if extremes[row].isnan().any() else "is infinite somewhere"
    return problems


def layer_title(layer: Any, index: int) -> str:
    """Return `layer 3 (DecoderLayer)`; for tied layers and plain functions, with the function's name."""
    if isinstance(layer, functools.partial):
        layer = layer.func
    kind = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)
    return f"layer {index} ({kind})"
