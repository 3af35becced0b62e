"""What one candidate costs: an estimate of every cut, and the replay of the schedule that will run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.layers.part_costs import NO_WIRE, PartCosts, Wire
from terapipe_ds.planner.layers.parts import Floats, spans_of
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.planner.strategy.bound import Bounded
from terapipe_ds.planner.strategy.candidate import Score, owners_of, replay_of
from terapipe_ds.planner.strategy.cuts import Bounds, best_cuts, least_maximum, least_maximum_cut, spans_matrix
from terapipe_ds.schedule import SPLIT_SCHEDULES

FEW = 10_000  # computations of one replay; above, fewer micro-batches stand for all of them
_MOST_WHOLE = 3_000_000  # computations of a whole batch that is replayed: half a minute, a gigabyte


class Priced(Bounded):
    """One candidate on one cluster, with its cuts and what they take."""

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

    def leanest(self, schedule: str, num_slices: int, chunks: int) -> tuple[int, Bounds] | None:
        """Return the peak of a cut that needs about the least, with all recomputed that can be, and the cut."""
        if chunks == 1:
            cuts = [least_maximum_cut([self._peaks(k, num_slices, True) for k in range(self.num_stages)])]
        else:
            cuts = self.chunked_cuts(num_slices, chunks)[:1]
        again = (schedule not in SPLIT_SCHEDULES,) * self.num_stages
        plan = SlicePlan.equal(self.length, num_slices)
        for cut in cuts:
            count = self._replayed_for_memory(schedule, num_slices, chunks, True)
            return max(self._peaks_of(cut, again, schedule, plan, chunks, count)), cut
        return None

    def _work(self, num_slices: int, recompute: bool) -> Floats:
        forward, backward = self._sliced(recompute, num_slices)
        return forward + backward

    def _peaks(self, stage_id: int, num_slices: int, recompute: bool) -> Floats:
        """Return about the most bytes of a stage, for every span, under `1f1b` or `seq1f1b`."""
        rates, rows = self._rates[recompute], self.num_micro_batches
        deep = self.num_stages - stage_id
        live = min(rows, deep) if num_slices == 1 else min(rows * num_slices, deep + num_slices - 1) / num_slices
        stores = min(rows, deep) if num_slices == 1 else min(rows, -(-(deep + num_slices - 1) // num_slices))
        peak = rates["static"] + live * rates["slice"] + rates["working"] / num_slices + rates["fixed"]
        whole = rates["whole"] if num_slices == 1 else rates["store"]
        return np.asarray(peak + stores * whole + (0.0 if num_slices == 1 else rates["store_grad"]))

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
        copy = self.layers.tied_copy(setting)
        if copy is not None and self._has_tied_copy(owners):
            link = self.candidate.grid.link(owners[0], owners[-1], self.cluster)
            for stage_id in (owners[0], owners[-1]):
                seconds[stage_id] += copy.exchanged / link.bandwidth_bytes_per_s + 2 * link.latency_s
            seconds[owners[-1]] += self._reductions[owners[-1]][1] * copy.summed + copy.moved / self._reachable
        return seconds

    def parts(self, bounds: Bounds, recompute: Sequence[bool], owners: Sequence[int] | None = None) -> list[PartCosts]:
        """Return the costs of the parts, with the links of the machines that they are on; `recompute` is per stage."""
        grid, owners = self.candidate.grid, range(self.num_stages) if owners is None else owners
        sent = self.layers.output_bytes(self.candidate.setting)
        wires = [NO_WIRE]
        for bound, (one, other) in zip(bounds[1:-1], itertools.pairwise(owners), strict=True):
            wires.append(NO_WIRE if one == other else Wire(grid.link(one, other, self.cluster), float(sent[bound - 1])))
        wires.append(NO_WIRE)
        costs = {again: self._costs(again) for again in set(recompute)}
        kept: dict[Any, PartCosts] = {}
        parts = []
        for part_id, (span, stage_id) in enumerate(zip(itertools.pairwise(bounds), owners, strict=True)):
            layers = costs[recompute[stage_id]][slice(*span)]
            send_s, send_gradient_s = wires[part_id + 1], wires[part_id]
            key = tuple(map(id, layers)), send_s, send_gradient_s
            part = PartCosts(layers, send_s=send_s, send_gradient_s=send_gradient_s)
            parts.append(kept.setdefault(key, part))
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
        count = self._replayed_for_memory(schedule, plan.num_slices, chunks, whole)
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

        Unless `whole`, fewer micro-batches tell what many take with `1f1b` and `seq1f1b`, and what many keep. They do
        so with every schedule where the batch has too many for a replay.
        """
        most, slices = self.num_micro_batches, plan.num_slices
        is_short = self._is_short(slices, chunks_per_stage)
        fits = self.fitting(bounds, schedule, plan, limit_bytes, chunks_per_stage, whole)
        if fits is None:
            return None
        recompute, peaks = fits
        owners = owners_of(schedule, self.num_stages, chunks_per_stage)
        parts, ends_s = self.parts(bounds, recompute, owners), self.ends_s(bounds, owners)
        # two runs that both have filled the pipeline tell what another micro-batch takes
        few = max(2 * (-(-self.num_stages // slices) + 1), FEW // (2 * self.num_stages * slices))
        if chunks_per_stage > 1:
            few = 2 * self.num_stages * -(-few // (2 * self.num_stages))  # stages take them in groups of that many
        is_replayed = few >= most or (is_short and (whole or schedule not in ("1f1b", "seq1f1b")))

        def batch_s(count: int) -> float:
            replay = replay_of(schedule, self.num_stages, count, slices, chunks_per_stage)
            done_s = list(replay.ends_of_stages(plan, parts))
            if self._has_tied_copy(owners):  # its two stages wait for each other
                done_s[owners[0]] = done_s[owners[-1]] = max(done_s[owners[0]], done_s[owners[-1]])
            return max(done + end for done, end in zip(done_s, ends_s, strict=True))

        if is_replayed:
            seconds = batch_s(most)
        else:
            long_s, short_s = batch_s(few), batch_s(few // 2)
            seconds = long_s + (most - few) * (long_s - short_s) / (few - few // 2)
        is_whole = whole or (is_replayed and self._enough(schedule, slices, chunks_per_stage) >= most)
        how = schedule, plan, peaks, is_whole, chunks_per_stage
        return Score(seconds, self.candidate, bounds, recompute, *how)

    def _has_tied_copy(self, owners: Sequence[int]) -> bool:
        return owners[0] != owners[-1] and self.layers.tied_copy(self.candidate.setting) is not None

    def _is_short(self, num_slices: int, chunks: int) -> bool:
        """Return whether a whole batch can be replayed."""
        return 2 * self.num_stages * chunks * self.num_micro_batches * num_slices <= _MOST_WHOLE

    def _replayed_for_memory(self, schedule: str, num_slices: int, chunks: int, whole: bool) -> int:
        """Return of how many micro-batches the peaks are counted."""
        if whole and self._is_short(num_slices, chunks):
            return self.num_micro_batches
        return self._enough(schedule, num_slices, chunks)

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
