"""Describe the input of a search: costs that are asked once, the shapes of pipeline and batch, and memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from terapipe_ds.costs.interface import ask, costs_of_parts, method_of
from terapipe_ds.messages import show_value
from terapipe_ds.plan import SlicePlan, count_granules
from terapipe_ds.planner.errors import PlannerError, check_count
from terapipe_ds.planner.slice_program.cost_table import CostTable, check_methods, tabulate
from terapipe_ds.planner.slice_program.least_sums import Floats

MAX_TABLE_ELEMENTS = 1 << 25  # over all different parts: 256 MiB for each of forward, backward, links each way

Lengths = tuple[int, ...]
"""Slices in granules."""


class CachedCosts:
    """Keep and check the answers of a cost object; the result is vectorized.

    `table` holds every possible slice, or is None where the tables of all parts would be too large: then answers are
    kept pair by pair.
    """

    vectorized = True

    def __init__(self, costs: Any, sequence_length: int, granularity_tokens: int, with_table: bool = True) -> None:
        check_methods(costs)
        self._costs = costs
        self._granule = granularity_tokens
        self.table: CostTable | None = tabulate(costs, sequence_length, granularity_tokens) if with_table else None
        self._kept: dict[tuple[object, ...], float] = {} if self.table is None else {**self.table.sends}
        # a part without links, or whose W was not measured, must lack the method
        for name in ("send_s", "send_gradient_s", "weight_s"):
            if method_of(costs, name):
                setattr(self, name, functools.partial(self._asked, name))

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return self._of_slices("forward_s", tokens, prefix)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        return self._of_slices("backward_s", tokens, prefix)

    def times(self, tokens: Any, prefix: Any) -> tuple[Floats, Floats, Floats, Floats]:
        names = [name for name in ("send_gradient_s", "send_s") if hasattr(self, name)]
        sends = self._asked("send_s", tokens) if "send_s" in names else np.zeros(len(tokens))
        gradients = self._asked(names[0], tokens) if names else sends
        return self.forward_s(tokens, prefix), self.backward_s(tokens, prefix), sends, gradients

    def whole_s(self, sequence_length: int) -> float:
        return float(self.forward_s(sequence_length, 0) + self.backward_s(sequence_length, 0))

    def _of_slices(self, name: str, tokens: Any, prefix: Any) -> Any:
        if self.table is None:
            return self._asked(name, tokens, prefix)
        # a slice is named by its granules: only the last granule of the sequence can be partial
        row, granules = np.asarray(prefix) // self._granule, -(-np.asarray(tokens) // self._granule)
        seconds = getattr(self.table, name)[row, granules - 1]
        return float(seconds) if np.ndim(seconds) == 0 else seconds

    def _asked(self, name: str, *arguments: Any) -> Any:
        """Return kept answers; ask for all new ones at once."""
        keys = [(name, *numbers) for numbers in zip(*(np.ravel(one).tolist() for one in arguments), strict=True)]
        if new := [key for key in dict.fromkeys(keys) if key not in self._kept]:
            _, tokens, *prefixes = zip(*new, strict=True)
            answers = ask(self._costs, name, tokens, prefixes[0] if prefixes else None, PlannerError)
            self._kept.update(zip(new, answers.tolist(), strict=True))
        seconds = [self._kept[key] for key in keys]
        return seconds[0] if np.ndim(arguments[0]) == 0 else np.array(seconds)


def cache_parts(costs: Any, num_parts: int, sequence_length: int, granularity_tokens: int) -> tuple[CachedCosts, ...]:
    """Return an object per part; equal parts share one. If tables are too large, only the slowest part has one."""
    parts = costs_of_parts(costs, num_parts, PlannerError)
    kinds = {id(cost): cost for cost in parts}
    num_granules = count_granules(sequence_length, granularity_tokens, PlannerError)
    with_tables = len(kinds) * num_granules**2 <= MAX_TABLE_ELEMENTS
    cached = {key: CachedCosts(cost, sequence_length, granularity_tokens, with_tables) for key, cost in kinds.items()}
    if not with_tables:
        slowest = max(cached, key=lambda key: cached[key].whole_s(sequence_length))
        cached[slowest] = CachedCosts(cached[slowest], sequence_length, granularity_tokens)
    return tuple(cached[id(cost)] for cost in parts)


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

    def times(self, lengths: Lengths) -> tuple[Floats, Floats, Floats, Floats]:
        """Return seconds of forward, backward, and messages onwards and back, of every part and slice, [parts, s]."""
        plan = self.plan(lengths)
        tokens, prefixes = np.array(plan.lengths), np.array(plan.starts)
        times = {part: part.times(tokens, prefixes) for part in set(self.parts)}
        forward, backward, send, gradient = (np.array([times[part][i] for part in self.parts]) for i in range(4))
        return forward, backward, send, gradient

    def work_s(self, lengths: Lengths) -> float:
        """Return the seconds of all computations of all stages."""
        forward, backward, *_ = self.times(lengths)
        return self.num_micro_batches * float(forward.sum() + backward.sum())
