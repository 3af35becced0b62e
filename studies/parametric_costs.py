"""Fit costs to a handful of whole-step times, if no times of single slices are published or measured.

Forward plus backward of a slice of i tokens after j, five fitted parameters (floor, c0, c1, c3, p) and one counted:

    t(i, j) = (floor^p + work^p)^(1/p),    work = c0 + c1 i + c2 i (i + j) + c3 j

The floor is launches from the host and reading the weights: they run beside the arithmetic and hide it if it is small.
Hence a soft maximum instead of a sum, whose softness is the sharpness p >= 1. c3 j is the cost of a prefix, however
short the slice is (K, V moved). c2 i (i + j) is attention as an implementation without a fused kernel computes it, the
half above the diagonal included. c2 is not fitted but counted beforehand: in the last of s equal slices, which nearly
alone decides the time of a deep pipeline, i (i + j) is i L. So totals of one sequence length cannot tell c2 from c1,
and a fit that takes all for attention would promise too much for uneven plans.
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

SHARPNESS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # tried first, then between the neighbours
MAX_ITERATIONS = 60
_FITTED, _COUNTED = [0, 1, 2, 4], 3  # places among the parameters: floor, c0, c1, c2, c3
_SUBSETS = [list(c) for size in range(1, 5) for c in itertools.combinations(range(4), size)]


class ParametricCostError(ValueError):
    """Report totals that no parameters can be fitted to."""


@dataclass(frozen=True)
class StepTotal:
    """Hold one whole step of a fill-drain pipeline of equal stages, every micro-batch cut by `plan`."""

    plan: SlicePlan
    num_stages: int
    num_micro_batches: int
    latency_s: float

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < np.inf or self.num_stages < 1 or self.num_micro_batches < 1:
            raise ParametricCostError(f"{self}: give positive, finite seconds and counts")


@dataclass(frozen=True)
class ParametricCosts:
    """Compute the module's costs. `tokens` and `prefix` are ints or arrays. `backward_ratio`: backward over forward,
    which totals cannot tell; they do not depend on it."""

    floor_s: float
    constant_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0
    per_prefix_token_s: float = 0.0
    sharpness: float = 4.0
    backward_ratio: float = 2.0

    vectorized = True

    def both_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of forward and backward."""
        i, j = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
        seconds = _soft_maximum(self._parameters(), _terms(i, j), self.sharpness)
        return float(seconds) if np.ndim(seconds) == 0 else seconds

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the forward."""
        return self.both_s(tokens, prefix) / (1 + self.backward_ratio)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the backward."""
        return self.both_s(tokens, prefix) * self.backward_ratio / (1 + self.backward_ratio)

    def total_s(self, plan: SlicePlan, num_stages: int, num_micro_batches: int) -> float:
        """Return T = m sum(f + b) + (K - 1)(max f + max b) (Li et al. 2021, section 3.3, m micro-batches, one plan)."""
        seconds = self.both_s(np.array(plan.lengths), np.array(plan.starts))
        return float(num_micro_batches * seconds.sum() + (num_stages - 1) * seconds.max())

    def errors(self, totals: Sequence[StepTotal]) -> list[float]:
        """Return predicted over published latency, minus one, for each total."""
        return [self.total_s(t.plan, t.num_stages, t.num_micro_batches) / t.latency_s - 1 for t in totals]

    @classmethod
    def fit(cls, totals: Sequence[StepTotal], *, per_pair_s: float = 0.0) -> ParametricCosts:
        """Fit by least squares of relative errors, parameters >= 0. With fewer than five totals the fit is one of many.

        For one sharpness the times are homogeneous of degree 1 in the other parameters, so each is the sum of its
        derivatives times the parameters (Euler) and a Gauss-Newton step is a linear, nonnegative least-squares problem.

        Raises:
            ParametricCostError: no totals, or a negative `per_pair_s`.
        """
        if not totals or not 0 <= per_pair_s < np.inf:
            raise ParametricCostError(
                f"{len(totals)} totals, per_pair_s = {per_pair_s}: give at least one total, better five or more, and "
                "the seconds of a pair, 0 or more"
            )
        # A slice that takes the floor bounds it: no plan is faster than all its slices at the floor.
        units = [t.num_micro_batches * t.plan.num_slices + t.num_stages - 1 for t in totals]
        highest = min(t.latency_s / count for t, count in zip(totals, units, strict=True))
        per_token_s = _per_token_s(totals)
        starts = [cls(share * highest, 0.0, per_token_s, per_pair_s) for share in (0.3, 0.9)]
        best, least, sharpness = starts[0], np.inf, list(SHARPNESS)
        for _ in range(2):
            for p in sharpness:
                for start in (*starts, best):
                    costs = _improve(dataclasses.replace(start, sharpness=p), totals)
                    if (loss := _loss(costs, totals)) < least * (1 - 1e-9):
                        best, least = costs, loss
            place = sharpness.index(best.sharpness)
            around = sharpness[max(place - 1, 0)], sharpness[min(place + 1, len(sharpness) - 1)]
            sharpness, starts = sorted({best.sharpness, *np.linspace(*around, 8).tolist()}), []
        return best

    def _parameters(self) -> Array:
        return np.array([self.floor_s, self.constant_s, self.per_token_s, self.per_pair_s, self.per_prefix_token_s])


def _terms(i: Array, j: Array) -> Array:
    return np.stack([np.ones_like(i), i, i * (i + j), j])


def _soft_maximum(parameters: Array, terms: Array, p: float) -> Array:
    work = np.tensordot(parameters[1:], terms, axes=1)
    larger = np.maximum(np.maximum(parameters[0], work), 1e-300)
    return np.asarray(larger * ((parameters[0] / larger) ** p + (work / larger) ** p) ** (1 / p))


def _derivatives(parameters: Array, terms: Array, p: float) -> Array:
    """Return the derivatives of the seconds of each slice by each parameter, [5, slices]."""
    work = np.tensordot(parameters[1:], terms, axes=1)
    seconds = _soft_maximum(parameters, terms, p)
    by_floor = (parameters[0] / seconds) ** (p - 1)
    return np.concatenate([by_floor[None], terms * (work / seconds) ** (p - 1)])


def _per_token_s(totals: Sequence[StepTotal]) -> float:
    """Return the seconds of a token in the largest slices, where floors count least."""
    return min(
        t.latency_s / (t.num_micro_batches * t.plan.sequence_length + (t.num_stages - 1) * max(t.plan.lengths))
        for t in totals
    )


def _loss(costs: ParametricCosts, totals: Sequence[StepTotal]) -> float:
    return float(np.sum(np.square(costs.errors(totals))))


def _improve(costs: ParametricCosts, totals: Sequence[StepTotal]) -> ParametricCosts:
    """Run Gauss-Newton with halved steps until none is better. Each step looks up each total's slowest slice anew."""
    terms = [_terms(np.array(t.plan.lengths, float), np.array(t.plan.starts, float)) for t in totals]
    least = _loss(costs, totals)
    for _ in range(MAX_ITERATIONS):
        parameters, rows = costs._parameters(), []
        for total, x in zip(totals, terms, strict=True):
            weight = np.full(x.shape[1], float(total.num_micro_batches))
            weight[np.argmax(_soft_maximum(parameters, x, costs.sharpness))] += total.num_stages - 1
            rows.append(_derivatives(parameters, x, costs.sharpness) @ weight / total.latency_s)
        jacobian, wanted = np.array(rows), parameters.copy()
        wanted[_FITTED] = _nonnegative(jacobian[:, _FITTED], 1 - jacobian[:, _COUNTED] * parameters[_COUNTED])
        for step in 0.5 ** np.arange(6):
            floor, c0, c1, c2, c3 = (parameters + step * (wanted - parameters)).tolist()
            tried = ParametricCosts(floor, c0, c1, c2, c3, costs.sharpness)
            loss = _loss(tried, totals)
            if loss < least * (1 - 1e-6):
                costs, least = tried, loss
                break
        else:
            return costs
    return costs


def _nonnegative(rows: Array, wanted: Array) -> Array:
    """Solve least squares with solutions >= 0, by trying every set of parameters (four: 15 sets)."""
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    best, least = np.zeros(len(scale)), float(wanted @ wanted)
    for subset in _SUBSETS:
        columns = (rows / scale)[:, subset]
        solution = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        loss = float(np.sum(np.square(columns @ solution - wanted)))
        if (solution >= 0).all() and loss < least * (1 - 1e-9):
            best, least = np.zeros(len(scale)), loss
            best[subset] = solution
    return np.asarray(best / scale)
