"""Hold several parts of the layers on each stage of a `PipelineModule`, as DeepSpeed's `DualPipeVModule` holds two.

`layers_to_parts` turns a user's module into a `PartedModule`. The functions at the end work for any module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed.pipe import PipelineModule
from torch import nn

from terapipe_ds.attention import active_slice
from terapipe_ds.runtime.layout.layer_names import LayerName, layers_by_name, module_of, part_of
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.layout.tied_and_copied import LOSS, copies_of


@dataclass
class HeldPart:
    """Hold the layers of one part on this stage, as `PipelineModule` holds the layers of its only part."""

    start: int
    stop: int
    forward_funcs: list[Any]
    checkpointable: list[bool] = field(default_factory=list)
    fwd_map: dict[str, int] = field(default_factory=dict)


class PartedModule(PipelineModule):
    """Run one part at a time: the class that a module gets when it is laid out, in front of its own."""

    terapipe_layout: Layout
    held_parts: list[HeldPart]  # by chunk
    active_chunk: int = 0

    def activate(self, chunk_id: int) -> None:
        """Let `forward` run the part at `chunk_id`."""
        part = self.held_parts[chunk_id]
        self.active_chunk = chunk_id
        self.forward_funcs, self.fwd_map = part.forward_funcs, part.fwd_map
        self.is_checkpointable_results = part.checkpointable
        self._set_bounds(part.start, part.stop)

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of the active part for an engine. Refuse any other caller, who would not know the part."""
        # a caller outside of an engine does not say which part it means
        if active_slice() is None and len(self.held_parts) > 1:
            raise RuntimeError(
                "the layers of this module are in several parts per stage, and this call does not say which: train and "
                "evaluate it by the engine that terapipe_ds.initialize() gives, with the same terapipe section"
            )
        return super().forward(forward_input)

    def each_part(self) -> Iterator[int]:
        """Activate one part after the other, and at the end the part that was active before."""
        before = self.active_chunk
        try:
            for chunk_id in range(len(self.held_parts)):
                self.activate(chunk_id)
                yield chunk_id
        finally:
            self.activate(before)

    def held_layers(self) -> dict[LayerName, Any]:
        return layers_by_name(self, [(part.start, part.forward_funcs) for part in self.held_parts])

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that owns a layer; DeepSpeed asks this for tied layers."""
        return self.terapipe_layout.owner(part_of(self.parts, layer_idx))

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        if not self.terapipe_layout.has_copies:
            return super()._index_tied_modules()
        return copies_of(self, self.terapipe_layout, {**self.held_layers(), LOSS: self.loss_fn})

    def _precompute_checkpointable_values(self) -> None:
        for chunk_id in self.each_part():
            self.is_checkpointable_results_interval = None  # kept per interval, and not per part
            super()._precompute_checkpointable_values()
            self.held_parts[chunk_id].checkpointable = self.is_checkpointable_results

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Write DeepSpeed's file per layer; write a part with several places at its home."""
        layout = self.terapipe_layout
        # a part at two places would be written twice, and the copies may differ by rounding
        for here in ((self.stage_id, chunk_id) for chunk_id in self.each_part()):
            if layout.homes(layout.placement[here])[0] == here:
                super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        for _ in self.each_part():
            super().load_state_dir(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        for _ in self.each_part():
            super().compile(*args, **kwargs)


def activate(module: Any, chunk_id: int) -> None:
    """Let `module` run the part of this stage at `chunk_id`."""
    if isinstance(module, PartedModule):
        module.activate(chunk_id)


def each_part(module: Any) -> Iterator[int]:
    """Let `module` run one part of this stage after the other."""
    return module.each_part() if isinstance(module, PartedModule) else iter((0,))


def functions_of(module: Any) -> list[Any]:
    """Return the layers that `module` runs, functions among them, of all parts that the stage holds."""
    parts = getattr(module, "held_parts", (module,))
    return [each for part in parts for each in getattr(part, "forward_funcs", ())]


def parameters_of_part(module: Any) -> list[nn.Parameter]:
    """Return the parameters of the part that `module` runs."""
    if not isinstance(module, PartedModule):
        return list(module.parameters())
    layers = [module_of(layer) for layer in module.forward_funcs]
    return list(nn.ModuleList(layer for layer in layers if layer is not None).parameters())
