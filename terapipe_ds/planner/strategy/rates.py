"""Share numbers among candidates: the seconds of layers in slices, and the memory of every span of layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from terapipe_ds.costs.interface import ask
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.cuts import Bounds, best_cuts, spans_matrix
from terapipe_ds.planner.layers.parts import Floats, Layers, Setting, Span
from terapipe_ds.planner.memory import PartMemory

_NAMES = "forward_s", "backward_s"


@functools.lru_cache(maxsize=512)
def layer_seconds(
    layers: Layers, setting: Setting, recompute: int, length: int, num_slices: int
) -> tuple[Floats, Floats]:
    """Return, per layer, the seconds of all forwards and of all backwards of a micro-batch in equal slices."""
    costs, plan = layers.layer_costs(setting, recompute), equal_plan(setting, length, num_slices)
    times = {key: seconds_of(cost, plan) for key, cost in {id(cost): cost for cost in costs}.items()}
    forward, backward = (np.array([times[id(cost)][i] for cost in costs]) for i in range(2))
    return forward, backward


@functools.lru_cache(maxsize=512)
def equal_cuts(
    layers: Layers, setting: Setting, length: int, num_slices: int, num_stages: int, chunks: int
) -> list[Bounds]:
    """Return cuts for some parts per stage: parts as equal as possible, and such that stages are too."""
    if chunks * num_stages > layers.num_layers:
        return []
    work = spans_matrix(np.add(*layer_seconds(layers, setting, False, length, num_slices)))
    # five layers of each stage are 2 + 3 on all stages, not 3 + 3 on some of them
    of_stage = round(layers.num_layers / num_stages)
    uneven = [work / max(1, (of_stage + chunk) // chunks) for chunk in range(chunks)]
    cuts = []
    for times in ([work] * chunks, uneven)[:chunks]:
        parts = [time for time in times for _ in range(num_stages)]
        cuts.append(best_cuts(parts, [np.zeros_like(work)] * len(parts), 1.0, 0.0)[0][1])
    return list(dict.fromkeys(cuts))


def equal_plan(setting: Setting, length: int, num_slices: int) -> SlicePlan:
    """Return about equal slices, each with as many tokens on every sequence rank; the engine refuses others."""
    return SlicePlan.equal(length, min(num_slices, length // setting.sequence), setting.sequence)


def seconds_of(cost: Any, plan: SlicePlan) -> list[float]:
    """Return the seconds of all forwards and of all backwards of a micro-batch."""
    return [float(ask(cost, name, plan.lengths, plan.starts, PlannerError).sum()) for name in _NAMES]


def whole_of(cost: Any, length: int) -> tuple[float, float]:
    """Return the work of a whole sequence, and the least forward of a first slice."""
    return float(cost.forward_s(length, 0) + cost.backward_s(length, 0)), float(cost.forward_s(1, 0))


def least_of(cost: Any, length: int) -> tuple[float, float]:
    """Return the least work of the slices that a search tries, and their least first forward.

    Planned slices end at multiples of `granule_of`, so that a program over these finds the least. Equal ones need not.
    """
    edges = [*range(0, length, granule_of(length)), length]
    equal = [SlicePlan.equal(length, 1 << power).spans() for power in range((-(-length // 64)).bit_length())]
    spans = list(dict.fromkeys(itertools.chain(itertools.combinations(edges, 2), *equal)))
    pairs = [stop - start for start, stop in spans], [start for start, _ in spans]
    both = (ask(cost, name, *pairs, PlannerError).tolist() for name in _NAMES)
    seconds = dict(zip(spans, zip(*both, strict=True), strict=True))
    least = {0: 0.0}
    for stop in edges[1:]:
        least[stop] = min(least[start] + sum(seconds[start, stop]) for start in edges if start < stop)
    work = min(least[length], *(sum(sum(seconds[span]) for span in of_plan) for of_plan in equal))
    return work, min(forward for (start, _), (forward, _) in seconds.items() if start == 0)


def granule_of(length: int) -> int:
    """Return the tokens at whose multiples slices end: 64, or more where 64 would make more than 64 granules."""
    return min(length, max(64, 1 << max(0, (length // 64 - 1).bit_length())))


_SUMMED: dict[str, Callable[[PartMemory, int], float]] = {
    "lasting": lambda part, length: part.static_bytes,
    "static": lambda part, length: part.static_bytes + part.gradient_bytes,
    "tied": lambda part, length: part.tied_bytes,
    "tied_gradient": lambda part, length: part.tied_gradient_bytes,
    "slice": lambda part, length: part.slice_bytes_per_token * length,
    "store": lambda part, length: part.store_bytes_per_token * length,
    "store_grad": lambda part, length: part.store_grad_bytes_per_token * length,
    "whole": lambda part, length: (part.whole_bytes_per_token or 0.0) * length,
    "joined": lambda part, length: part.joined_bytes_per_token * length,
    "weight": lambda part, length: (
        (part.slice_bytes_per_token if part.weight_bytes_per_token is None else part.weight_bytes_per_token) * length
    ),
}
_LARGEST: dict[str, Callable[[PartMemory, int], float]] = {
    "working": lambda part, length: part.working_bytes_per_token * length,
    "working_whole": lambda part, length: (part.working_bytes_per_token + part.working_whole_bytes_per_token) * length,
    "copied": lambda part, length: part.working_copied_bytes_per_token * length,
    "factors": lambda part, length: part.working_factor_bytes_per_token * length,
    "beside": lambda part, length: (part.working_bytes_per_token - part.working_gone_bytes_per_token) * length,
    "reread": lambda part, length: part.working_bytes_per_prefix_token * length,
    "loss": lambda part, length: part.loss_bytes_per_token,
    "fixed": lambda part, length: part.working_bytes,
    "fixed_whole": lambda part, length: part.working_bytes + part.working_whole_bytes,
}
"""Shares of a part's memory, the sums over its layers and the largest of a layer, for a whole sequence."""


@functools.lru_cache(maxsize=64)  # some 100 MB
def memory_matrices(layers: Layers, setting: Setting, recompute: int, length: int) -> dict[str, Floats]:
    """Return the shares of a part's memory for every span, as sums over one-layer parts.

    The received input, which each of these parts has, is counted once per span.
    """
    count = layers.num_layers
    singles = layers.memory_of_spans(setting, [Span(i, i + 1, recompute) for i in range(count)])
    matrices = {}
    for join, shares in ((spans_matrix, _SUMMED), (_largest, _LARGEST)):
        for name, share in shares.items():
            matrices[name] = join(np.array([share(part, length) for part in singles], float))
    if any(part.whole_bytes_per_token is None for part in singles):
        matrices["whole"] = matrices["store"] + matrices["store_grad"]
    # a part receives one input, however many layers it has: two joined layers reveal its size
    if count > 3:
        pair = [Span(0, 1, recompute), Span(1, 3, recompute), *(Span(i, i + 1, recompute) for i in range(3, count))]
        joined = layers.memory_of_spans(setting, pair)[1].slice_bytes_per_token
        base = singles[1].slice_bytes_per_token + singles[2].slice_bytes_per_token - joined
        sizes = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None]
        matrices["slice"] = matrices["slice"] - base * length * np.maximum(sizes - 1, 0)
    # the only part of a one-stage pipeline differs from every sum of parts: it has a tied matrix once
    (alone,) = layers.memory_of_spans(setting, [Span(0, count, recompute)])
    for name in ("lasting", "static", "slice"):
        matrices[name][0, count] = _SUMMED[name](alone, length)
    sent = np.array([part.working_sent_bytes_per_token * length for part in singles] + [0.0])
    matrices["sent"] = np.broadcast_to(sent[:, None], matrices["static"].shape)  # by the first layer of a span
    return matrices


def _largest(values: Floats) -> Floats:
    count = len(values)
    matrix = np.full((count + 1, count + 1), np.inf)
    is_span = np.triu(np.ones((count, count), bool))  # by first and last layer
    largest = np.maximum.accumulate(np.where(is_span, values, -np.inf), axis=1)
    matrix[:-1, 1:] = np.where(is_span, largest, np.inf)
    return matrix
