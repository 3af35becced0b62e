"""Bound the time of one candidate from below, for every cut, schedule and plan, and hold the costs behind it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.costs.interface import know_weights
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.layers.cuts import Bounds, least_maximum, spans_matrix
from terapipe_ds.planner.layers.parts import Floats, Layers, Setting
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.rates import layer_seconds, least_of, memory_matrices, whole_of


class Bounded:
    """Hold one candidate on one cluster, with the costs of `Layers`, and its proven bounds."""

    def __init__(self, layers: Layers, cluster: Cluster, sequence_length: int, candidate: Candidate) -> None:
        self.layers, self.cluster, self.length, self.candidate = layers, cluster, sequence_length, candidate
        self.num_stages, self.num_micro_batches = candidate.grid.pipe, candidate.accumulation

    @functools.cached_property
    def can_split(self) -> bool:
        """Return whether the seconds of every layer's weight gradients are known."""
        return know_weights(self._costs(False))

    def lower_bound_s(self, limit_bytes: float = np.inf) -> float:
        """Return a lower bound on the seconds of this candidate, whatever the cut, the schedule and the slices.

        A stage waits for the first slice to come down to it, does the work of all micro-batches, and then reduces and
        steps. All slices together take at least the least work of a layer, a first slice at least as long as the
        cheapest one, and a reduction at least as long as on the best placed stage. Unsliced, the last backward also
        goes up to stage 0, which then reduces and steps. With a limit, a stage recomputes where its parameters and the
        kept bytes of one micro-batch exceed the limit: backwards come in reverse, so all its slices are live at once.
        """
        work, first, last = self._least
        fills, drains = (np.concatenate(([0.0], np.cumsum(part)))[:, None] for part in (first, last))
        ends = self._least_ends
        times = spans_matrix(work)
        if limit_bytes < np.inf:
            off, full = (self._least_peaks(again) <= limit_bytes for again in (False, True))
            times = np.where(off, times, np.where(full, times + spans_matrix(self._forward_again), np.inf))
        # entry [j, i] belongs to a stage with the layers in [j, i): its own end, or the way back to stage 0
        total = fills + self.num_micro_batches * times
        rising = total + spans_matrix(ends)
        back = total + drains + ends[0]
        return least_maximum([np.maximum(rising, back)] * self.num_stages)

    def chunked_bound_s(self, limit_bytes: float = np.inf) -> float:
        """Return the bound where stages hold several parts, or split their backwards; infinity where they cannot fit.

        The slowest stage takes no less than the mean of all. A stage k does its share of the work of all
        micro-batches, and then reduces and steps for its layers. Its first part comes after at least k others, which
        have a layer each: it waits for the first slice to come through the first k layers.

        Also, if n layers each take at least some time, one stage has at least n / K of them, rounded up. Where these do
        not fit in its memory, it recomputes them.
        """
        work, first, _ = self._least
        waits = np.cumsum(first)[: self.num_stages - 1].sum()
        mean = (self.num_micro_batches * work.sum() + self._least_ends.sum() + waits) / self.num_stages
        heaviest = np.argsort(-work, kind="stable")
        counts = -(-np.arange(1, len(work) + 1) // self.num_stages)
        shared_s = counts * work[heaviest]
        if limit_bytes < np.inf:
            layers = np.arange(len(work)), np.arange(len(work)) + 1
            saved, inputs = (self._rates[again]["slice"][layers] for again in (False, True))
            less = np.maximum(0.0, inputs - saved).sum()  # of layers that save less than their input
            if self._least_peaks(True)[0, -1] - less > limit_bytes * self.num_stages:
                return np.inf
            off, full = (
                counts * np.minimum.accumulate(self._least_of_layers(again)[heaviest]) for again in (False, True)
            )
            again_s = counts * np.minimum.accumulate(self._forward_again[heaviest])
            shared_s = np.where(off <= limit_bytes, shared_s, np.where(full <= limit_bytes, shared_s + again_s, np.inf))
        return float(max(mean, self.num_micro_batches * shared_s.max()))

    def _least_of_layers(self, recompute: int) -> Floats:
        """Return a lower bound on the bytes that each layer adds to a stage with other layers."""
        rates, starts = self._rates[recompute], np.arange(self.layers.num_layers)
        layers = starts, starts + 1
        slices = rates["slice"][layers]
        received = max(0.0, slices[:2].sum() - rates["slice"][0, 2]) if len(starts) > 1 else 0.0  # once per span
        if self.candidate.levers.offload_activations:  # a slice is on the device for a moment only
            slices = 0.0 * slices
        stores = 0.0 * slices if recompute else np.minimum(rates["whole"], rates["store"])[layers]
        lasting = rates["lasting"][layers] - rates["tied"][layers]  # the first layer's stage may be the last one's
        return np.asarray(lasting + np.maximum(0.0, slices - received) + stores)

    def cut_bound_s(self, bounds: Bounds) -> float:
        work, first, last = (np.concatenate(([0.0], np.cumsum(part))) for part in self._least)
        ends = np.concatenate(([0.0], np.cumsum(self._least_ends)))
        starts, stops = np.array(bounds[:-1]), np.array(bounds[1:])
        total = first[starts] + self.num_micro_batches * (work[stops] - work[starts])
        rising, back = total + ends[stops] - ends[starts], total + last[starts] + ends[stops[0]]
        return float(np.maximum(rising, back).max())

    @functools.cached_property
    def _least(self) -> tuple[Floats, Floats, Floats]:
        """Return, per layer, the least work of a micro-batch, and of its first slice down and up.

        For costs whose sums over slices are not below the whole (rooflines with launch floors) the whole is the least.
        A user's costs may differ, so there it is the least rate of any possible slice.
        """
        if not self.layers.is_sliceable:
            forward, backward = self._sliced(False, 1)
            return forward + backward, forward, backward
        costs = self._costs(False)
        least = whole_of if self.layers.whole_is_least else least_of
        numbers = {key: least(cost, self.length) for key, cost in {id(cost): cost for cost in costs}.items()}
        work, first = (np.array([numbers[id(cost)][i] for cost in costs]) for i in range(2))
        return work, first, np.zeros_like(work)

    @functools.cached_property
    def _forward_again(self) -> Floats:
        """Return, per layer, the seconds that recomputing adds to a whole sequence, or to its cheapest slices."""
        if not self.layers.whole_is_least and self.layers.is_sliceable:
            return np.zeros(self.layers.num_layers)
        off, *others = (self._sliced(again, 1)[1] for again in self.layers.kinds)
        return np.asarray(np.minimum.reduce(others) - off)

    def _least_peaks(self, recompute: int) -> Floats:
        """Return a lower bound on a stage's bytes, per span: parameters, states, and one micro-batch's kept bytes."""
        rates = self._rates[recompute]
        lasting = rates["lasting"] + self._process_bytes
        if self.candidate.levers.offload_activations:  # a sequence in one slice is whole while its F runs
            return lasting + np.minimum(rates["whole"] + rates["slice"], rates["store"])
        return lasting + rates["slice"] + np.minimum(rates["whole"], rates["store"])

    @functools.cached_property
    def _least_ends(self) -> Floats:
        summed, moved = self.layers.end_bytes(self.candidate.setting)
        rate = min(per_byte for _, per_byte in self._reductions)
        return rate * summed + moved / self.cluster.card.reachable_bytes_per_s

    @functools.cached_property
    def _reductions(self) -> list[tuple[float, float]]:
        """Return, per stage, the seconds of a reduction of 0 bytes, and the seconds per byte."""
        grid, large = self.candidate.grid, 1e12
        starts = [self.cluster.all_reduce_s(grid, 0.0, k) for k in range(self.num_stages)]
        return [(s, (self.cluster.all_reduce_s(grid, large, k) - s) / large) for k, s in enumerate(starts)]

    @functools.cached_property
    def _process_bytes(self) -> int:
        return self.cluster.process_bytes(self.candidate.grid)

    # --- costs

    def _costs(self, recompute: int) -> Sequence[Any]:
        return self.layers.layer_costs(self.candidate.setting, recompute)

    def _sliced(self, recompute: int, num_slices: int) -> tuple[Floats, Floats]:
        grid = self.candidate.grid  # times do not depend on replicas
        setting = Setting(grid.model, self.candidate.micro_batch, sequence=grid.sequence)
        return layer_seconds(self.layers, setting, recompute, self.length, num_slices)

    @functools.cached_property
    def _rates(self) -> dict[int, dict[str, Floats]]:
        return {
            again: memory_matrices(self.layers, self.candidate.setting, again, self.length)
            for again in self.layers.kinds
        }
