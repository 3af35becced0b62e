"""Make layers of a running pipeline recompute: `planner/recompute/choose_layers.py` chooses them.

A batch may have sequences of several lengths, so it recomputes each layer that the plan of any length chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.pipe import PipelineModule

from terapipe_ds.planner import PlanResult
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.planner.recompute import costs_of, plan_with_recompute, recomputable_parts
from terapipe_ds.runtime.layers.activation_checkpointing import recompute_layers
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.profiling.all_parts import StageToPlan


def best_with_recompute(
    stage: StageToPlan, cuts: MeasuredParts, length: int, limit_bytes: float | None
) -> tuple[PlanResult, list[Any]]:
    """Return the plan, the schedule and the recomputing layers, and the costs of the parts with these.

    Raises:
        MemoryLimitError: nothing fits, even if everything is recomputed.
        PlannerError: layers or their memory could not be measured.
    """
    config, layout = stage.config, stage.layout
    assert limit_bytes is not None, "refused by the config"
    parts = recomputable_parts(cuts, bounds_of_parts(stage.engine.module, layout))
    result = plan_with_recompute(
        parts,
        length,
        stage.engine.micro_batches,
        config.granularity_for(length),
        config.schedule,
        limit_bytes,
        plan=None if config.slices == "auto" else config.plan_for(length),
        schedule_options=config.schedule_options,
    )
    return result, costs_of(parts, result.recompute or ())


def bounds_of_parts(module: Any, layout: Layout) -> list[int]:
    """Return the first layer of each part of a pipeline, and the number of layers."""
    return [int(bound) for bound in (module.parts if layout.bounds is None else layout.bounds)]


def recompute_for(module: PipelineModule, choices: Iterable[frozenset[int] | None]) -> None:
    """Let all layers recompute that any length in a batch needs: recomputing more layers takes less memory.

    `choices` has the layers that were chosen for each length. None means that its slices were set by hand: then
    everything recomputes.
    """
    wanted: set[int] = set()
    for layers in choices:
        wanted |= set(range(len(module._layer_specs))) if layers is None else layers
    recompute_layers(module, wanted)
