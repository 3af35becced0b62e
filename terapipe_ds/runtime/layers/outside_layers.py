"""Find in the first batch what trains or changes outside the layers of a `PipelineModule`, where nothing sums it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from deepspeed.pipe import PipelineModule

from terapipe_ds.runtime.layers.kept_state import KeptState, names_in, same_bytes
from terapipe_ds.runtime.layers.sliceable import first_four
from terapipe_ds.runtime.layout.layer_names import layer_of_parameter
from terapipe_ds.runtime.layout.parted_module import PartedModule

_FUNCTIONS = [f for kind in (PipelineModule, PartedModule) for f in vars(kind).values() if isinstance(f, FunctionType)]
_OF_DEEPSPEED = {name for f in _FUNCTIONS for name in names_in(f.__code__)} - {"loss_fn", "_modules", "_buffers"}


class OutsideLayers:
    """Remember, before the first training batch, what `module` holds outside its layers.

    A loss module is trained, summed over its copies and saved; nothing else outside the layers is.

    Args:
        has_copies: two stages compute the loss, each of half the micro-batches.
        is_whole: nothing is cut.
        trainer: objects that the engine changes, and the loss may reach.
    """

    def __init__(self, module: Any, has_copies: bool, is_whole: bool, trainer: Iterable[object]) -> None:
        self._module, self._sees_parts = module, has_copies or not is_whole
        self._buffers = {name: each.detach().clone() for name, each in _outside(module.named_buffers())}
        layers = (each for name, each in module.named_modules() if not name or layer_of_parameter(name) is not None)
        stock = (each for name, each in vars(module).items() if name in _OF_DEEPSPEED)
        self._state = KeptState({"": vars(module)} if has_copies else {}, apart=(*trainer, *layers, *stock))

    def problem(self, has_gradient: Callable[[Any], bool]) -> str | None:
        """Return an error about what this rank alone trains or changes; None if there is nothing."""
        named = [(n, p) for n, p in _outside(self._module.named_parameters()) if not n.startswith("loss_fn.")]
        if trained := [name for name, each in named if each.requires_grad and has_gradient(each)]:
            return (
                f"{first_four(trained)}: a parameter of the PipelineModule that is in no layer has a gradient. Each "
                "stage would train its own copy, and no checkpoint would have it: move it into a layer, or into a "
                "loss_fn that is an nn.Module"
            )
        now = dict(self._module.named_buffers())
        changed = [n for n, each in self._buffers.items() if n not in now or not same_bytes(each, now[n])]
        if changed and self._sees_parts:
            return (
                f"{first_four(changed)}: a buffer outside the layers changes in the first batch. Each call of loss_fn "
                "sees one slice of a sequence, and under chimera runs on one of two stages: keep no statistics there, "
                'or set terapipe.slices to 1 and schedule to "1f1b"'
            )
        reads = getattr(self._module.get_additional_losses, "__code__", None)  # after each call, on both stages
        told = {"reported"} | (set() if reads is None else names_in(reads) - {"loss_fn"})
        changed = [name for name in self._state.changed() if told.isdisjoint(name.split("."))]
        if kept := [name for name in changed if name.split(".")[0] not in _OF_DEEPSPEED]:
            return (
                f"{first_four(kept)}: state outside the layers changes in the first batch. Under chimera two stages "
                "compute the loss, each of half the micro-batches, and neither sees the state of the other: keep it in "
                "the training loop, or take a schedule other than chimera and chimera-seq"
            )
        return None


def _outside(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in named if layer_of_parameter(name) is None]
