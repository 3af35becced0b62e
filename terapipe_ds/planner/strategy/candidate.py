"""Hold one candidate of the search, its score, and the replays that candidates share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.cuts import Bounds
from terapipe_ds.planner.layers.parts import Again, Setting
from terapipe_ds.planner.strategy.shapes import Shape
from terapipe_ds.schedule import build, placement_for
from terapipe_ds.schedule.placement import BIDIRECTIONAL
from terapipe_ds.simulator import Replay, ScheduleShape
from terapipe_ds.strategy import Grid

USABLE = 0.9
"""Of the memory of a device, or of a host: the share that may be planned where the user gives no limit."""


@dataclass(frozen=True, order=True)
class Levers:
    """Hold the choices that save memory and cost time, for all stages."""

    offload_activations: bool = False
    offload_optimizer: bool = False


NO_LEVERS = Levers()


@dataclass(frozen=True)
class Candidate:
    """Hold degrees, placement, micro-batches and ZeRO: all choices that precede the cut of the layers."""

    grid: Grid
    micro_batch: int
    accumulation: int
    zero_stage: int
    levers: Levers = NO_LEVERS

    @property
    def setting(self) -> Setting:
        grid = self.grid
        return Setting(
            grid.model, self.micro_batch, grid.data, self.zero_stage, grid.sequence, self.levers.offload_optimizer
        )

    @property
    def rank(self) -> tuple[Any, ...]:
        """Return the key that decides between candidates of equal time: less of everything."""
        grid = self.grid
        inner = grid.model * grid.sequence, grid.sequence
        return self.levers, *inner, grid.pipe, self.zero_stage, self.micro_batch, grid.axes[0] != "pipe"


@dataclass(frozen=True)
class Score:
    """Hold a candidate with its cut, schedule and slices, and its exact or estimated time."""

    seconds: float
    candidate: Candidate
    bounds: Bounds
    recompute: tuple[Again, ...]
    shape: Shape
    plan: SlicePlan
    peak_bytes: tuple[int, ...]
    is_final: bool  # the replay had enough micro-batches for an answer
    host_bytes: int = 0  # of the fullest node

    @property
    def rank(self) -> tuple[Any, ...]:
        return self.seconds, self.plan.num_slices, self.candidate.rank, self.shape[::-1], self.bounds


@functools.lru_cache(maxsize=24)
def replay_of(shape: ScheduleShape, num_micro_batches: int) -> Replay:
    """Return the replay of a schedule; candidates of the same shape share it."""
    chunks = shape.chunks_per_stage
    return Replay(build(shape.schedule, shape.num_stages, num_micro_batches, shape.num_slices, chunks_per_stage=chunks))


@functools.lru_cache(maxsize=64)
def owners_of(schedule: str, num_stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the stage of each part. Raises PlannerError for a schedule with two places per part."""
    if schedule in BIDIRECTIONAL:
        raise PlannerError(
            f"schedule {schedule!r} has each layer on two stages, which strategies cannot price; plan again"
        )
    places = placement_for(schedule, num_stages, chunks)
    stages = {part: stage for (stage, _), part in places.items()}
    return tuple(stages[part] for part in range(len(places)))
