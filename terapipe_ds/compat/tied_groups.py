"""Make the groups of tied layers also on topologies with axes that DeepSpeed does not know, such as `sequence`."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from terapipe_ds.compat.replaced import replaced

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.topology import ProcessTopology


def further_axes(topology: ProcessTopology) -> dict[str, int]:
    """Return the sizes of the axes that DeepSpeed does not know, if they have several ranks."""
    sizes = zip(topology.get_axis_names(), topology.dims, strict=True)
    return {axis: size for axis, size in sizes if axis not in ("pipe", "data", "model") and size > 1}


def index_tied_modules(module: Any) -> dict[str, dict[str, Any]]:
    """Return what `PipelineModule._index_tied_modules` does, with a group for each place on further axes. A collective.

    DeepSpeed (0.19.8) makes groups for a rank's own place alone: ranks would make different ones, and wait forever.
    """
    from deepspeed.pipe import PipelineModule

    stock = inspect.unwrap(PipelineModule._index_tied_modules)
    grid, axes, found = module._grid, further_axes(module.topology()), dict[str, dict[str, Any]]()
    stage_to_global = grid.stage_to_global
    for places in itertools.product(*map(range, axes.values())):
        at = functools.partial(stage_to_global, **dict(zip(axes, places, strict=True)))
        with replaced(grid, "stage_to_global", at):
            found |= stock(module)
    return found
