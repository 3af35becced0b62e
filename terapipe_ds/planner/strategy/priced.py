"""Price one candidate: estimate every cut, and replay the schedule that will run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.layers.cuts import Bounds, best_cuts, least_maximum, spans_matrix
from terapipe_ds.planner.layers.part_costs import NO_WIRE, PartCosts, Wire
from terapipe_ds.planner.layers.parts import Again, Floats, Span, spans_of
from terapipe_ds.planner.memory import MEMORY_KINDS, MemoryModel
from terapipe_ds.planner.strategy.bound import Bounded
from terapipe_ds.planner.strategy.candidate import NO_LEVERS, USABLE, Score, owners_of, replay_of
from terapipe_ds.planner.strategy.shapes import UNSLICED, Shape
from terapipe_ds.schedule import SPLIT_SCHEDULES
from terapipe_ds.simulator import Replay, ScheduleShape, replay_few
from terapipe_ds.simulator.offload import LEAVES_AFTER, OFFLOAD_AHEAD

_ON_DEVICE = 1 + LEAVES_AFTER + OFFLOAD_AHEAD  # slices of a stage that are not on the host, about
_MESSAGES = 2  # sent by a stage and not known to have arrived, at the stage's peak
MOST_WHOLE = 3_000_000
"""Computations of a batch up to which a final answer is replayed whole: half a minute, a gigabyte."""


class Priced(Bounded):
    """Price the cuts of one candidate on one cluster.

    `replayed_bytes` is the least need of the replayed cuts that did not fit in memory. In all
    methods `owners[k]` is the stage of part k, and `recompute[k]` belongs to stage k.
    """

    replayed_bytes: int | None = None

    # --- cuts

    def propose(self, shape: Shape, num_slices: int, limit_bytes: float) -> list[tuple[float, Bounds]]:
        """Return approximate seconds and bounds of good cuts for `num_slices` equal slices, of those that fit."""
        if shape.chunks == 1:
            return self.estimates(num_slices, limit_bytes, shape)[:1]
        cuts = [
            (self._chunked_s(cut, shape, num_slices, limit_bytes), cut)
            for cut in self.chunked_cuts(num_slices, shape.chunks)
        ]
        return [(seconds, cut) for seconds, cut in cuts if math.isfinite(seconds)]

    def estimates(self, num_slices: int, limit_bytes: float, shape: Shape = UNSLICED[0]) -> list[tuple[float, Bounds]]:
        """Return cuts for `num_slices` equal slices with the approximate seconds of each, the least first.

        Each stage is one run of layers, and a stage recomputes where it would not fit otherwise.
        """
        stages = range(self.num_stages)
        # one matrix per stage: the work of every span of layers, recomputed where that alone fits
        kinds = self._kinds(shape.schedule)
        work = [spans_matrix(self._work(num_slices, again)) for again in kinds]
        times = []
        for stage_id in stages:
            fits = [self._peaks(stage_id, shape, num_slices, again) <= limit_bytes for again in kinds]
            times.append(np.minimum.reduce([np.where(*both, np.inf) for both in zip(fits, work, strict=True)]))
        # and one per stage: the way of a micro-batch over the link before it, there and back
        waits = self._waits(shape, num_slices)
        extras = [
            np.broadcast_to(wire_s[:, None] / waits, work[0].shape) for wire_s in self._wires_s(num_slices, stages)
        ]
        cuts = best_cuts(times, extras, self.num_micro_batches - waits / num_slices, waits / num_slices)
        return [(value + max(self.ends_s(bounds, stages)), bounds) for value, bounds in cuts]

    def _wires_s(self, num_slices: int, owners: Sequence[int]) -> list[Floats]:
        """Return, per part and first layer, the seconds of a micro-batch on the link before the part, both ways."""
        sent = self.length * np.concatenate(([0.0], self.layers.output_bytes(self.candidate.setting)))
        sent[-1] = 0.0
        wires = [0.0 * sent]
        for one, other in itertools.pairwise(owners):
            link = None if one == other else self.cluster.link_between(self.candidate.grid, one, other)
            wires.append(2 * (sent / link.bandwidth_bytes_per_s + link.latency_s * num_slices) if link else 0.0 * sent)
        return wires

    def _waits(self, shape: Shape, num_slices: int) -> float:
        """Return the share of another stage's work on a slice for which a stage waits."""
        forward, backward = (float(part.sum()) for part in self._sliced(False, num_slices))
        rounds = (self.num_micro_batches - 1) * num_slices
        weights = self._weights_s / backward if shape.is_split and backward else 0.0
        of_forward, of_backward = shape.idle(self.num_stages, rounds, min(1.0, weights))
        return (of_forward * forward + of_backward * backward) / ((forward + backward) or 1.0) or 1.0

    @functools.cached_property
    def _weights_s(self) -> float:
        return float(sum(cost.weight_s(self.length, 0) for cost in self._costs(False)))

    def _chunked_s(self, cut: Bounds, shape: Shape, num_slices: int, limit_bytes: float) -> float:
        """Return about the seconds of a cut in several parts per stage; a stage recomputes where it does not fit."""
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks)
        spans = list(itertools.pairwise(cut))
        kinds = self._kinds(shape.schedule)
        work = [np.concatenate(([0.0], np.cumsum(self._work(num_slices, again)))) for again in kinds]
        times = []
        for stage_id in range(self.num_stages):
            own = tuple(np.array([span for span, owner in zip(spans, owners, strict=True) if owner == stage_id]).T)
            peaks = [self._peak(stage_id, shape, num_slices, again, own) for again in kinds]
            sums = [float((done[own[1]] - done[own[0]]).sum()) for done in work]
            times.append(min((s for s, peak in zip(sums, peaks, strict=True) if peak <= limit_bytes), default=math.inf))
        waits = self._waits(shape, num_slices) * (sum(times) - max(times))
        waits += (
            sum(float(wire_s[start]) for wire_s, start in zip(self._wires_s(num_slices, owners), cut[:-1], strict=True))
            / shape.chunks
        )
        return self.num_micro_batches * max(times) + waits / num_slices + max(self.ends_s(cut, owners))

    def _kinds(self, schedule: str) -> Sequence[Again]:
        """Return what stages may recompute; the seconds of W may be unknown where backwards are split."""
        may_recompute = schedule not in SPLIT_SCHEDULES or self.layers.recomputes_before_weights
        return self.layers.kinds if may_recompute else self.layers.kinds[:1]

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a search has fewer candidates that come to be cut)
    def chunked_cuts(self, num_slices: int, chunks: int) -> list[Bounds]:
        """Return cuts for several parts per stage: parts as equal as possible, and such that stages are too."""
        if chunks * self.num_stages > self.layers.num_layers:
            return []
        work = spans_matrix(self._work(num_slices, False))
        # five layers of each stage are 2 + 3 on all stages, not 3 + 3 on some of them
        of_stage = round(self.layers.num_layers / self.num_stages)
        uneven = [work / max(1, (of_stage + chunk) // chunks) for chunk in range(chunks)]
        cuts = []
        for times in ([work] * chunks, uneven):
            parts = [time for time in times for _ in range(self.num_stages)]
            cuts.append(best_cuts(parts, [np.zeros_like(work)] * len(parts), 1.0, 0.0)[0][1])
        return list(dict.fromkeys(cuts))

    def even_s(self, shape: Shape, num_slices: int) -> float:
        """Return about the seconds with equal stages, in `num_slices` equal slices, and nothing recomputed."""
        rounds = self.num_micro_batches + self._waits(shape, num_slices) * (self.num_stages - 1) / num_slices
        return rounds * float(self._work(num_slices, False).sum()) / self.num_stages

    def least_bytes(self, shape: Shape, num_slices: int) -> float:
        """Return approximately the least limit in which some cut fits, with everything recomputed that can be."""
        again = self._kinds(shape.schedule)[:2][-1]
        return least_maximum([self._peaks(k, shape, num_slices, again) for k in range(self.num_stages)])

    def _work(self, num_slices: int, recompute: int) -> Floats:
        forward, backward = self._sliced(recompute, num_slices)
        return forward + backward

    def _peaks(self, stage_id: int, shape: Shape, num_slices: int, recompute: int) -> Floats:
        """Return the peak bytes of a stage for every span of layers, slightly more rather than less than a replay's."""
        held, running = self._bytes(stage_id, shape, num_slices, self._rates[recompute])
        return np.asarray(self._context_bytes + held + running)

    def _peak(self, stage_id: int, shape: Shape, num_slices: int, recompute: int, spans: Any) -> float:
        """Return the peak bytes of a stage that holds several spans of layers."""
        rates = {name: matrix[spans] for name, matrix in self._rates[recompute].items()}
        held, running = self._bytes(stage_id, shape, num_slices, rates)
        return float(self._context_bytes + held.sum() + running.max())

    def _bytes(
        self, stage_id: int, shape: Shape, num_slices: int, rates: Mapping[str, Floats]
    ) -> tuple[Floats, Floats]:
        """Return the held bytes and the bytes of the largest computation, for spans of layers with these rates."""
        most = self.num_micro_batches * num_slices
        live = min(most, shape.live_slices(self.num_stages, stage_id, num_slices))
        there = min(live, _ON_DEVICE) if self.candidate.levers.offload_activations else live
        held = rates["static"] + there / num_slices * rates["slice"]
        ends = self.length * float(self.layers.output_bytes(self.candidate.setting)[0])  # a stage's input or output
        held = held + (live - there) / num_slices * ends * ((stage_id > 0) + (stage_id < self.num_stages - 1))
        if stage_id > 0:
            held = held + min(most, _MESSAGES) / num_slices * rates["sent"]
        whole = rates["whole"] if num_slices == 1 else rates["store"]
        gradients = 0.0 if num_slices == 1 else rates["store_grad"]
        stores = math.ceil((there if num_slices == 1 else live) / num_slices)
        held = held + stores * whole + gradients
        running = rates["working"] / num_slices
        if num_slices > 1:
            running = np.maximum(running, rates["beside"] / num_slices + rates["reread"])
        loss = rates["loss"] * min(self.length / num_slices, self._chunk_tokens)
        return held, np.maximum(running, loss) + rates["fixed"]

    @functools.cached_property
    def _chunk_tokens(self) -> float:
        count = self.layers.num_layers
        return self.layers.memory_of_spans(self.candidate.setting, [Span(0, count)])[0].loss_chunk_tokens

    # --- one cut, exactly

    def ends_s(self, bounds: Bounds, owners: Sequence[int]) -> list[float]:
        """Return, per stage, the seconds of its reduction, of the tied matrix's exchange, and of its optimizer step."""
        setting = self.candidate.setting
        summed, moved = self.layers.end_bytes(setting)
        seconds = [fixed_s for fixed_s, _ in self._reductions]
        for (start, stop), stage_id in zip(itertools.pairwise(bounds), owners, strict=True):
            per_byte = self._reductions[stage_id][1]
            seconds[stage_id] += per_byte * summed[start:stop].sum() + moved[start:stop].sum() / self._reachable
        copy = self.layers.tied_copy(setting)
        if copy is not None and self._has_tied_copy(owners):
            link = self.cluster.link_between(self.candidate.grid, owners[0], owners[-1])
            for stage_id in (owners[0], owners[-1]):
                seconds[stage_id] += copy.exchanged / link.bandwidth_bytes_per_s + 2 * link.latency_s
            seconds[owners[-1]] += self._reductions[owners[-1]][1] * copy.summed + copy.moved / self._reachable
        return seconds

    def parts(self, bounds: Bounds, recompute: Sequence[int], owners: Sequence[int]) -> list[PartCosts]:
        """Return the costs of the parts, with the links of their machines."""
        sent = self.layers.output_bytes(self.candidate.setting)
        wires = [NO_WIRE]
        for bound, (one, other) in zip(bounds[1:-1], itertools.pairwise(owners), strict=True):
            link = None if one == other else self.cluster.link_between(self.candidate.grid, one, other)
            wires.append(NO_WIRE if link is None else Wire(link, float(sent[bound - 1])))
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

    def memory(self, bounds: Bounds, recompute: Sequence[int], owners: Sequence[int]) -> MemoryModel:
        """Return the memory of the parts."""
        again = [recompute[stage_id] for stage_id in owners]
        parts = self.layers.memory_of_spans(self.candidate.setting, spans_of(bounds, again))
        # the first part of each stage stands for the process
        bytes_of = dict.fromkeys(owners, self._context_bytes)
        contexts = [bytes_of.pop(stage_id, 0) for stage_id in owners]
        parts = tuple(
            dataclasses.replace(part, context_bytes=more) if more else part
            for part, more in zip(parts, contexts, strict=True)
        )
        if not self.candidate.levers.offload_activations:
            return MemoryModel(parts)
        return MemoryModel(parts, offloads=True, host_bytes_per_s=self.cluster.host_link.bandwidth_bytes_per_s)

    def score(
        self,
        bounds: Bounds,
        schedule: str,
        plan: SlicePlan,
        limit_bytes: float,
        chunks_per_stage: int = 1,
        most: float | None = MOST_WHOLE,
        beat_s: float = math.inf,
    ) -> Score | None:
        """Replay a cut under a schedule and return its score; None where it does not fit, or takes more than `beat_s`.

        Stages that do not fit otherwise recompute, where they may. With offloaded activations recomputation saves
        copies too: the fastest choice counts. A few micro-batches predict a batch of more than `most` computations.
        """
        shape = ScheduleShape(schedule, self.num_stages, plan.num_slices, chunks_per_stage)
        kinds = self._kinds(schedule)
        offloads = self.candidate.levers.offload_activations
        over, best = (everything := (True,) * self.num_stages), None
        # nothing recomputes, then the kind that takes the least time, full recomputation last
        for kind in (kinds[0], *reversed(kinds[1:])):
            for again in filter(any, dict.fromkeys((over, everything)) if offloads else (over,)):
                recompute = tuple(kind if recomputes else Again.OFF for recomputes in again)
                score = self._replayed(bounds, shape, plan, recompute, limit_bytes, most, beat_s)
                if score is None:
                    continue
                if kind == Again.OFF:
                    over = tuple(peak > limit_bytes for peak in score.peak_bytes)
                if (need := max(score.peak_bytes)) > limit_bytes:
                    self.replayed_bytes = need if self.replayed_bytes is None else min(need, self.replayed_bytes)
                elif not offloads:
                    return score
                elif score.seconds <= beat_s:
                    best, beat_s = score, score.seconds
        return best

    def _replayed(
        self,
        bounds: Bounds,
        shape: ScheduleShape,
        plan: SlicePlan,
        recompute: tuple[Again, ...],
        limit_bytes: float,
        most: float | None,
        beat_s: float,
    ) -> Score | None:
        """Return the score of one choice of recomputation; None where its host is too small, or it is too slow.

        Beyond the limit of the device, its seconds are without copies to the host.
        """
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks_per_stage)
        replays = functools.partial(replay_of, shape)
        replay = functools.partial(replay_few, shape, self.num_micro_batches, replays, plan, most=most)
        costs, memory = self.parts(bounds, recompute, owners), self.memory(bounds, recompute, owners)
        # no copy takes time off, and replays without memory take the least time
        timed = replay(costs=costs)
        if (seconds := self._step_s(list(timed.ends_s), bounds, owners)) > beat_s:
            return None
        # the host's bytes are known sooner than the device's
        few = functools.partial(replays, min(self.num_micro_batches, shape.filling))
        hosts = self.host_bytes(few, bounds, plan, memory, owners)
        if hosts > USABLE * (self.cluster.card.host_memory_bytes or math.inf):
            return None
        held = replay(memory=memory)
        if memory.offloads and max(held.peak_bytes) <= limit_bytes:
            timed = replay(costs=costs, memory=memory)
            seconds = self._step_s(list(timed.ends_s), bounds, owners)
        is_final = most == MOST_WHOLE or (held.is_proven and timed.is_proven)
        how = shape.schedule, plan, held.peak_bytes, is_final, shape.chunks_per_stage, hosts
        return Score(seconds, self.candidate, bounds, recompute, *how)

    def _step_s(self, done_s: list[float], bounds: Bounds, owners: Sequence[int]) -> float:
        """Return the seconds to the end of each stage's reduction and step, which follow its last computation."""
        if self._has_tied_copy(owners):  # its two stages wait for each other
            done_s[owners[0]] = done_s[owners[-1]] = max(done_s[owners[0]], done_s[owners[-1]])
        return float(max(done + end for done, end in zip(done_s, self.ends_s(bounds, owners), strict=True)))

    def price(
        self, bounds: Bounds, schedule: str, plan: SlicePlan, chunks_per_stage: int, recompute: Sequence[int]
    ) -> tuple[float, tuple[int, ...]]:
        """Return the seconds and the peak bytes by stage of a cut whose layers recompute as `recompute` tells."""
        owners = owners_of(schedule, self.num_stages, chunks_per_stage)
        shape = ScheduleShape(schedule, self.num_stages, plan.num_slices, chunks_per_stage)
        memory, costs = self.memory(bounds, recompute, owners), self.parts(bounds, recompute, owners)
        replays = functools.partial(replay_of, shape)
        found = replay_few(shape, self.num_micro_batches, replays, plan, costs, memory, most=MOST_WHOLE)
        return self._step_s(list(found.ends_s), bounds, owners), found.peak_bytes

    def host_bytes(
        self, replay: Callable[[], Replay], bounds: Bounds, plan: SlicePlan, memory: MemoryModel, owners: Sequence[int]
    ) -> int:
        """Return the bytes of offloaded slices and optimizer states on the host of the fullest node.

        Nobody calls `replay`, which may have to build its schedule, unless slices are offloaded.
        """
        levers = self.candidate.levers
        if levers == NO_LEVERS:
            return 0
        of_stages = np.array(replay().host_bytes(plan, memory) if memory.offloads else [0] * self.num_stages, float)
        of_layers = self.layers.host_bytes(self.candidate.setting)
        for (start, stop), stage_id in zip(itertools.pairwise(bounds), owners, strict=True):
            of_stages[stage_id] += of_layers[start:stop].sum()
        return math.ceil(self.cluster.fullest_node(self.candidate.grid, of_stages))

    def peak_by_kind(self, score: Score) -> dict[str, list[int]]:
        """Return the peak bytes of each stage by kind; they add up to the peaks of the score."""
        owners = owners_of(score.schedule, self.num_stages, score.chunks_per_stage)
        shape = ScheduleShape(score.schedule, self.num_stages, score.plan.num_slices, score.chunks_per_stage)
        whole = self.memory(score.bounds, score.recompute, owners)
        kinds = {kind: whole.only(kind) for kind in MEMORY_KINDS}
        replay = replay_of(shape, min(self.num_micro_batches, max(shape.filling, shape.most_live[0])))
        found = replay.peak_by_kind(score.plan, [whole, *kinds.values()])
        by_kind = {kind: [of[index] for of in found] for index, kind in enumerate(kinds, 1)}
        # all else that the peak has belongs to the computation that runs
        rest = (peak - sum(of[1:]) for peak, of in zip(score.peak_bytes, found, strict=True))
        return by_kind | {"running": list(rest)}

    def _has_tied_copy(self, owners: Sequence[int]) -> bool:
        return owners[0] != owners[-1] and self.layers.tied_copy(self.candidate.setting) is not None
