"""Read off a profile what its layers take where they recompute."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.ranking.measured_parts import MeasuredParts
from terapipe_ds.planner.recompute.frontier import Layer
from terapipe_ds.planner.recompute.stages import PartLayers


def measured_layers(parts: MeasuredParts, bounds: Sequence[int]) -> list[PartLayers]:
    """Return the parts between `bounds` of a measured model. Layers without parameters never recompute.

    Raises:
        PlannerError: layers or their memory were not measured.
    """
    num_parts = len(bounds) - 1
    costs, memory = parts.cut(num_parts, bounds), parts.memory(num_parts, bounds)
    if not parts.has_layers or costs is None or memory is None:
        lacks = "the memory of layers was not measured" if parts.has_layers else "layers were not timed one by one"
        raise PlannerError(
            f'recompute "auto": {lacks}; measure in the running job (planner.profile "measure", without a profiler), '
            'or name the stages that recompute, "recompute": [0, 1]'
        )
    before = [0.0, *(unit.sent_bytes or 0.0 for unit in parts.units[:-1])]
    found = []
    for part_id, (start, stop) in enumerate(itertools.pairwise(bounds)):
        layers = []
        for layer_id in range(start, stop):
            unit = parts.units[layer_id]
            if unit.memory is not None and unit.parameters:
                kept = unit.memory.slice_bytes_per_token, before[layer_id], unit.memory.whole_bytes_per_token or 0.0
                layers.append(Layer(layer_id, unit.costs, *kept))
        found.append(PartLayers(costs[part_id], memory.parts[part_id], tuple(layers)))
    return found
