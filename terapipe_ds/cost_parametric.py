"""Costs from a handful of whole-step times, where nobody published or measured single slices.

Five parameters: t(i, j) = max(floor, c0 + c1 i + c2 i (i/2 + j) + c3 j) is forward plus backward of a slice of i tokens
after j. The floor stands over the whole, because what it stands for (launches from the host, reading the weights)
runs beside the arithmetic of a small slice and hides it; c2 counts attention, c3 what each token of prefix costs
however short the slice is (K and V moved).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe_ds.plan import SlicePlan

Array = npt.NDArray[np.float64]

MAX_ITERATIONS = 30
_SUBSETS = [np.array(c) for size in range(1, 5) for c in itertools.combinations(range(4), size)]


class ParametricCostError(ValueError):
    """Totals that no parameters can be fitted to."""


@dataclass(frozen=True)
class StepTotal:
    """One whole step of a fill-drain pipeline of equal stages, every micro-batch cut by ``plan``."""

    plan: SlicePlan
    num_stages: int
    num_micro_batches: int
    latency_s: float

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < np.inf or self.num_stages < 1 or self.num_micro_batches < 1:
            raise ParametricCostError(f"{self}: give positive, finite seconds and counts")


@dataclass(frozen=True)
class ParametricCosts:
    """See the module. ``tokens`` and ``prefix`` are ints or arrays. ``backward_ratio``: backward over forward, which
    totals cannot tell; they do not depend on it."""

    floor_s: float
    constant_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0
    per_prefix_token_s: float = 0.0
    backward_ratio: float = 2.0

    vectorized = True

    def both_s(self, tokens: Any, prefix: Any) -> Any:
        """Forward plus backward, in seconds."""
        i, j = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
        seconds = np.maximum(self.floor_s, np.tensordot(self._coefficients(), _terms(i, j), axes=1))
        return float(seconds) if np.ndim(seconds) == 0 else seconds

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of the forward."""
        return self.both_s(tokens, prefix) / (1 + self.backward_ratio)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of the backward."""
        return self.both_s(tokens, prefix) * self.backward_ratio / (1 + self.backward_ratio)

    def total_s(self, plan: SlicePlan, num_stages: int, num_micro_batches: int) -> float:
        """T = m sum(f + b) + (K - 1)(max f + max b) (Li et al. 2021, equation 5, with m micro-batches of one plan)."""
        seconds = self.both_s(np.array(plan.lengths), np.array(plan.starts))
        return float(num_micro_batches * seconds.sum() + (num_stages - 1) * seconds.max())

    def errors(self, totals: Sequence[StepTotal]) -> list[float]:
        """Predicted over given latency, minus one, of each."""
        return [self.total_s(t.plan, t.num_stages, t.num_micro_batches) / t.latency_s - 1 for t in totals]

    @classmethod
    def fit(cls, totals: Sequence[StepTotal], *, floor_s: float | None = None) -> ParametricCosts:
        """Least squares of relative errors, all parameters >= 0; the floor by a grid that is refined around its best
        value unless ``floor_s`` gives it. With fewer totals than parameters the fit is one of many.

        Raises:
            ParametricCostError: no totals.
        """
        if not totals:
            raise ParametricCostError("no totals to fit: give at least one, better five or more")
        if floor_s is not None:
            return _fit_above(floor_s, totals)
        # A slice that takes the floor bounds it: no plan is faster than all its slices at the floor.
        units = [t.num_micro_batches * t.plan.num_slices + t.num_stages - 1 for t in totals]
        low, high = 0.0, 1.2 * min(t.latency_s / count for t, count in zip(totals, units, strict=True))
        best = cls(0.0)
        for count in (41, 9, 9):
            grid = np.linspace(low, high, count)
            fits = [_fit_above(float(floor), totals) for floor in grid]
            best = min(fits, key=lambda costs: _loss(costs, totals))
            step = grid[1] - grid[0]
            low, high = max(0.0, best.floor_s - step), best.floor_s + step
        return best

    def _coefficients(self) -> Array:
        return np.array([self.constant_s, self.per_token_s, self.per_pair_s, self.per_prefix_token_s])


def _terms(i: Array, j: Array) -> Array:
    return np.stack([np.ones_like(i), i, i * (i / 2 + j), j])


def _loss(costs: ParametricCosts, totals: Sequence[StepTotal]) -> float:
    return float(np.sum(np.square(costs.errors(totals))))


def _fit_above(floor_s: float, totals: Sequence[StepTotal]) -> ParametricCosts:
    """The four linear parameters for one floor.

    Which slices lie above the floor, and which one is the slowest, follow from the parameters, and given both the
    totals are linear in the parameters: so solve, look again, and keep the best seen. Starts with all above.
    """
    terms = [_terms(np.array(t.plan.lengths, float), np.array(t.plan.starts, float)) for t in totals]
    latencies = np.array([t.latency_s for t in totals])
    best, least, costs = ParametricCosts(floor_s), np.inf, None
    for turn in range(MAX_ITERATIONS):
        rows, rest = [], []
        for total, x in zip(totals, terms, strict=True):
            seconds = x[1] if costs is None else np.tensordot(costs._coefficients(), x, axes=1)
            above = np.ones_like(seconds, bool) if costs is None else seconds > floor_s
            weight = np.full(len(seconds), float(total.num_micro_batches))
            weight[np.argmax(np.maximum(seconds, floor_s))] += total.num_stages - 1
            rows.append((x * (weight * above)).sum(axis=1))
            rest.append(floor_s * (weight * ~above).sum())
        solution = _nonnegative(np.array(rows) / latencies[:, None], 1 - np.array(rest) / latencies)
        if costs is not None and turn > 5:  # a cycle of two sets: meet in the middle
            solution = (solution + costs._coefficients()) / 2
        previous, costs = costs, ParametricCosts(floor_s, *solution.tolist())
        if (loss := _loss(costs, totals)) < least:
            best, least = costs, loss
        if previous == costs:
            break
    return best


def _nonnegative(rows: Array, wanted: Array) -> Array:
    """Least squares with solutions >= 0, by trying every set of the four parameters."""
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    best, least = np.zeros(4), float(wanted @ wanted)
    for subset in _SUBSETS:
        columns = (rows / scale)[:, subset]
        solution = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        loss = float(np.sum(np.square(columns @ solution - wanted)))
        if (solution >= 0).all() and loss < least * (1 - 1e-9):
            best, least = np.zeros(4), loss
            best[subset] = solution
    return best / scale


def scaled(costs: ParametricCosts, factor: float) -> ParametricCosts:
    """Every time multiplied, for a part of so many times the layers."""
    names = [field.name for field in dataclasses.fields(costs) if field.name.endswith("_s")]
    return dataclasses.replace(costs, **{name: getattr(costs, name) * factor for name in names})
