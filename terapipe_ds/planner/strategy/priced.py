"""What one candidate costs: a proven bound, an estimate of every cut, and the replay of the schedule that will run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.cluster import Cluster, Grid
from terapipe_ds.planner.layers.parts import Floats, Layers, PartCosts, Setting, Span, Wire, spans_of
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.planner.strategy.cuts import Bounds, best_cuts, least_maximum, spans_matrix
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay

FEW = 10_000  # computations of one replay; above, fewer micro-batches stand for all of them


@dataclass(frozen=True)
class Candidate:
    """Degrees, placement, micro-batches and ZeRO: all that is chosen before the layers are cut."""

    grid: Grid
    micro_batch: int
    accumulation: int
    zero_stage: int

    @property
    def setting(self) -> Setting:
        return Setting(self.grid.model, self.micro_batch, self.grid.data, self.zero_stage)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Return what decides between candidates that take the same time: less of everything."""
        grid = self.grid
        return grid.model, grid.pipe, self.zero_stage, self.micro_batch, grid.axes != ("pipe", "data", "model")


@dataclass(frozen=True)
class Score:
    """A candidate with its cut, schedule and slices: what it takes, or about what it takes."""

    seconds: float
    candidate: Candidate
    bounds: Bounds
    recompute: tuple[bool, ...]
    schedule: str
    plan: SlicePlan
    peak_bytes: tuple[int, ...]
    is_whole: bool  # every micro-batch was replayed

    @property
    def rank(self) -> tuple[Any, ...]:
        return self.seconds, self.plan.num_slices, self.candidate.rank, self.schedule, self.bounds


@functools.lru_cache(maxsize=24)
def replay_of(schedule: str, num_stages: int, num_micro_batches: int, num_slices: int) -> Replay:
    """Return the replay of a schedule; candidates of the same shape share it."""
    return Replay(build(schedule, num_stages, num_micro_batches, num_slices))


class Priced:
    """One candidate on one cluster. The costs of layers are those of `Layers`."""

    def __init__(self, layers: Layers, cluster: Cluster, sequence_length: int, candidate: Candidate) -> None:
        self.layers, self.cluster, self.length, self.candidate = layers, cluster, sequence_length, candidate
        self.num_stages, self.num_micro_batches = candidate.grid.pipe, candidate.accumulation

    # --- a bound that no cut, schedule or plan beats

    def lower_bound_s(self, limit_bytes: float | None = None) -> float:
        """Return what this candidate takes at least, whatever the cut, the schedule and the slices.

        A stage waits for the first slice to come down to it, does the work of all micro-batches, and then reduces and
        steps. Slices together take at least what the least work of a layer is, a first slice at least what the cheapest
        one does, and a reduction at least what it would on the best placed stage. Unsliced, the last backward also goes
        up to stage 0, which then reduces and steps. With a limit, a stage recomputes where its parameters and what one
        micro-batch keeps are more than it allows: backwards come in reverse, so that all of its slices are live once.
        """
        work, first, last = self._least
        fills, drains = (np.concatenate(([0.0], np.cumsum(part)))[:, None] for part in (first, last))
        ends = self._least_ends
        times = spans_matrix(work)
        if limit_bytes is not None:
            again_s = spans_matrix(self._forward_again)
            off, full = (self._least_peaks(again) <= limit_bytes for again in (False, True))
            times = np.where(off, times, np.where(full, times + again_s, np.inf))
        total = fills + self.num_micro_batches * times
        rising = total + spans_matrix(ends)
        back = total + drains + ends[0]
        return least_maximum([np.maximum(rising, back)] * self.num_stages)

    def cut_bound_s(self, bounds: Bounds) -> float:
        """Return the same for one cut."""
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
        Costs of a user may say otherwise, so there it is the least rate of any slice that can be cut.
        """
        if not self.layers.is_sliceable:
            forward, backward = self._sliced(False, 1)
            return forward + backward, forward, backward
        costs = self._costs(False)
        least = _whole_of if self.layers.whole_is_least else _least_of
        numbers = {key: least(cost, self.length) for key, cost in {id(cost): cost for cost in costs}.items()}
        work, first = (np.array([numbers[id(cost)][i] for cost in costs]) for i in range(2))
        return work, first, np.zeros_like(work)

    @functools.cached_property
    def _forward_again(self) -> Floats:
        """Return, per layer, what recomputing adds to a whole sequence, or to the cheapest slices of one."""
        if not self.layers.whole_is_least and self.layers.is_sliceable:
            return np.zeros(self.layers.num_layers)
        off, full = (self._sliced(again, 1)[1] for again in (False, True))
        return full - off

    def _least_peaks(self, recompute: bool) -> Floats:
        """Return less than any stage holds, for every span: parameters, states, and what one micro-batch keeps."""
        rates = self._rates[recompute]
        return rates["lasting"] + rates["slice"] + np.minimum(rates["whole"], rates["store"])

    @functools.cached_property
    def _least_ends(self) -> Floats:
        summed, moved = self.layers.end_bytes(self.candidate.setting)
        rate = min(per_byte for _, per_byte in self._reductions)
        return rate * summed + moved / self._reachable

    @functools.cached_property
    def _reductions(self) -> list[tuple[float, float]]:
        """Return, per stage, the seconds of a reduction of nothing, and per byte."""
        grid, large = self.candidate.grid, 1e12
        starts = [grid.all_reduce_s(0.0, k, self.cluster) for k in range(self.num_stages)]
        return [(s, (grid.all_reduce_s(large, k, self.cluster) - s) / large) for k, s in enumerate(starts)]

    @property
    def _reachable(self) -> float:
        return self.cluster.card.memory_bandwidth_bytes_per_s * self.cluster.card.bandwidth_efficiency

    # --- cuts

    def estimates(self, num_slices: int, limit_bytes: float) -> list[tuple[float, Bounds]]:
        """Return cuts for so many equal slices with about the seconds that each takes, the least first."""
        stages, counts = range(self.num_stages), self.num_micro_batches
        off, full = (spans_matrix(self._work(num_slices, again)) for again in (False, True))
        times = []
        for stage_id in stages:
            fits = [self._peaks(stage_id, num_slices, again) <= limit_bytes for again in (False, True)]
            times.append(np.where(fits[0], off, np.where(fits[1], full, np.inf)))
        sent = self.length * np.concatenate(([0.0], self.layers.output_bytes(self.candidate.setting)))
        sent[-1] = 0.0
        extras = []
        for stage_id in stages:
            link = self.candidate.grid.link(stage_id - 1, stage_id, self.cluster) if stage_id else None
            wire_s = sent / link.bandwidth_bytes_per_s + link.latency_s * num_slices if link else 0.0 * sent
            extras.append(np.broadcast_to(2 * wire_s[:, None], off.shape))
        cuts = best_cuts(times, extras, counts - 1 / num_slices, 1 / num_slices)
        return [(value + max(self.ends_s(bounds)), bounds) for value, bounds in cuts]

    def least_bytes(self, num_slices: int) -> float:
        """Return about the least limit that some cut fits in, with everything recomputed."""
        return least_maximum([self._peaks(k, num_slices, True) for k in range(self.num_stages)])

    def _work(self, num_slices: int, recompute: bool) -> Floats:
        forward, backward = self._sliced(recompute, num_slices)
        return forward + backward

    def _costs(self, recompute: bool) -> Sequence[Any]:
        return self.layers.layer_costs(self.candidate.setting, recompute)

    def _sliced(self, recompute: bool, num_slices: int) -> tuple[Floats, Floats]:
        setting = Setting(self.candidate.grid.model, self.candidate.micro_batch)  # times know no replicas
        return _layer_seconds(self.layers, setting, recompute, self.length, num_slices)

    def _peaks(self, stage_id: int, num_slices: int, recompute: bool) -> Floats:
        """Return about the most bytes of a stage, for every span, under `1f1b` or `seq1f1b`."""
        rates, rows = self._rates[recompute], self.num_micro_batches
        deep = self.num_stages - stage_id
        live = min(rows, deep) if num_slices == 1 else min(rows * num_slices, deep + num_slices - 1) / num_slices
        stores = min(rows, deep) if num_slices == 1 else min(rows, -(-(deep + num_slices - 1) // num_slices))
        peak = rates["static"] + live * rates["slice"] + rates["working"] / num_slices + rates["fixed"]
        whole = rates["whole"] if num_slices == 1 else rates["store"]
        return np.asarray(peak + stores * whole + (0.0 if num_slices == 1 else rates["store_grad"]))

    @functools.cached_property
    def _rates(self) -> dict[bool, dict[str, Floats]]:
        return {
            again: _memory_matrices(self.layers, self.candidate.setting, again, self.length) for again in (False, True)
        }

    # --- one cut, exactly

    def ends_s(self, bounds: Bounds) -> list[float]:
        """Return, per stage, the seconds of its reduction, of the tied one, and of its optimizer step."""
        setting = self.candidate.setting
        summed, moved = self.layers.end_bytes(setting)
        seconds = []
        for (start, stop), (fixed_s, per_byte) in zip(itertools.pairwise(bounds), self._reductions, strict=True):
            seconds.append(fixed_s + per_byte * summed[start:stop].sum() + moved[start:stop].sum() / self._reachable)
        tied = self.layers.tied_bytes(setting)
        if tied and self.num_stages > 1:
            link = self.candidate.grid.link(0, self.num_stages - 1, self.cluster)
            tied_s = tied / link.bandwidth_bytes_per_s + 2 * link.latency_s
            seconds[0], seconds[-1] = seconds[0] + tied_s, seconds[-1] + tied_s
        return seconds

    def parts(self, bounds: Bounds, recompute: Sequence[bool]) -> list[PartCosts]:
        """Return the costs of the parts, with the links of the machines that they are on."""
        grid = self.candidate.grid
        sent = self.layers.output_bytes(self.candidate.setting)
        wires: list[Wire | None] = [None]
        for stage_id in range(1, self.num_stages):
            wires.append(Wire(grid.link(stage_id - 1, stage_id, self.cluster), float(sent[bounds[stage_id] - 1])))
        wires.append(None)
        costs = {again: self._costs(again) for again in set(recompute)}
        kept: dict[Any, PartCosts] = {}
        parts = []
        for k, (span, again) in enumerate(zip(itertools.pairwise(bounds), recompute, strict=True)):
            layers = costs[again][slice(*span)]
            key = tuple(map(id, layers)), wires[k + 1], wires[k]
            parts.append(kept.setdefault(key, PartCosts(layers, wires[k + 1], wires[k])))
        return parts

    def memory(self, bounds: Bounds, recompute: Sequence[bool]) -> MemoryModel:
        """Return the memory of the parts."""
        return MemoryModel(self.layers.memory_of_spans(self.candidate.setting, spans_of(bounds, recompute)))

    def fitting(
        self, bounds: Bounds, schedule: str, plan: SlicePlan, limit_bytes: float
    ) -> tuple[tuple[bool, ...], tuple[int, ...]] | None:
        """Return which stages recompute, and the peaks: those that do not fit otherwise. None where one never fits."""
        off = (False,) * self.num_stages
        peaks = self._peaks_of(bounds, off, schedule, plan)
        if max(peaks) <= limit_bytes:
            return off, peaks
        some = tuple(peak > limit_bytes for peak in peaks)
        peaks = self._peaks_of(bounds, some, schedule, plan)
        return (some, peaks) if max(peaks) <= limit_bytes else None

    def score(
        self, bounds: Bounds, schedule: str, plan: SlicePlan, limit_bytes: float, whole: bool = True
    ) -> Score | None:
        """Return what a cut takes under a schedule, replayed; None where it does not fit in memory."""
        fits = self.fitting(bounds, schedule, plan, limit_bytes)
        if fits is None:
            return None
        recompute, peaks = fits
        parts, ends_s = self.parts(bounds, recompute), self.ends_s(bounds)
        most = self.num_micro_batches
        per_micro_batch = 2 * self.num_stages * plan.num_slices
        few = max(2 * self.num_stages, 4, FEW // per_micro_batch)
        is_whole = whole or few >= most

        def batch_s(count: int) -> float:
            replay = replay_of(schedule, self.num_stages, count, plan.num_slices)
            done_s = replay.ends_of_stages(plan, parts)
            return max(done + end for done, end in zip(done_s, ends_s, strict=True))

        if is_whole:
            seconds = batch_s(most)
        else:
            long_s, short_s = batch_s(few), batch_s(few // 2)
            seconds = long_s + (most - few) * (long_s - short_s) / (few - few // 2)
        return Score(seconds, self.candidate, bounds, recompute, schedule, plan, peaks, is_whole)

    def _peaks_of(self, bounds: Bounds, recompute: Sequence[bool], schedule: str, plan: SlicePlan) -> tuple[int, ...]:
        slices, stages, most = plan.num_slices, self.num_stages, self.num_micro_batches
        few = {"1f1b": stages + 1, "seq1f1b": -(-stages // slices) + 3}.get(schedule, most)
        return replay_of(schedule, stages, min(few, most), slices).peak_bytes(plan, self.memory(bounds, recompute))


@functools.lru_cache(maxsize=512)
def _layer_seconds(
    layers: Layers, setting: Setting, recompute: bool, length: int, num_slices: int
) -> tuple[Floats, Floats]:
    """Return, per layer, the seconds of all forwards and of all backwards of a micro-batch in equal slices."""
    costs, plan = layers.layer_costs(setting, recompute), SlicePlan.equal(length, num_slices)
    times = {key: _seconds(cost, plan) for key, cost in {id(cost): cost for cost in costs}.items()}
    forward, backward = (np.array([times[id(cost)][i] for cost in costs]) for i in range(2))
    return forward, backward


def _seconds(cost: Any, plan: SlicePlan) -> tuple[float, float]:
    if getattr(cost, "vectorized", False):
        tokens, prefixes = np.array(plan.lengths), np.array(plan.starts)
        return float(np.sum(cost.forward_s(tokens, prefixes))), float(np.sum(cost.backward_s(tokens, prefixes)))
    spans = list(zip(plan.lengths, plan.starts, strict=True))
    return sum(cost.forward_s(*span) for span in spans), sum(cost.backward_s(*span) for span in spans)


def _whole_of(cost: Any, length: int) -> tuple[float, float]:
    """Return the work of a whole sequence, and the least forward of a first slice."""
    return float(cost.forward_s(length, 0) + cost.backward_s(length, 0)), float(cost.forward_s(1, 0))


def _least_of(cost: Any, length: int) -> tuple[float, float]:
    """Return the least work of any slices that can be cut, by a program over their ends, and of a first forward."""
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
    """Return the tokens at whose multiples sequences are cut: 64, or more where that is more than 64 granules."""
    return min(length, max(64, 1 << max(0, (length // 64 - 1).bit_length())))


@functools.lru_cache(maxsize=8)  # the axes in their orders come one after the other
def _memory_matrices(layers: Layers, setting: Setting, recompute: bool, length: int) -> dict[str, Floats]:
    """Return the shares of a part's memory for every span, as sums over layers that are parts of their own.

    What each such part has as a part (its received input) is counted once per span.
    """
    count = layers.num_layers
    singles = layers.memory_of_spans(setting, [Span(i, i + 1, recompute) for i in range(count)])
    matrices = {}
    for name, field, per_token in (
        ("static", "static_bytes", 1),
        ("gradient", "gradient_bytes", 1),
        ("slice", "slice_bytes_per_token", length),
        ("store", "store_bytes_per_token", length),
        ("store_grad", "store_grad_bytes_per_token", length),
    ):
        matrices[name] = spans_matrix(np.array([getattr(part, field) for part in singles]) * float(per_token))
    matrices["lasting"] = matrices["static"]
    matrices["static"] = matrices["static"] + matrices.pop("gradient")
    if count > 3:
        pair = [Span(0, 1, recompute), Span(1, 3, recompute), *(Span(i, i + 1, recompute) for i in range(3, count))]
        joined = layers.memory_of_spans(setting, pair)[1].slice_bytes_per_token
        base = singles[1].slice_bytes_per_token + singles[2].slice_bytes_per_token - joined
        sizes = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None]
        matrices["slice"] = matrices["slice"] - base * length * np.maximum(sizes - 1, 0)
    matrices["whole"] = _whole(singles, matrices, recompute, length)
    matrices["working"] = _largest([part.working_bytes_per_token * length for part in singles])
    matrices["working"] += _largest([part.working_bytes_per_prefix_token * length for part in singles])
    matrices["fixed"] = _largest([float(part.working_bytes) for part in singles])
    return matrices


def _whole(singles: Sequence[PartMemory], matrices: dict[str, Floats], recompute: bool, length: int) -> Floats:
    """Return what a micro-batch in one slice keeps of keys and values; recomputed, that of one layer."""
    rates = [part.whole_bytes_per_token for part in singles]
    if None in rates:
        return matrices["store"] + matrices["store_grad"]
    numbers = np.array(rates, float) * length
    return _largest(numbers.tolist()) if recompute else spans_matrix(numbers)


def _largest(values: Sequence[float]) -> Floats:
    """Return the largest value of every span."""
    count = len(values)
    matrix = np.full((count + 1, count + 1), np.inf)
    for start in range(count):
        matrix[start, start + 1 :] = np.maximum.accumulate(np.array(values[start:]))
    return matrix
