"""Describe the input of a search: costs that are asked once, the shapes of pipeline and batch, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terapipe_ds.messages import show_value
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.planner.search.cached_costs import CachedCosts
from terapipe_ds.planner.slice_program.dynamic_programs import Floats

Lengths = tuple[int, ...]
"""Slices in granules."""


@dataclass(frozen=True)
class Pipeline:
    """Hold the input of a search. Raises PlannerError for an impossible number."""

    parts: tuple[CachedCosts, ...]
    sequence_length: int
    granularity_tokens: int
    num_micro_batches: int
    num_stages: int
    chunks_per_stage: int = 1
    memory: Any = None
    memory_limit_bytes: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_micro_batches", check_count("num_micro_batches", self.num_micro_batches))
        limit = self.memory_limit_bytes
        if limit is not None and self.memory is None:
            raise PlannerError("memory_limit_bytes needs memory: give a MemoryModel, or leave the limit out")
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise PlannerError(f"memory_limit_bytes = {show_value(limit)}: give a number of bytes > 0")

    @property
    def num_granules(self) -> int:
        return -(-self.sequence_length // self.granularity_tokens)

    def plan(self, lengths: Lengths) -> SlicePlan:
        """Return lengths in granules as a plan in tokens."""
        return SlicePlan.of_granules(lengths, self.sequence_length, self.granularity_tokens)

    def times(self, lengths: Lengths) -> tuple[Floats, Floats, Floats]:
        """Return forward, backward and send seconds of every part and slice, [parts, s]."""
        plan = self.plan(lengths)
        tokens, prefixes = np.array(plan.lengths), np.array(plan.starts)
        times = {part: part.times(tokens, prefixes) for part in set(self.parts)}
        forward, backward, send = (np.array([times[part][i] for part in self.parts]) for i in range(3))
        return forward, backward, send

    def work_s(self, lengths: Lengths) -> float:
        """Return the seconds of all computations of all stages."""
        forward, backward, _ = self.times(lengths)
        return self.num_micro_batches * float(forward.sum() + backward.sum())
