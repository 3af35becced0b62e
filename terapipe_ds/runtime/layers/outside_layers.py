"""Find in the first batch state that trains or changes outside the layers of a `PipelineModule`: nothing sums it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from terapipe_ds.runtime.layers.kept_state import OF_DEEPSPEED, KeptState, changes, leaves, names_in, same
from terapipe_ds.runtime.layers.sliceable import first_four
from terapipe_ds.runtime.layout.layer_names import layer_of_parameter


class OutsideLayers:
    """Remember, before the first training batch, the state that `module` holds outside its layers.

    The engine trains a loss module, sums it over its copies and saves it. It does so with nothing else outside layers.

    Args:
        has_copies: two stages compute the loss, each of half the micro-batches.
        is_whole: nothing is cut.
        trainer: objects that the engine changes, and the loss may reach.
    """

    def __init__(self, module: Any, has_copies: bool, is_whole: bool, trainer: Iterable[object]) -> None:
        self._module, self._has_copies, self._sees_parts = module, has_copies, has_copies or not is_whole
        self._buffers = {name: each.detach().clone() for name, each in _outside(module.named_buffers())}
        layers = (each for name, each in module.named_modules() if name and layer_of_parameter(name) is not None)
        stock = (each for name, each in vars(module).items() if name in OF_DEEPSPEED)
        self._state = KeptState({"": module} if has_copies else {}, apart=(*trainer, *layers, *stock))
        self._before = self._values()

    def _values(self) -> dict[str, Any]:
        """Return the module's state, and the globals that a loss function names."""
        values, loss_fn = self._state.values(with_entries=True), self._module.loss_fn
        for key in names_in(loss_fn.__code__) if self._has_copies and isinstance(loss_fn, FunctionType) else ():
            values |= leaves(f"global variable {key}", loss_fn.__globals__.get(key), set(), with_entries=True)
        return values

    def problem(self, has_gradient: Callable[[Any], bool]) -> str | None:
        """Return an error about state that this rank alone trains or changes; None if there is none."""
        named = [(n, p) for n, p in _outside(self._module.named_parameters()) if not n.startswith("loss_fn.")]
        if trained := [name for name, each in named if each.requires_grad and has_gradient(each)]:
            return (
                f"{first_four(trained)}: a parameter of the PipelineModule that is in no layer has a gradient. Each "
                "stage would train its own copy, and no checkpoint would have it: move it into a layer, or into a "
                "loss_fn that is an nn.Module"
            )
        now = dict(self._module.named_buffers())
        changed = [n for n, each in self._buffers.items() if n not in now or not same(each, now[n])]
        if changed and self._sees_parts:
            return (
                f"{first_four(changed)}: a buffer outside the layers changes in the first batch. Each call of loss_fn "
                "sees one slice of a sequence, and under chimera runs on one of two stages: keep no statistics there, "
                'or set terapipe.slices to 1 and schedule to "1f1b"'
            )
        reads = getattr(self._module.get_additional_losses, "__code__", None)  # after each call, on both stages
        told = {"reported"} | (set() if reads is None else names_in(reads) - {"loss_fn"})
        changed = [name for name in changes(self._before, self._values()) if told.isdisjoint(name.split("."))]
        if kept := [name for name in changed if name.split(".")[0] not in OF_DEEPSPEED]:
            return (
                f"{first_four(kept)}: state outside the layers changes in the first batch. Under chimera two stages "
                "compute the loss, each of half the micro-batches, and neither sees the state of the other: keep it in "
                "the training loop, or take a schedule other than chimera and chimera-seq"
            )
        return None


def _outside(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in named if layer_of_parameter(name) is None]
