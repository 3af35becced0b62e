"""Share numbers among candidates: the seconds of layers in slices, and the memory of every span of layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.layers.cuts import Bounds, best_cuts, spans_matrix
from terapipe_ds.planner.layers.parts import Floats, Layers, Setting, Span
from terapipe_ds.planner.memory import PartMemory


@functools.lru_cache(maxsize=512)
def layer_seconds(
    layers: Layers, setting: Setting, recompute: int, length: int, num_slices: int
) -> tuple[Floats, Floats]:
    """Return, per layer, the seconds of all forwards and of all backwards of a micro-batch in equal slices."""
    costs, plan = layers.layer_costs(setting, recompute), SlicePlan.equal(length, num_slices)
    times = {key: _seconds(cost, plan) for key, cost in {id(cost): cost for cost in costs}.items()}
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


def _seconds(cost: Any, plan: SlicePlan) -> tuple[float, float]:
    if getattr(cost, "vectorized", False):
        tokens, prefixes = np.array(plan.lengths), np.array(plan.starts)
        return float(np.sum(cost.forward_s(tokens, prefixes))), float(np.sum(cost.backward_s(tokens, prefixes)))
    spans = list(zip(plan.lengths, plan.starts, strict=True))
    return sum(cost.forward_s(*span) for span in spans), sum(cost.backward_s(*span) for span in spans)


def whole_of(cost: Any, length: int) -> tuple[float, float]:
    """Return the work of a whole sequence, and the least forward of a first slice."""
    return float(cost.forward_s(length, 0) + cost.backward_s(length, 0)), float(cost.forward_s(1, 0))


def least_of(cost: Any, length: int) -> tuple[float, float]:
    """Return the least work of any possible slices, by a program over their ends, and the least first forward."""
    edges = [*range(0, length, granule_of(length)), length]
    seconds = {span: _seconds_of(cost, span) for span in itertools.combinations(edges, 2)}
    least = {0: 0.0}
    for stop in edges[1:]:
        least[stop] = min(least[start] + sum(seconds[start, stop]) for start in edges if start < stop)
    return least[length], min(seconds[0, stop][0] for stop in edges[1:])


def _seconds_of(cost: Any, span: tuple[int, int]) -> tuple[float, float]:
    tokens, prefix = span[1] - span[0], span[0]
    return float(cost.forward_s(tokens, prefix)), float(cost.backward_s(tokens, prefix))


def granule_of(length: int) -> int:
    """Return the tokens at whose multiples slices end: 64, or more where 64 would make more than 64 granules."""
    return min(length, max(64, 1 << max(0, (length // 64 - 1).bit_length())))


@functools.lru_cache(maxsize=64)  # some 100 MB
def memory_matrices(layers: Layers, setting: Setting, recompute: int, length: int) -> dict[str, Floats]:
    """Return the shares of a part's memory for every span, as sums over one-layer parts.

    The received input, which each of these parts has, is counted once per span.
    """
    count = layers.num_layers
    singles = layers.memory_of_spans(setting, [Span(i, i + 1, recompute) for i in range(count)])
    # sums over the layers of a span
    matrices = {}
    for name, field, per_token in (
        ("static", "static_bytes", 1),
        ("gradient", "gradient_bytes", 1),
        ("slice", "slice_bytes_per_token", length),
        ("store", "store_bytes_per_token", length),
        ("store_grad", "store_grad_bytes_per_token", length),
        ("joined", "joined_bytes_per_token", length),
    ):
        matrices[name] = spans_matrix(np.array([getattr(part, field) for part in singles]) * float(per_token))
    weights = [
        p.slice_bytes_per_token if p.weight_bytes_per_token is None else p.weight_bytes_per_token for p in singles
    ]
    matrices["weight"] = spans_matrix(np.array(weights) * float(length))
    matrices["lasting"] = matrices["static"]
    matrices["static"] = matrices["static"] + matrices.pop("gradient")
    # a part receives one input, however many layers it has: two joined layers reveal its size
    if count > 3:
        pair = [Span(0, 1, recompute), Span(1, 3, recompute), *(Span(i, i + 1, recompute) for i in range(3, count))]
        joined = layers.memory_of_spans(setting, pair)[1].slice_bytes_per_token
        base = singles[1].slice_bytes_per_token + singles[2].slice_bytes_per_token - joined
        sizes = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None]
        matrices["slice"] = matrices["slice"] - base * length * np.maximum(sizes - 1, 0)
    # the only part of a one-stage pipeline differs from every sum of parts: it has a tied matrix once
    (alone,) = layers.memory_of_spans(setting, [Span(0, count, recompute)])
    for name, number in (
        ("lasting", float(alone.static_bytes)),
        ("static", float(alone.static_bytes + alone.gradient_bytes)),
        ("slice", alone.slice_bytes_per_token * float(length)),
    ):
        matrices[name][0, count] = number
    # of the working bytes, a span needs the largest
    matrices["whole"] = _whole(singles, matrices, length)
    working = [part.working_bytes_per_token for part in singles]
    whole = [part.working_whole_bytes_per_token for part in singles]
    matrices["working"] = _largest([rate * length for rate in working])
    matrices["working_whole"] = _largest([(rate + more) * length for rate, more in zip(working, whole, strict=True)])
    matrices["copied"] = _largest([part.working_copied_bytes_per_token * length for part in singles])
    matrices["factors"] = _largest([part.working_factor_bytes_per_token * length for part in singles])
    beside = [part.working_bytes_per_token - part.working_gone_bytes_per_token for part in singles]
    matrices["beside"] = _largest([rate * length for rate in beside])
    matrices["reread"] = _largest([part.working_bytes_per_prefix_token * length for part in singles])
    sent = np.array([part.working_sent_bytes_per_token * length for part in singles] + [0.0])
    matrices["sent"] = np.broadcast_to(sent[:, None], matrices["static"].shape)  # by the first layer of a span
    matrices["loss"] = _largest([part.loss_bytes_per_token for part in singles])
    matrices["fixed"] = _largest([float(part.working_bytes) for part in singles])
    matrices["fixed_whole"] = _largest([float(part.working_bytes + part.working_whole_bytes) for part in singles])
    return matrices


def _whole(singles: Sequence[PartMemory], matrices: dict[str, Floats], length: int) -> Floats:
    """Return the keys and values of a micro-batch in one slice."""
    rates = [part.whole_bytes_per_token for part in singles]
    if None in rates:
        return matrices["store"] + matrices["store_grad"]
    return spans_matrix(np.array(rates, float) * length)


def _largest(values: Sequence[float]) -> Floats:
    """Return the largest value of every span."""
    count = len(values)
    matrix = np.full((count + 1, count + 1), np.inf)
    is_span = np.triu(np.ones((count, count), bool))  # by first and last layer
    largest = np.maximum.accumulate(np.where(is_span, np.array(values), -np.inf), axis=1)
    matrix[:-1, 1:] = np.where(is_span, largest, np.inf)
    return matrix
