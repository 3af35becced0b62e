"""``"check_finite": "every_step"``: the first number of a step that is not finite, by the place where it arose.

NaN spreads to everything that is computed from it, so that a loss of NaN says nothing of its cause. While this check is
on, every layer's outputs and the gradients of its inputs are looked at for each slice, and so are the loss, the
gradients of keys and values in the slice store, and the parameters' gradients. Nothing waits for a device in between:
the extremes of each tensor are kept where it is, and read once, when the backwards of the batch are done. Then all
ranks raise the same error, which names the place that no other one has caused, before anything is reduced or updated.

With a dynamic loss scale a gradient that overflows is how the scale is found: gradients are the optimizer's business
then, which skips the step, and only what the forward computes is looked at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, active_slice
from terapipe_ds.attention.slice_store import SliceEntry, SliceStore
from terapipe_ds.runtime.agreement import RaisedEverywhere, gather, on_any_rank
from terapipe_ds.runtime.parted import each_part, module_of, parameters_of_other_parts, replace_layers


class NonFiniteError(ValueError):
    """A step computed NaN or infinity; raised on every rank, before the step has changed anything."""


@dataclass(frozen=True)
class Finding:
    """Where a number stands that is not finite. ``layer`` as ``layer 3 (DecoderLayer)``, 3 counted over all stages."""

    stage_id: int
    layer: str
    micro_batch_id: int
    slice_id: int
    start: int
    stop: int
    sequence_length: int
    is_backward: bool
    what: str
    part_id: int
    hint: str = ""

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """What sorts first cannot follow from what sorts later: a backward follows from forwards, a slice's forward
        from earlier parts and slices, its backward from later ones."""
        sign = -1 if self.is_backward else 1
        return self.is_backward, self.micro_batch_id, sign * self.slice_id, sign * self.part_id

    def __str__(self) -> str:
        return (
            f"stage {self.stage_id}, {self.layer}, micro-batch {self.micro_batch_id}, slice {self.slice_id} (tokens "
            f"[{self.start}, {self.stop}) of {self.sequence_length}), {'backward' if self.is_backward else 'forward'}: "
            f"{self.what}"
        )


@dataclass(frozen=True)
class _Look:
    """The extremes of a tensor, not read yet."""

    active: ActiveSlice
    layer: str
    is_backward: bool
    what: str
    extremes: tuple[Tensor, Tensor]


class FiniteCheck:
    """The check of one stage; one per engine.

    Args:
        module: the stage's ``PipelineModule``.
        world: a group of all ranks on the CPU; None for a single rank.
        gradients: False where the loss scale is dynamic.
        collected: the optimizer collects gradients by hooks, and ``.grad`` does not hold those of the whole batch.
    """

    def __init__(
        self, module: Any, store: SliceStore, stage_id: int, world: Any, gradients: bool, collected: bool
    ) -> None:
        self._module, self._store = module, store
        self._stage_id, self._world = stage_id, world
        self._gradients, self._collected = gradients, collected
        self._looks: list[_Look] = []

    # -- looking ------------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the actions of a batch."""
        parts, names, handles = [], [], []
        for _ in each_part(self._module):
            layers, start = self._module.forward_funcs, self._module._local_start
            mine = [layer_name(layer, start + index) for index, layer in enumerate(layers)]
            parts.append(layers)
            names += mine
            last = len(layers) - 1
            watched = [_WatchedLayer(layers[i], mine[i], self, is_last=i == last) for i in range(len(layers))]
            replace_layers(self._module, watched)
        self._parameters = dict(_parameters_of(self._module, [layer for part in parts for layer in part], names))
        self._looks.clear()
        if self._gradients:
            self._store.on_gradients = self._look_at_accumulators
            if self._collected:
                handles = [p.register_hook(self._hook(*place)) for p, place in self._parameters.items()]
        try:
            yield
        finally:
            for chunk_id in each_part(self._module):
                replace_layers(self._module, parts[chunk_id])
            self._store.on_gradients = None
            for handle in handles:
                handle.remove()
            self._looks.clear()

    def look(self, layer: str, what: str, tensor: Tensor, is_backward: bool = False) -> None:
        """Keep the extremes of ``tensor``, a result of the slice that is running."""
        active = active_slice()
        if active is not None and tensor.numel() and tensor.layout is torch.strided:
            extremes = torch.aminmax(tensor.detach())
            self._looks.append(_Look(active, layer, is_backward, what, (extremes.min, extremes.max)))

    def look_at_loss(self, loss: Any) -> None:
        """The weighted loss of the slice that is running, on the last stage; or several, in a list."""
        for each in [loss] if torch.is_tensor(loss) else loss:
            self.look("the loss function", "the loss", each)

    def look_at_parameters(self) -> None:
        """After the backward of the slice that is running: what its parameters' gradients have become."""
        if self._gradients and not self._collected:
            others = {id(parameter) for parameter in parameters_of_other_parts(self._module)}
            for parameter, (layer, what) in self._parameters.items():
                if parameter.grad is not None and id(parameter) not in others:
                    self.look(layer, what, parameter.grad, is_backward=True)

    def look_at_gradient_of(self, tensor: Any, layer: str, what: str) -> None:
        """As soon as ``tensor`` has its gradient."""
        if self._gradients and torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(self._hook(layer, what))

    def _hook(self, layer: str, what: str) -> Callable[[Tensor], None]:
        return functools.partial(self.look, layer, what, is_backward=True)

    def _look_at_accumulators(self, entry: SliceEntry, stop: int) -> None:
        assert entry.grads is not None
        for grads, of in zip(entry.grads, ("dK", "dV"), strict=True):
            what = f"the accumulated {of} of tokens [0, {stop})"
            self.look(f"attention layer {entry.layer!r}", what, grads[:, :, :stop], is_backward=True)

    # -- judging ------------------------------------------------------------------------------------------------------

    def agree(self, step: int) -> None:
        """Compare all ranks, when all backwards of the batch are done. A collective over all ranks.

        Raises:
            NonFiniteError: on every rank, where one has found something.
        """
        mine = self._first()
        self._looks.clear()
        found = [mine]
        if self._world is not None:
            found = gather(mine, self._world) if on_any_rank(mine is not None, self._world) else []
        places = {rank: place for rank, place in enumerate(found) if place is not None}
        if places:
            raise RaisedEverywhere(NonFiniteError(_message(places, step)))

    def _first(self) -> Finding | None:
        """Of all that this rank has looked at, what nothing else has caused; of several the one computed first."""
        texts = _described(self._looks)
        places = [self._place(look, text) for look, text in zip(self._looks, texts, strict=True) if text]
        first = min(places, key=lambda place: place.order, default=None)
        return None if first is None else dataclasses.replace(first, hint=self._hint(first.layer))

    def _place(self, look: _Look, text: str) -> Finding:
        active = look.active
        return Finding(
            self._stage_id, look.layer, active.micro_batch_id, active.slice_id, active.start, active.stop,
            active.sequence_length, look.is_backward, f"{look.what} {text}", active.part_id,
        )  # fmt: skip

    def _hint(self, layer: str) -> str:
        bad = [
            what.removeprefix(_GRADIENT_OF)
            for parameter, (owner, what) in self._parameters.items()
            if owner == layer and not torch.isfinite(parameter).all()
        ]
        return f"Its {bad[0]} is not finite by itself: load an earlier checkpoint." if bad else ""


class _WatchedLayer:
    """A layer of the stage for the time of a batch. Everything but the call is the layer's own."""

    def __init__(self, layer: Any, name: str, check: FiniteCheck, is_last: bool) -> None:
        self._layer, self._name, self._check, self._is_last = layer, name, check, is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, inputs: Any) -> Any:
        given = _tensors(inputs)
        if torch.is_grad_enabled():
            for index, tensor in enumerate(given):
                what = f"the gradient of its input{_nth(index, given)}"
                self._check.look_at_gradient_of(tensor, self._name, what)
        outputs = self._layer(inputs)
        active = active_slice()
        is_first_run = active is not None and active.mode == "train"
        results = _tensors(outputs)
        for index, tensor in enumerate(results):
            if is_first_run and _is_computed(tensor, index, given):
                self._check.look(self._name, f"its output{_nth(index, results)}", tensor)
            if self._is_last and torch.is_grad_enabled():
                what = f"the gradient that comes to its output{_nth(index, results)}"
                self._check.look_at_gradient_of(tensor, self._name, what)
        return outputs


def _nth(index: int, tensors: Sequence[Tensor]) -> str:
    return f" {index}" if len(tensors) > 1 else ""


def _is_computed(tensor: Tensor, index: int, given: Sequence[Tensor]) -> bool:
    """Whether a layer has made this one. What it hands on is not its own, and what stands behind the first tensor and
    needs no gradient may be a mask, to which an infinity belongs."""
    if not tensor.is_floating_point() or any(tensor is each for each in given):
        return False
    return index == 0 or tensor.requires_grad


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each for each in values if torch.is_tensor(each)]


def _described(looks: Sequence[_Look]) -> list[str]:
    """For each look what is wrong with it, "" where nothing is. Reads from the device once per dtype."""
    texts = [""] * len(looks)
    kinds = {(look.extremes[0].dtype, look.extremes[0].device) for look in looks}
    for kind in kinds:
        indices = [i for i, look in enumerate(looks) if (look.extremes[0].dtype, look.extremes[0].device) == kind]
        extremes = torch.stack([each for i in indices for each in looks[i].extremes]).view(-1, 2)
        infinite = (~torch.isfinite(extremes)).any(dim=1).cpu()
        for place in infinite.nonzero().flatten().tolist():
            is_nan = bool(torch.isnan(extremes[place]).any())
            texts[indices[place]] = "has NaN" if is_nan else "is infinite somewhere"
    return texts


_GRADIENT_OF = "the gradient of its "


def _parameters_of(
    module: nn.Module, layers: Sequence[Any], names: Sequence[str]
) -> Iterator[tuple[nn.Parameter, tuple[str, str]]]:
    """Parameter -> the layer that it belongs to, and what its gradient is called."""
    seen: set[int] = set()
    owners = [*zip(names, map(module_of, layers), strict=True), ("the pipeline module", module)]
    for owner, part in owners:
        for name, parameter in [] if part is None else part.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, (owner, f"{_GRADIENT_OF}parameter {name}")


def layer_name(layer: Any, index: int) -> str:
    """``layer 3 (DecoderLayer)``; of tied layers and of plain functions the function's name."""
    if isinstance(layer, functools.partial):
        layer = layer.func
    kind = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)
    return f"layer {index} ({kind})"


def _message(places: dict[int, Finding], step: int) -> str:
    rank, first = min(places.items(), key=lambda item: (item[1].order, item[0]))
    others = f" From there it came to ranks {sorted(set(places) - {rank})} as well." if len(places) > 1 else ""
    cause = first.hint or "What it was computed from is finite: look at what this place does with these tokens."
    return (
        f"step {step} computed a number that is not finite (terapipe.check_finite). The first place, on rank {rank}: "
        f"{first}. {cause}{others} Nothing was updated in this step; on all ranks a caller who catches this error may "
        "go on with the next batch."
    )


def finite_check(engine: Any, world: Any) -> FiniteCheck | None:
    """The check of ``engine``, where its config asks for one. ``world``: a group of all ranks, on the CPU."""
    if engine.terapipe_config.check_finite == "off":
        return None
    return FiniteCheck(
        engine.module, engine.slice_store, engine.stage_id, world,
        gradients=not has_dynamic_loss_scale(engine),
        collected=isinstance(engine.optimizer, DeepSpeedOptimizer),
    )  # fmt: skip


def has_dynamic_loss_scale(engine: Any) -> bool:
    """True where overflowing gradients are expected: a step is skipped for them, and the scale is lowered."""
    if engine.torch_autocast_z0_gradscaler is not None:
        return True
    if getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None:
        return True
    return bool(engine.fp16_enabled() and engine.dynamic_loss_scale())
