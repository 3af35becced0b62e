"""A ``PipelineModule`` whose stages hold several parts of the layers, as DeepSpeed's ``DualPipeVModule`` holds two.

What makes one of a user's module is in ``laying_out``; here is what it does from then on, and what the rest of the
runtime asks of a module, whether its stages hold one part or several.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from terapipe_ds.attention import active_slice
from terapipe_ds.runtime.copies import copies_of, sum_gradients
from terapipe_ds.runtime.layout import Layout
from terapipe_ds.runtime.state_order import Name


@dataclass
class HeldPart:
    """The layers of one part on this stage, as ``PipelineModule`` keeps those of its only one."""

    start: int
    stop: int
    forward_funcs: list[Any]
    checkpointable: list[bool] = field(default_factory=list)
    fwd_map: dict[str, int] = field(default_factory=dict)


class PartedModule(PipelineModule):
    """The class of a module that was laid out, in front of its own; one part at a time is what ``forward`` runs."""

    terapipe_layout: Layout
    _held: list[HeldPart]  # by chunk
    _active_chunk: int

    def activate(self, chunk_id: int) -> None:
        """Let ``forward`` be that of the part at ``chunk_id``."""
        part = self._held[chunk_id]
        self._active_chunk = chunk_id
        self.forward_funcs, self.fwd_map = part.forward_funcs, part.fwd_map
        self.is_checkpointable_results = part.checkpointable
        self._set_bounds(part.start, part.stop)

    def forward(self, forward_input: Any) -> Any:
        """The layers of the part that is active, for an engine that says which.

        Raises:
            RuntimeError: called by anybody else: it would be some part of the layers.
        """
        if active_slice() is None:
            raise RuntimeError(
                "the layers of this module lie in several parts per stage, and nobody says which are meant: train and "
                "evaluate it by the engine that terapipe_ds.initialize() gives, with the same terapipe section"
            )
        return super().forward(forward_input)

    def each_part(self) -> Iterator[int]:
        """Activate one part after the other, and at the end the one that was active."""
        before = self._active_chunk
        try:
            for chunk_id in range(len(self._held)):
                self.activate(chunk_id)
                yield chunk_id
        finally:
            self.activate(before)

    def replace_layers(self, forward_funcs: list[Any]) -> None:
        """Let the active part run these functions in place of its layers."""
        self.forward_funcs = self._held[self._active_chunk].forward_funcs = forward_funcs

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that owns a layer; for tied layers."""
        return self.terapipe_layout.owner(part_of(self.parts, layer_idx))

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        if not self.terapipe_layout.has_copies:
            return super()._index_tied_modules()
        return copies_of(self, self.terapipe_layout, held_layers(self))

    def get_tied_weights_and_groups(self) -> list[tuple[Any, Any]]:
        """The weights that other stages hold as well, each with the group of these."""
        return [
            (self._recursive_getattr(comm["module"], name), comm["group"])
            for comm in self.tied_comms.values()
            for name in comm["weight_attr"]
        ]

    def allreduce_tied_weight_gradients(self) -> None:
        sum_gradients(self, optimizer=None)

    def _precompute_checkpointable_values(self) -> None:
        for chunk_id in self.each_part():
            self.is_checkpointable_results_interval = None  # kept per interval, and not per part
            super()._precompute_checkpointable_values()
            self._held[chunk_id].checkpointable = self.is_checkpointable_results

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's file per layer; of a part with several places its own one writes."""
        for chunk_id in self.each_part():
            if self.terapipe_layout.homes(self._part_id(chunk_id))[0] == (self.stage_id, chunk_id):
                super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        for _ in self.each_part():
            super().load_state_dir(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        for _ in self.each_part():
            super().compile(*args, **kwargs)

    def _part_id(self, chunk_id: int) -> int:
        return self.terapipe_layout.placement[self.stage_id, chunk_id]


def activate(module: Any, chunk_id: int) -> None:
    """Let ``module`` run the part of this stage at ``chunk_id``; where it holds one, it does so anyway."""
    if isinstance(module, PartedModule):
        module.activate(chunk_id)


def each_part(module: Any) -> Iterator[int]:
    """One part of this stage after the other, as what ``module`` runs; the only one where it holds one."""
    if isinstance(module, PartedModule):
        yield from module.each_part()
    else:
        yield 0


def module_of(layer: Any) -> nn.Module | None:
    """What has the parameters of an entry of ``forward_funcs``; None for a function."""
    if isinstance(layer, functools.partial):  # a tied layer with a forward of its own: (forward_fn, module)
        return next((each for each in layer.args if isinstance(each, nn.Module)), None)
    return layer if isinstance(layer, nn.Module) else None


def parameters_of_part(module: Any) -> list[nn.Parameter]:
    """Of the part that ``module`` runs."""
    if not isinstance(module, PartedModule):
        return list(module.parameters())
    layers = [module_of(layer) for layer in module.forward_funcs]
    return list(nn.ModuleList(layer for layer in layers if layer is not None).parameters())


def parameters_of_other_parts(module: Any) -> list[nn.Parameter]:
    """Of this stage's parts that ``module`` does not run now, as far as the one that it runs has no share in them."""
    if not isinstance(module, PartedModule):
        return []
    mine = {id(parameter) for parameter in parameters_of_part(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in mine]


def replace_layers(module: Any, forward_funcs: list[Any]) -> None:
    """Let the part that is active run these functions in place of its layers."""
    if isinstance(module, PartedModule):
        module.replace_layers(forward_funcs)
    else:
        module.forward_funcs = forward_funcs


def layers_by_name(module: Any, held: list[tuple[int, list[Any]]]) -> dict[Name, Any]:
    """The layers that were built here; functions have nothing to move and are among them as they are."""
    found: dict[Name, Any] = dict(module.tied_modules.items())
    for start, functions in held:
        for layer_id, layer in enumerate(functions, start):
            if not isinstance(module._layer_specs[layer_id], TiedLayerSpec):
                found[layer_id] = layer
    return found


def held_layers(module: PartedModule) -> dict[Name, Any]:
    """The layers of all parts on this stage."""
    return layers_by_name(module, [(part.start, part.forward_funcs) for part in module._held])


def part_of(bounds: list[int], layer_id: int) -> int:
    """The part whose layers, from one of ``bounds`` to the next, have this one among them."""
    return next(part for part in range(len(bounds) - 1) if bounds[part] <= layer_id < bounds[part + 1])
