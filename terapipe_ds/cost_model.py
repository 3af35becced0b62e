"""Seconds of a slice as a function of its tokens and its prefix, fitted to measured samples.

The form is that of Li et al., "TeraPipe" (ICML 2021, section 3.3): t(i, j) = t(i, 0) + t_ctx(i, j) for a slice of i
tokens after j, with t_ctx(i, j) = a0 + a1 i + a2 j + a3 i j for j > 0. Without a prefix t_ctx is exactly zero, and
a0 + a1 i stay as a jump from j = 0 to j > 0: that jump is real, since a prefix costs one more kernel call and the
merging of two partial results, work that no prefix saves however short it is.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terapipe_ds.cost_profile import CostSample, LinkSample, Profile

Array = npt.NDArray[np.float64]

# The order in which terms of t_ctx join a fit that has too few points for all of them: attention to the prefix first.
_TERM_ORDER = (3, 0, 2, 1)
_CONTINUE = "measure that far, or pass allow_extrapolation=True for a linear continuation"


class CostModelError(ValueError):
    """Samples that no model can be fitted to, or a question outside of what was measured."""


@dataclass(frozen=True)
class FitErrors:
    """Relative errors of one fitted function. ``held_out``: of points predicted by a fit without them.

    ``in_sample`` has one entry per sample with a prefix (samples without one are met exactly), ``held_out`` the same
    and ``held_out_base`` one per sample without prefix that has neighbours on both sides.
    """

    in_sample: tuple[float, ...]
    held_out: tuple[float, ...]
    held_out_base: tuple[float, ...]

    def __str__(self) -> str:
        named = {
            "fitted": self.in_sample,
            "left out of the fit": self.held_out,
            "without prefix, left out": self.held_out_base,
        }
        return "; ".join(f"{name} {_max_and_median(errors)}" for name, errors in named.items())


@dataclass(frozen=True)
class FitReport:
    """How well a :class:`CostModel` meets its samples. ``max_held_out`` is None with too few samples to leave one
    out."""

    forward: FitErrors
    backward: FitErrors
    part_id: int = 0

    @property
    def max_held_out(self) -> float | None:
        """The largest relative error on any point that was kept out of the fit, forward or backward."""
        both = (self.forward, self.backward)
        return max((error for each in both for error in (*each.held_out, *each.held_out_base)), default=None)

    def __str__(self) -> str:
        return f"part {self.part_id}, forward: {self.forward}\npart {self.part_id}, backward: {self.backward}"


@dataclass(frozen=True)
class Curve:
    """One fitted function of (tokens, prefix). ``base_tokens`` ascending; ``terms``: a0 to a3, None without samples
    that have a prefix."""

    base_tokens: Array
    base_s: Array
    terms: tuple[float, float, float, float] | None

    @classmethod
    def fit(cls, tokens: Array, prefix: Array, seconds: Array) -> Curve:
        """Interpolate the points without prefix, least squares of relative errors on the others."""
        plain = prefix == 0
        order = np.argsort(tokens[plain])
        base = cls(tokens[plain][order], seconds[plain][order], None)
        if plain.all():
            return base
        i, j = tokens[~plain], prefix[~plain]
        curve = base
        for _ in range(2):  # between points the base bends by a term that the first fit finds
            terms = _fit_terms(i, j, seconds[~plain] - curve(i, np.zeros_like(j)), seconds[~plain])
            curve = dataclasses.replace(base, terms=terms)
        return curve

    @functools.cached_property
    def bend(self) -> float:
        """Seconds per token squared by which the base curves upwards between its points.

        Tokens attend to their prefix at a3 seconds a pair, so i tokens attend to one another in a3 i^2 / 2. At most as
        much as lets the base rise wherever its points rise.
        """
        steps = np.diff(self.base_tokens**2)
        if self.terms is None or len(steps) == 0:
            return 0.0
        return float(max(0.0, min(self.terms[3] / 2, *(np.diff(self.base_s) / steps))))

    def __call__(self, tokens: Array, prefix: Array) -> Array:
        """Seconds, never below those without prefix: more to attend to never takes less."""
        bend = self.bend
        straight_s = _interpolate(tokens, self.base_tokens, self.base_s - bend * self.base_tokens**2)
        seconds: Array = straight_s + bend * np.maximum(tokens, self.base_tokens[0]) ** 2
        if self.terms is None:
            return seconds + np.zeros_like(prefix)
        a0, a1, a2, a3 = self.terms
        context = a0 + a1 * tokens + a2 * prefix + a3 * tokens * prefix
        return seconds + np.where(prefix > 0, np.maximum(context, 0.0), 0.0)


class CostModel:
    """Measured costs of one part, with the interface that planner and simulator ask for.

    Below the smallest measured slice time is constant: launches, and reading the weights, take what they take however
    few the tokens are. Between measured points it is linear but for attention, which grows with the square. Beyond
    them: an error, or with ``allow_extrapolation`` a continuation of the last segment (one point alone: in proportion
    to the tokens) and of t_ctx, which is zero where no sample had a prefix.

    ``tokens`` and ``prefix`` are ints (the result is a float) or arrays (elementwise, with broadcasting).
    ``send_s``, ``step_s`` and ``weight_s`` exist only where they were measured (``hasattr``).
    """

    vectorized = True

    def __init__(
        self,
        samples: Iterable[CostSample],
        *,
        links: Iterable[LinkSample] = (),
        step_s: float | None = None,
        part_id: int = 0,
        allow_extrapolation: bool = False,
    ) -> None:
        self.samples, self.part_id, self.allow_extrapolation = tuple(samples), part_id, allow_extrapolation
        self._step_s = step_s
        self._check_samples()
        tokens = np.array([s.tokens for s in self.samples], float)
        prefix = np.array([s.prefix for s in self.samples], float)
        forward, backward = (np.array([getattr(s, n) for s in self.samples]) for n in ("forward_s", "backward_s"))
        self.forward_curve = Curve.fit(tokens, prefix, forward)
        self.backward_curve = Curve.fit(tokens, prefix, backward)
        known = [s.weight_s for s in self.samples if s.weight_s is not None]
        complete = len(known) == len(self.samples)
        self._weight_curve = Curve.fit(tokens, prefix, np.array(known)) if complete else None
        self.min_tokens, self.max_tokens = int(tokens[prefix == 0].min()), int(tokens[prefix == 0].max())
        self.max_sequence_length = int(max((tokens + prefix)[prefix > 0], default=0))  # with a prefix
        self._link = _link_points(links)
        self.report = FitReport(_errors(tokens, prefix, forward), _errors(tokens, prefix, backward), part_id)

    @classmethod
    def fit(cls, samples: Iterable[CostSample], **options: Any) -> CostModel:
        """The same as the constructor, under the name that says what happens."""
        return cls(samples, **options)

    @classmethod
    def from_profile(cls, profile: Profile, *, allow_extrapolation: bool = False) -> list[CostModel]:
        """One model per part of the profile, in the order of ``part_id``."""
        return [
            cls(
                part.samples,
                links=_links_of(profile.links, part.part_id),
                step_s=part.step_s,
                part_id=part.part_id,
                allow_extrapolation=allow_extrapolation,
            )
            for part in profile.parts
        ]

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of the forward of ``tokens`` tokens after ``prefix`` tokens.

        Raises:
            CostModelError: beyond what was measured, unless extrapolation is allowed; no tokens; a negative prefix.
        """
        return self._evaluate(self.forward_curve, tokens, prefix)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Seconds of the backward; as :meth:`forward_s`."""
        return self._evaluate(self.backward_curve, tokens, prefix)

    @property
    def weight_s(self) -> Callable[[Any, Any], Any]:
        """Of the backward, the seconds of W. Where not every sample has it: AttributeError."""
        curve = self._weight_curve
        if curve is None:
            raise AttributeError("weight_s was not measured")
        return lambda tokens, prefix: self._evaluate(curve, tokens, prefix)

    @property
    def send_s(self) -> Callable[[Any], Any]:
        """Seconds of a message of so many tokens to the next part. Where no link was measured: AttributeError."""
        if self._link is None:
            raise AttributeError("send_s was not measured")
        return self._send_s

    @property
    def step_s(self) -> Callable[[], float]:
        """Seconds of reduction and optimizer. Where not measured: AttributeError."""
        step_s = self._step_s
        if step_s is None:
            raise AttributeError("step_s was not measured")
        return lambda: step_s

    def _send_s(self, tokens: Any) -> Any:
        assert self._link is not None
        measured, seconds = self._link
        wanted = np.asarray(tokens, float)
        self._refuse((wanted < 1) | np.isnan(wanted), wanted, "tokens", "give at least 1 token")
        if not self.allow_extrapolation:
            self._refuse(wanted > measured[-1], wanted, "tokens", f"links: 1 to {measured[-1]:.0f} tokens; {_CONTINUE}")
        return _like(tokens, None, _interpolate(wanted, measured, seconds))

    def _evaluate(self, curve: Curve, tokens: Any, prefix: Any) -> Any:
        i, j = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(prefix, float))
        self._refuse(~(i >= 1), i, "tokens", "give at least 1 token")
        self._refuse(~(j >= 0), j, "prefix", "give 0 or more tokens")
        if not self.allow_extrapolation:
            measured = f"slices up to {self.max_tokens} tokens without prefix were measured"
            self._refuse(i > self.max_tokens, i, "tokens", f"{measured}; {_CONTINUE}")
            reach = self.max_sequence_length
            measured = f"with a prefix up to {reach} tokens together" if reach else "no slice with a prefix"
            self._refuse((j > 0) & (i + j > reach), i + j, "tokens + prefix", f"{measured} was measured; {_CONTINUE}")
        return _like(tokens, prefix, curve(i, j))

    def _refuse(self, wrong: Any, values: Array, name: str, why: str) -> None:
        if wrong.any():
            raise CostModelError(f"part {self.part_id}: {name} = {values[wrong].flat[0]:g}: {why}")

    def _check_samples(self) -> None:
        pairs = [(s.tokens, s.prefix) for s in self.samples]
        if len(set(pairs)) < len(pairs):
            twice = next(pair for pair in pairs if pairs.count(pair) > 1)
            raise CostModelError(f"part {self.part_id}: (tokens, prefix) = {twice} stands twice; give each pair once")
        if not any(prefix == 0 for _, prefix in pairs):
            raise CostModelError(
                f"part {self.part_id}: none of {len(pairs)} samples has prefix 0; measure slices without a prefix too"
            )
        longest = max(tokens for tokens, prefix in pairs if prefix == 0)
        for tokens, prefix in pairs:
            if tokens > longest:
                raise CostModelError(
                    f"part {self.part_id}: the sample (tokens, prefix) = {(tokens, prefix)} is longer than the longest "
                    f"without a prefix, {longest} tokens; measure ({tokens}, 0) too"
                )


def _fit_terms(i: Array, j: Array, context_s: Array, seconds: Array) -> tuple[float, float, float, float]:
    """a0 to a3 by least squares of relative errors; terms that the points cannot tell apart from earlier ones in
    ``_TERM_ORDER`` are left out (zero)."""
    columns = np.stack([np.ones_like(i), i, j, i * j], axis=1) / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    columns = columns / scale
    chosen: list[int] = []
    for term in _TERM_ORDER:
        if np.linalg.matrix_rank(columns[:, [*chosen, term]], tol=1e-7) > len(chosen):
            chosen.append(term)
    solution, *_ = np.linalg.lstsq(columns[:, chosen], context_s / seconds, rcond=None)
    terms = np.zeros(4)
    terms[chosen] = solution / scale[chosen]
    a0, a1, a2, a3 = terms.tolist()
    return a0, a1, a2, a3


def _interpolate(wanted: Array, at: Array, values: Array) -> Array:
    """Piecewise linear, constant below the first point, the last slope (never falling) beyond the last."""
    last = (values[-1] - values[-2]) / (at[-1] - at[-2]) if len(at) > 1 else values[-1] / at[-1]
    beyond = np.maximum(wanted - at[-1], 0.0) * max(last, 0.0)
    return np.asarray(np.interp(wanted, at, values) + beyond)


def _errors(tokens: Array, prefix: Array, seconds: Array) -> FitErrors:
    whole = Curve.fit(tokens, prefix, seconds)
    with_prefix, plain = np.flatnonzero(prefix > 0), np.flatnonzero(prefix == 0)
    fitted = [_error(whole, tokens, prefix, seconds, n) for n in with_prefix.tolist()]
    left_out = _left_out(with_prefix, tokens, prefix, seconds) if len(with_prefix) > 1 else []
    interior = plain[np.argsort(tokens[plain])][1:-1]
    return FitErrors(tuple(fitted), tuple(left_out), tuple(_left_out(interior, tokens, prefix, seconds)))


def _left_out(points: npt.NDArray[np.intp], tokens: Array, prefix: Array, seconds: Array) -> list[float]:
    errors = []
    for n in points.tolist():
        others = np.arange(len(tokens)) != n
        without = Curve.fit(tokens[others], prefix[others], seconds[others])
        errors.append(_error(without, tokens, prefix, seconds, n))
    return errors


def _error(curve: Curve, tokens: Array, prefix: Array, seconds: Array, n: int) -> float:
    predicted = curve(tokens[n : n + 1], prefix[n : n + 1])[0]
    return float(abs(predicted / seconds[n] - 1))


def _max_and_median(errors: Sequence[float]) -> str:
    if not errors:
        return "no points"
    return f"max {max(errors):.2%}, median {statistics.median(errors):.2%} of {len(errors)}"


def _links_of(links: Iterable[LinkSample], part_id: int) -> list[LinkSample]:
    """Those of this part's own link; where it has none, those that stand for all links."""
    links = list(links)
    own = [link for link in links if link.part_id == part_id]
    return own or [link for link in links if link.part_id is None]


def _link_points(links: Iterable[LinkSample]) -> tuple[Array, Array] | None:
    ordered = sorted(links, key=lambda link: link.tokens)
    if not ordered:
        return None
    tokens = [link.tokens for link in ordered]
    if len(set(tokens)) < len(tokens):
        raise CostModelError(f"links: tokens {tokens} has one size twice; give the samples of one link")
    return np.array(tokens, float), np.array([link.send_s for link in ordered])


def _like(tokens: Any, prefix: Any, seconds: Array) -> Any:
    """A float where all arguments were plain numbers, else the array."""
    return float(seconds) if np.ndim(tokens) == 0 and np.ndim(prefix) == 0 else seconds
