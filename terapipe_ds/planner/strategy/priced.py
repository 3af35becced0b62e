"""What one candidate costs: a proven bound, an estimate of every cut, and the replay of the schedule that will run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.layers.parts import Floats, Layers, PartCosts, Setting, Wire, spans_of
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.planner.strategy.candidate import Candidate, Score, owners_of, replay_of
from terapipe_ds.planner.strategy.cuts import Bounds, best_cuts, least_maximum, spans_matrix
from terapipe_ds.planner.strategy.rates import layer_seconds, least_of, memory_matrices, whole_of
from terapipe_ds.schedule import SPLIT_SCHEDULES

FEW = 10_000  # computations of one replay; above, fewer micro-batches stand for all of them


class Priced:
    """One candidate on one cluster. The costs of layers are those of `Layers`."""

    def __init__(self, layers: Layers, cluster: Cluster, sequence_length: int, candidate: Candidate) -> None:
        self.layers, self.cluster, self.length, self.candidate = layers, cluster, sequence_length, candidate
        self.num_stages, self.num_micro_batches = candidate.grid.pipe, candidate.accumulation

    @property
    def can_split(self) -> bool:
        """Return whether it is known what the weight gradients of every layer take."""
        return all(
            callable(getattr(cost, "weight_s", None)) for cost in {id(c): c for c in self._costs(False)}.values()
        )

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

    def chunked_bound_s(self, limit_bytes: float | None = None) -> float:
        """Return what this candidate takes at least where stages hold several parts, or split their backwards.

        The slowest stage takes no less than the mean of all. A stage k does its share of the work of all
        micro-batches, and then reduces and steps for its layers. Its first part comes after at least k others, which
        have a layer each: it waits for the first slice to come through the first k layers. With a limit, what all
        stages hold at least may be more than all may hold. Then layers are recomputed that hold the excess, and that
        takes no less than where a byte takes the least.

        Also, of n layers that take some time or more, one stage has at least n / K, rounded up. Where so many do not
        fit in its memory, it recomputes them.
        """
        work, first, _ = self._least
        waits = np.cumsum(first)[: self.num_stages - 1].sum()
        again_s = 0.0 if limit_bytes is None else self._least_again_s(limit_bytes)
        mean = (self.num_micro_batches * (work.sum() + again_s) + self._least_ends.sum() + waits) / self.num_stages
        heaviest = np.argsort(-work, kind="stable")
        counts = -(-np.arange(1, len(work) + 1) // self.num_stages)
        shared_s = counts * work[heaviest]
        if limit_bytes is not None:
            off, full = (
                counts * np.minimum.accumulate(self._least_of_layers(again)[heaviest]) for again in (False, True)
            )
            again = counts * np.minimum.accumulate(self._forward_again[heaviest])
            shared_s = np.where(off <= limit_bytes, shared_s, np.where(full <= limit_bytes, shared_s + again, np.inf))
        return float(max(mean, self.num_micro_batches * shared_s.max()))

    def _least_of_layers(self, recompute: bool) -> Floats:
        """Return less than each layer adds to what a stage holds, next to others."""
        rates, starts = self._rates[recompute], np.arange(self.layers.num_layers)
        each = starts, starts + 1
        slices = rates["slice"][each]
        received = max(0.0, slices[:2].sum() - rates["slice"][0, 2]) if len(starts) > 1 else 0.0  # once per span
        stores = 0.0 * slices if recompute else np.minimum(rates["whole"], rates["store"])[each]
        return np.asarray(rates["lasting"][each] + np.maximum(0.0, slices - received) + stores)

    def _least_again_s(self, limit_bytes: float) -> float:
        """Return the seconds per micro-batch that all stages together recompute at least; infinite where none fits."""
        everything = (0, self.layers.num_layers)
        off, full = (float(self._least_peaks(again)[everything]) for again in (False, True))
        limit = limit_bytes * self.num_stages
        if full > limit:
            return np.inf
        rates, each = self._rates[False], (np.arange(everything[1]), np.arange(everything[1]) + 1)
        kept = rates["slice"][each] + np.minimum(rates["whole"], rates["store"])[each]
        per_byte = min((s / b for s, b in zip(self._forward_again, kept, strict=True) if b > 0), default=0.0)
        return float(max(0.0, off - limit) * per_byte)

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
        least = whole_of if self.layers.whole_is_least else least_of
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

    def chunked_cuts(self, num_slices: int, chunks: int) -> list[Bounds]:
        """Return cuts for several parts per stage, as equal as can be: the best first."""
        num_parts = chunks * self.num_stages
        if num_parts > self.layers.num_layers:
            return []
        work = spans_matrix(self._work(num_slices, False))
        nothing = np.zeros_like(work)
        cuts = best_cuts([work] * num_parts, [nothing] * num_parts, 1.0, 0.0)
        return [bounds for _, bounds in cuts]

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
        return layer_seconds(self.layers, setting, recompute, self.length, num_slices)

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
            again: memory_matrices(self.layers, self.candidate.setting, again, self.length) for again in (False, True)
        }

    # --- one cut, exactly

    def ends_s(self, bounds: Bounds, owners: Sequence[int] | None = None) -> list[float]:
        """Return, per stage, the seconds of its reduction, of the tied one, and of its optimizer step.

        Args:
            owners: the stage of each part; None: part k is on stage k.
        """
        owners = range(self.num_stages) if owners is None else owners
        setting = self.candidate.setting
        summed, moved = self.layers.end_bytes(setting)
        seconds = [fixed_s for fixed_s, _ in self._reductions]
        for (start, stop), stage_id in zip(itertools.pairwise(bounds), owners, strict=True):
            per_byte = self._reductions[stage_id][1]
            seconds[stage_id] += per_byte * summed[start:stop].sum() + moved[start:stop].sum() / self._reachable
        tied = self.layers.tied_bytes(setting)
        if tied and owners[0] != owners[-1]:
            link = self.candidate.grid.link(owners[0], owners[-1], self.cluster)
            for stage_id in (owners[0], owners[-1]):
                seconds[stage_id] += tied / link.bandwidth_bytes_per_s + 2 * link.latency_s
        return seconds

    def parts(self, bounds: Bounds, recompute: Sequence[bool], owners: Sequence[int] | None = None) -> list[PartCosts]:
        """Return the costs of the parts, with the links of the machines that they are on; `recompute` is per stage."""
        grid, owners = self.candidate.grid, range(self.num_stages) if owners is None else owners
        sent = self.layers.output_bytes(self.candidate.setting)
        wires: list[Wire | None] = [None]
        for bound, (one, other) in zip(bounds[1:-1], itertools.pairwise(owners), strict=True):
            wires.append(None if one == other else Wire(grid.link(one, other, self.cluster), float(sent[bound - 1])))
        wires.append(None)
        costs = {again: self._costs(again) for again in set(recompute)}
        kept: dict[Any, PartCosts] = {}
        parts = []
        for part_id, (span, stage_id) in enumerate(zip(itertools.pairwise(bounds), owners, strict=True)):
            layers = costs[recompute[stage_id]][slice(*span)]
            key = tuple(map(id, layers)), wires[part_id + 1], wires[part_id]
            parts.append(kept.setdefault(key, PartCosts(layers, wires[part_id + 1], wires[part_id])))
        return parts

    def memory(self, bounds: Bounds, recompute: Sequence[bool], owners: Sequence[int] | None = None) -> MemoryModel:
        """Return the memory of the parts; `recompute` is per stage."""
        again = [recompute[stage_id] for stage_id in (range(self.num_stages) if owners is None else owners)]
        return MemoryModel(self.layers.memory_of_spans(self.candidate.setting, spans_of(bounds, again)))

    def fitting(
        self, bounds: Bounds, schedule: str, plan: SlicePlan, limit_bytes: float, chunks: int = 1, whole: bool = True
    ) -> tuple[tuple[bool, ...], tuple[int, ...]] | None:
        """Return which stages recompute, and the peaks: those that do not fit otherwise. None where one never fits.

        `whole`: count the peaks over all micro-batches, and not over as many as nearly always have them.

        Nothing is recomputed where backwards are split: what W would take then is not known.
        """
        off = (False,) * self.num_stages
        count = self.num_micro_batches if whole else self._enough(schedule, plan.num_slices, chunks)
        peaks = self._peaks_of(bounds, off, schedule, plan, chunks, count)
        if max(peaks) <= limit_bytes:
            return off, peaks
        if schedule in SPLIT_SCHEDULES:
            return None
        some = tuple(peak > limit_bytes for peak in peaks)
        peaks = self._peaks_of(bounds, some, schedule, plan, chunks, count)
        return (some, peaks) if max(peaks) <= limit_bytes else None

    def score(
        self,
        bounds: Bounds,
        schedule: str,
        plan: SlicePlan,
        limit_bytes: float,
        whole: bool = True,
        chunks_per_stage: int = 1,
    ) -> Score | None:
        """Return what a cut takes under a schedule, replayed; None where it does not fit in memory.

        Unless `whole`, fewer micro-batches tell what many take with `1f1b` and `seq1f1b`, and what many keep.
        """
        fits = self.fitting(bounds, schedule, plan, limit_bytes, chunks_per_stage, whole)
        if fits is None:
            return None
        recompute, peaks = fits
        owners = owners_of(schedule, self.num_stages, chunks_per_stage)
        parts, ends_s = self.parts(bounds, recompute, owners), self.ends_s(bounds, owners)
        most, slices = self.num_micro_batches, plan.num_slices
        # two runs that both have filled the pipeline tell what another micro-batch takes
        few = max(2 * (-(-self.num_stages // slices) + 1), FEW // (2 * self.num_stages * slices))
        is_replayed = whole or few >= most or schedule not in ("1f1b", "seq1f1b")

        def batch_s(count: int) -> float:
            replay = replay_of(schedule, self.num_stages, count, slices, chunks_per_stage)
            done_s = replay.ends_of_stages(plan, parts)
            return max(done + end for done, end in zip(done_s, ends_s, strict=True))

        if is_replayed:
            seconds = batch_s(most)
        else:
            long_s, short_s = batch_s(few), batch_s(few // 2)
            seconds = long_s + (most - few) * (long_s - short_s) / (few - few // 2)
        is_whole = whole or (is_replayed and self._enough(schedule, slices, chunks_per_stage) >= most)
        how = schedule, plan, peaks, is_whole, chunks_per_stage
        return Score(seconds, self.candidate, bounds, recompute, *how)

    def _enough(self, schedule: str, slices: int, chunks: int) -> int:
        """Return of how many micro-batches the peaks are nearly always those of all; of two schedules proven."""
        stages = self.num_stages
        units = {"1f1b": stages * slices, "zb-h1": stages * slices, "seq1f1b": stages + 2 * slices}
        most_live = units.get(
            schedule, (chunks + 1) * stages * (slices if schedule == "interleaved" else 1) + 3 * slices
        )
        return min(self.num_micro_batches, -(-most_live // slices) + 1)

    def _peaks_of(
        self,
        bounds: Bounds,
        recompute: Sequence[bool],
        schedule: str,
        plan: SlicePlan,
        chunks: int,
        num_micro_batches: int,
    ) -> tuple[int, ...]:
        memory = self.memory(bounds, recompute, owners_of(schedule, self.num_stages, chunks))

        def peaks(count: int) -> tuple[int, ...]:
            return replay_of(schedule, self.num_stages, count, plan.num_slices, chunks).peak_bytes(plan, memory)

        if schedule in ("gpipe", "terapipe") and self.num_micro_batches > 4:  # each micro-batch adds as much
            more = self.num_micro_batches - 3
            return tuple(three + more * (three - two) for three, two in zip(peaks(3), peaks(2), strict=True))
        if schedule in ("1f1b", "seq1f1b"):
            num_micro_batches = min(num_micro_batches, self._enough(schedule, plan.num_slices, chunks))
        return peaks(num_micro_batches)
