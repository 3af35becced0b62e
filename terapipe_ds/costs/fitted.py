"""Fit the seconds of a slice, as a function of its tokens and its prefix, to measured samples.

The form is from Li et al., "TeraPipe" (ICML 2021, section 3.3): t(i, j) = t(i, 0) + t_ctx(i, j) for a slice of i
tokens after j, with t_ctx(i, j) = a0 + a1 i + a2 j + a3 i j for j > 0. Without a prefix t_ctx is exactly zero, and
a0 + a1 i stay as a jump from j = 0 to j > 0. That jump is real: any prefix costs one more kernel call and the merging
of two partial results.

Where layers have a window of w tokens, the pairs of a query and a key of the prefix are fewer than i j: a4 p_w(i, j) is
added, with p_w = s(i + j) - s(i) - s(j) and s(x) the area of min(t, w) over 0 < t < x.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe_ds.costs.profile import CostSample, LinkSample, Profile
from terapipe_ds.messages import first_repeated

Array = npt.NDArray[np.float64]

# The order in which terms of t_ctx join a fit that has too few points for all of them: attention to the prefix first.
_TERM_ORDER = (4, 3, 0, 2, 1)
_CONTINUE = "measure that far, give shorter sequences, or in Python pass allow_extrapolation=True to go on in a line"


class CostModelError(ValueError):
    """Refuse samples that no model fits, or a slice beyond the measured ones."""


@dataclass(frozen=True)
class FitErrors:
    """Hold the relative errors of one fitted function, by sample. The fit meets samples without a prefix exactly."""

    in_sample: tuple[float, ...]  # of the samples with a prefix
    held_out: tuple[float, ...]  # of each sample with a prefix, by a fit that leaves it out
    held_out_base: tuple[float, ...]  # of each sample without a prefix between two others, by a fit that leaves it out

    def __str__(self) -> str:
        names = "error at fitted points", "at points left out of the fit", "at points without a prefix left out of it"
        texts = []
        for name, errors in zip(names, (self.in_sample, self.held_out, self.held_out_base), strict=True):
            shown = "unknown (no points)"
            if errors:
                shown = f"at most {max(errors):.2%}, {statistics.median(errors):.2%} in the median of {len(errors)}"
            texts.append(f"{name} {shown}")
        return "; ".join(texts)


@dataclass(frozen=True)
class Curve:
    """Give the seconds of (tokens, prefix) by one fitted function."""

    base_tokens: Array  # ascending
    base_s: Array
    terms: tuple[float, ...] = (0.0,) * 5  # a0 to a4; all 0 without samples that have a prefix
    window: float = math.inf  # of tokens; a4 is 0 without

    @classmethod
    def fit(cls, tokens: Array, prefix: Array, seconds: Array, window: float = math.inf) -> Curve:
        """Interpolate the points without prefix; fit the others by least squares of relative errors."""
        plain = prefix == 0
        order = np.argsort(tokens[plain])
        base = cls(tokens[plain][order], seconds[plain][order], window=window)
        if plain.all():
            return base
        i, j = tokens[~plain], prefix[~plain]
        curve = base
        for _ in range(2):  # the first fit yields the term by which the base bends between points
            terms = _fit_terms(i, j, seconds[~plain] - curve(i, np.zeros_like(j)), seconds[~plain], window)
            curve = dataclasses.replace(base, terms=terms)
        return curve

    @functools.cached_property
    def bend(self) -> float:
        """Return the share of `_own_s` by which the base curves upwards between its points.

        The share is small enough that the base rises wherever its points rise.
        """
        steps = np.diff(self._own_s(self.base_tokens))
        if len(steps) == 0 or not (steps > 0).all():
            return 0.0
        return float(max(0.0, min(1.0, *(np.diff(self.base_s) / steps))))

    def _own_s(self, tokens: Array) -> Array:
        """Return the seconds in which tokens attend to one another, if a pair takes as long as one with the prefix."""
        *_, each, windowed = self.terms
        own_s: Array = max(each, 0.0) * tokens**2 / 2 + max(windowed, 0.0) * _seen(tokens, self.window)
        return own_s

    def __call__(self, tokens: Array, prefix: Array) -> Array:
        """Return seconds, never fewer than without a prefix: attention to more tokens never takes less."""
        straight_s = _interpolate(tokens, self.base_tokens, self.base_s - self.bend * self._own_s(self.base_tokens))
        seconds: Array = straight_s + self.bend * self._own_s(np.maximum(tokens, self.base_tokens[0]))
        a0, a1, a2, a3, a4 = self.terms
        context = a0 + a1 * tokens + a2 * prefix + a3 * tokens * prefix + a4 * _pairs(tokens, prefix, self.window)
        return seconds + np.where(prefix > 0, np.maximum(context, 0.0), 0.0)


class CostModel:
    """Give the measured costs of one part to planner and simulator.

    Below the smallest measured slice, time is constant: launches, and reading the weights, do not depend on tokens.
    Between measured points it is linear but for attention, which grows with the square. A slice beyond them is an
    error. With `allow_extrapolation` the last segment (one point: in proportion to the tokens) and t_ctx go on there.

    `tokens` and `prefix` are ints (the result is a float) or arrays (elementwise, with broadcasting).
    `send_s`, `send_gradient_s`, `step_s` and `weight_s` exist only where they were measured (`hasattr`).
    """

    vectorized = True
    weight_s: Callable[[Any, Any], Any]  # of the backward, the seconds of W
    send_s: Callable[[Any], Any]  # of a message with this number of tokens to the next part
    send_gradient_s: Callable[[Any], Any]  # of one back to the part before
    step_s: Callable[[], float]  # of gradient reduction and optimizer

    def __init__(
        self,
        samples: Iterable[CostSample],
        *,
        links: Iterable[LinkSample] = (),
        links_back: Iterable[LinkSample] = (),
        step_s: float | None = None,
        part_id: int = 0,
        window: float = math.inf,
        allow_extrapolation: bool = False,
    ) -> None:
        self.samples, self.part_id, self.allow_extrapolation = tuple(samples), part_id, allow_extrapolation
        # a fit of strange samples would give wrong seconds for every slice
        self._check_samples()
        tokens, prefix, forward, backward, weight = (
            np.array([getattr(sample, name) for sample in self.samples], float)  # None becomes NaN
            for name in ("tokens", "prefix", "forward_s", "backward_s", "weight_s")
        )
        self.forward_curve = Curve.fit(tokens, prefix, forward, window)
        self.backward_curve = Curve.fit(tokens, prefix, backward, window)
        self.min_tokens = int(tokens[prefix == 0].min())
        self.max_sequence_length = int(max((tokens + prefix)[prefix > 0], default=0))  # with a prefix
        # a method exists where every sample has the seconds for its fit
        if not np.isnan(weight).any():
            self.weight_s = functools.partial(self._weight_s, Curve.fit(tokens, prefix, weight, window))
        for name, samples_of_link in (("send_s", links), ("send_gradient_s", links_back)):
            if points := sorted((link.tokens, link.send_s) for link in samples_of_link):
                setattr(self, name, self._message(points))
        if step_s is not None:
            self.step_s = functools.partial(float, step_s)

    @classmethod
    def from_profile(cls, profile: Profile, *, allow_extrapolation: bool = False) -> list[CostModel]:
        """Fit one model per part of the profile, in the order of `part_id`."""

        def links_of(part_id: int) -> list[LinkSample]:
            own = [link for link in profile.links if link.part_id == part_id]
            return own or [link for link in profile.links if link.part_id is None]  # these stand for all links

        models = []
        for part in profile.parts:
            model = cls(
                part.samples,
                links=links_of(part.part_id),
                links_back=links_of(part.part_id - 1),  # both ways of a link take as long
                step_s=part.step_s,
                part_id=part.part_id,
                window=window_of(part.memory),
                allow_extrapolation=allow_extrapolation,
            )
            models.append(model)
        return models

    def _message(self, points: Sequence[tuple[int, float]]) -> Callable[[Any], Any]:
        """Return the seconds of a message by its tokens; `points` are those of one link, ascending."""
        sizes, seconds = zip(*points, strict=True)
        if len(set(sizes)) < len(sizes):
            raise CostModelError(f"links: tokens {list(sizes)} has one size twice; give the samples of one link")
        curve = Curve(np.array(sizes, float), np.array(seconds))
        return functools.partial(self._evaluate, curve, prefix=0, what="messages")

    def errors(self, name: str) -> FitErrors:
        """Return how well the fit of "forward" or "backward" meets its samples; it takes a fit per sample."""
        tokens, prefix, seconds = (
            np.array([getattr(sample, field) for sample in self.samples], float)
            for field in ("tokens", "prefix", f"{name}_s")
        )

        def error(n: int, points: npt.NDArray[np.bool_]) -> float:
            curve = Curve.fit(tokens[points], prefix[points], seconds[points], self.forward_curve.window)
            return float(abs(curve(tokens[n : n + 1], prefix[n : n + 1])[0] / seconds[n] - 1))

        # all samples, then once more without each sample that can be left out
        everything = np.arange(len(tokens))
        with_prefix, plain = np.flatnonzero(prefix > 0).tolist(), np.flatnonzero(prefix == 0)
        interior = plain[np.argsort(tokens[plain])][1:-1].tolist()
        return FitErrors(
            tuple(error(n, everything >= 0) for n in with_prefix),
            tuple(error(n, everything != n) for n in with_prefix if len(with_prefix) > 1),
            tuple(error(n, everything != n) for n in interior),
        )

    @property
    def report(self) -> str:
        """Return two lines that say how well the fit meets its samples."""
        return "\n".join(f"part {self.part_id}, {name}: {self.errors(name)}" for name in ("forward", "backward"))

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the forward of `tokens` tokens after `prefix` tokens, or raise CostModelError."""
        return self._evaluate(self.forward_curve, tokens, prefix)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the backward, as `forward_s` does for the forward."""
        return self._evaluate(self.backward_curve, tokens, prefix)

    def _weight_s(self, curve: Curve, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of W, never more than the whole backward: the two fits may cross between the samples."""
        seconds = np.minimum(self._evaluate(curve, tokens, prefix), self.backward_s(tokens, prefix))
        return seconds if seconds.ndim else float(seconds)

    def _evaluate(self, curve: Curve, tokens: Any, prefix: Any, what: str = "slices without prefix") -> Any:
        i, j = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
        self._refuse(~(i >= 1), i, "tokens", "give at least 1 token")
        self._refuse(~(j >= 0), j, "prefix", "give 0 or more tokens")
        if not self.allow_extrapolation:
            most = curve.base_tokens[-1]
            self._refuse(i > most, i, "tokens", f"{what} up to {most:.0f} tokens were measured; {_CONTINUE}")
            reach = self.max_sequence_length
            measured = f"with a prefix up to {reach} tokens together" if reach else "no slice with a prefix"
            self._refuse((j > 0) & (i + j > reach), i + j, "tokens + prefix", f"{measured} was measured; {_CONTINUE}")
        seconds = curve(i, j)
        return float(seconds) if seconds.ndim == 0 else seconds

    def _refuse(self, wrong: Any, values: Array, name: str, why: str) -> None:
        if wrong.any():
            raise CostModelError(f"part {self.part_id}: {name} = {values[wrong].flat[0]:g}: {why}")

    def _check_samples(self) -> None:
        pairs = [(s.tokens, s.prefix) for s in self.samples]
        longest = max((tokens for tokens, prefix in pairs if prefix == 0), default=None)
        if longest is None:
            problem = f"none of {len(pairs)} samples has prefix 0; measure slices without a prefix too"
        elif (twice := first_repeated(pairs)) is not None:
            problem = f"the sample (tokens, prefix) = {twice} occurs twice; give each pair once"
        elif (most := max(pairs))[0] > longest:
            problem = f"the sample (tokens, prefix) = {most} is longer than the longest without a prefix, "
            problem += f"{longest} tokens; measure ({most[0]}, 0) too"
        else:
            return
        raise CostModelError(f"part {self.part_id}: {problem}")


def window_of(memory: Mapping[str, Any] | None) -> float:
    """Return the window of the layers whose memory a profile has, in tokens; infinite without one."""
    tokens = (memory or {}).get("window_tokens")
    return 1 + tokens if tokens else math.inf


def _fit_terms(i: Array, j: Array, context_s: Array, seconds: Array, window: float) -> tuple[float, ...]:
    """Fit a0 to a4 by least squares of relative errors; a term that the points cannot tell from earlier ones is 0."""
    columns = np.stack([np.ones_like(i), i, j, i * j, _pairs(i, j, window)], axis=1) / seconds[:, None]
    scale = np.maximum(np.linalg.norm(columns, axis=0), np.finfo(float).tiny)
    columns = columns / scale
    chosen: list[int] = []
    for term in _TERM_ORDER if window < math.inf else _TERM_ORDER[1:]:
        if np.linalg.matrix_rank(columns[:, [*chosen, term]], tol=1e-7) > len(chosen):
            chosen.append(term)
    solution, *_ = np.linalg.lstsq(columns[:, chosen], context_s / seconds, rcond=None)
    terms = np.zeros(5)
    terms[chosen] = solution / scale[chosen]
    return tuple(terms.tolist())


def _pairs(tokens: Array, prefix: Array, window: float) -> Array:
    """Return the number of pairs (token, token of its prefix) within the window; without a window the result is 0."""
    return _seen(tokens + prefix, window) - _seen(tokens, window) - _seen(prefix, window)


def _seen(tokens: Array, window: float) -> Array:
    """Return the area of min(t, window) over 0 < t < `tokens`; 0 without a window, since a3 then counts the pairs."""
    if window == math.inf:
        return np.zeros_like(tokens)
    inside = np.minimum(tokens, window)
    seen: Array = inside**2 / 2 + window * (tokens - inside)
    return seen


def _interpolate(wanted: Array, at: Array, values: Array) -> Array:
    """Interpolate linearly: constant below the first point, with the last slope (never falling) beyond the last."""
    last = (values[-1] - values[-2]) / (at[-1] - at[-2]) if len(at) > 1 else values[-1] / at[-1]
    beyond = np.maximum(wanted - at[-1], 0.0) * max(last, 0.0)
    return np.asarray(np.interp(wanted, at, values) + beyond)
