"""Price one candidate: estimate every cut, and replay the schedule that will run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terapipe_ds.costs.devices import LinkCard
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.layers.cuts import Bounds, best_cuts, least_maximum, spans_matrix
from terapipe_ds.planner.layers.part_costs import NO_WIRE, PartCosts, Wire
from terapipe_ds.planner.layers.parts import Again, Floats, Setting, Span, spans_of
from terapipe_ds.planner.memory import MEMORY_KINDS, MemoryModel, PartMemory
from terapipe_ds.planner.strategy.bound import Bounded
from terapipe_ds.planner.strategy.candidate import NO_LEVERS, USABLE, Score, owners_of, replay_of
from terapipe_ds.planner.strategy.rates import equal_cuts
from terapipe_ds.planner.strategy.shapes import UNSLICED, Shape
from terapipe_ds.schedule import SPLIT_SCHEDULES
from terapipe_ds.simulator import Replay, ScheduleShape, replay_few
from terapipe_ds.simulator.offload import LEAVES_AFTER, OFFLOAD_AHEAD

_ON_DEVICE = 1 + LEAVES_AFTER + OFFLOAD_AHEAD // 2  # slices of a stage that are not on the host, with F and B in turns
_NEVER_AWAY = (LEAVES_AFTER + OFFLOAD_AHEAD + 3) // 2  # live slices whose B comes too soon after their F
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
            (self._cut_s(cut, shape, num_slices, limit_bytes), cut) for cut in self.equal_cuts(num_slices, shape.chunks)
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
        fits = [self._peaks(shape, num_slices, again) <= limit_bytes for again in kinds]
        kept = [self._rates[again]["slice"] for again in kinds]
        copied = self._copied(shape, num_slices)
        matrices: dict[tuple[object, ...], Floats] = {}  # many stages have the same
        times = []
        for of_stage, copies in zip(zip(*fits, strict=True), copied, strict=True):
            key = copies, *(fit.tobytes() for fit in of_stage)
            if key not in matrices:
                of_kinds = zip(of_stage, work, kept, strict=True)
                least = [
                    np.where(fit, np.maximum(done, self._copies_s(own, *copies)), np.inf) for fit, done, own in of_kinds
                ]
                matrices[key] = np.minimum.reduce(least)
            times.append(matrices[key])
        # and one per stage: the way of a micro-batch over the link before it, there and back
        waits = self._waits(shape, num_slices)
        wires_s = self._wires_s(num_slices, stages)
        extras = {id(wire_s): np.broadcast_to(wire_s[:, None] / waits, work[0].shape) for wire_s in wires_s}
        of_wires = [extras[id(wire_s)] for wire_s in wires_s]
        cuts = best_cuts(times, of_wires, self.num_micro_batches - waits / num_slices, waits / num_slices)
        return [(value + max(self.ends_s(bounds, stages)), bounds) for value, bounds in cuts]

    def _wires_s(self, num_slices: int, owners: Sequence[int]) -> list[Floats]:
        """Return, per part and first layer, the seconds of a micro-batch on the link before the part, both ways.

        Parts with the same link have the same array.
        """
        sent = self.length * np.concatenate(([0.0], self.layers.output_bytes(self.candidate.setting)))
        sent[-1] = 0.0
        links = self._links(tuple(owners))
        wires = {
            link: 2 * (sent / link.bandwidth_bytes_per_s + link.latency_s * num_slices) if link else 0.0 * sent
            for link in {None, *links}
        }
        return [wires[link] for link in (None, *links)]

    @functools.lru_cache(maxsize=4)  # noqa: B019 (as long as the candidate, which has few placements)
    def _links(self, owners: tuple[int, ...]) -> list[LinkCard | None]:
        """Return the link between each part and the next one; None on one stage."""
        grid, pairs = self.candidate.grid, itertools.pairwise(owners)
        return [None if one == other else self.cluster.link_between(grid, one, other) for one, other in pairs]

    def _waits(self, shape: Shape, num_slices: int) -> float:
        """Return the share of another stage's work on a slice for which a stage waits."""
        forward, backward = self._sums_s(num_slices)
        rounds = (self.num_micro_batches - 1) * num_slices
        weights = self._weights_s / backward if shape.is_split and backward else 0.0
        of_forward, of_backward = shape.idle(self.num_stages, rounds, min(1.0, weights))
        return (of_forward * forward + of_backward * backward) / ((forward + backward) or 1.0) or 1.0

    @functools.lru_cache(maxsize=16)  # noqa: B019 (as long as the candidate; a search asks again for each shape)
    def _sums_s(self, num_slices: int) -> tuple[float, float]:
        """Return the seconds of all layers, forward and backward, in equal slices with nothing recomputed."""
        forward, backward = self._sliced(False, num_slices)
        return float(forward.sum()), float(backward.sum())

    @functools.cached_property
    def _weights_s(self) -> float:
        return float(sum(cost.weight_s(self.length, 0) for cost in self._costs(False)))

    def _cut_s(self, cut: Bounds, shape: Shape, num_slices: int, limit_bytes: float) -> float:
        """Return about the seconds of a cut; a stage recomputes where it does not fit."""
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks)
        copied = self._copied(shape, num_slices)
        of_kinds = []
        for again in self._kinds(shape.schedule):
            fits = self._peaks_of(cut, owners, shape, num_slices, again) <= limit_bytes
            kept = self._rates[again]["slice"][np.array(cut[:-1]), np.array(cut[1:])]
            copies_s = [self._copies_s(own, *copied[stage_id]) for own, stage_id in zip(kept, owners, strict=True)]
            busy_s = self._busy_s(cut, owners, num_slices, [again] * self.num_stages)
            of_kinds.append(np.where(fits, np.maximum(busy_s, np.bincount(owners, copies_s)), np.inf))
        times: list[float] = np.minimum.reduce(of_kinds).tolist()
        waits = self._waits(shape, num_slices) * (sum(times) - max(times))
        wires_s = zip(self._wires_s(num_slices, owners), cut[:-1], strict=True)
        waits += sum(float(wire_s[start]) for wire_s, start in wires_s) / shape.chunks
        return self.num_micro_batches * max(times) + waits / num_slices + max(self.ends_s(cut, owners))

    def _busy_s(self, cut: Bounds, owners: Sequence[int], num_slices: int, recompute: Sequence[int]) -> Floats:
        """Return the seconds of each stage's computations for one micro-batch."""
        done = {again: np.concatenate(([0.0], np.cumsum(self._work(num_slices, again)))) for again in set(recompute)}
        seconds = np.zeros(self.num_stages)
        for (start, stop), stage_id in zip(itertools.pairwise(cut), owners, strict=True):
            of_layers = done[recompute[stage_id]]
            seconds[stage_id] += of_layers[stop] - of_layers[start]
        return seconds

    def _peaks_of(self, cut: Bounds, owners: Sequence[int], shape: Shape, num_slices: int, recompute: int) -> Floats:
        """Return about the peak bytes of each stage of one cut."""
        stages, spans = np.array(owners), (np.array(cut[:-1]), np.array(cut[1:]))
        shares, away = self._shares(shape, num_slices)
        held, running = self._bytes(
            shape, num_slices, {name: rate[spans] for name, rate in self._rates[recompute].items()}
        )
        largest = np.zeros(self.num_stages)
        np.maximum.at(largest, stages, running)
        return self._context_bytes + np.bincount(stages, (shares[stages].T * held).sum(axis=0) + away[stages]) + largest

    def _kinds(self, schedule: str) -> Sequence[Again]:
        """Return what stages may recompute; the seconds of W may be unknown where backwards are split."""
        may_recompute = schedule not in SPLIT_SCHEDULES or self.layers.recomputes_before_weights
        return self.layers.kinds if may_recompute else self.layers.kinds[:1]

    def equal_cuts(self, num_slices: int, chunks: int) -> list[Bounds]:
        """Return cuts with parts as equal as possible, and such that stages are too."""
        grid = self.candidate.grid
        setting = Setting(grid.model, self.candidate.micro_batch, sequence=grid.sequence)
        return equal_cuts(self.layers, setting, self.length, num_slices, self.num_stages, chunks)

    def rough_s(self, shape: Shape, num_slices: int, limit_bytes: float) -> float:
        """Return about the seconds with stages as equal as possible; infinity where one of them does not fit."""
        cuts = self.equal_cuts(num_slices, shape.chunks)
        return min((self._cut_s(cut, shape, num_slices, limit_bytes) for cut in cuts), default=math.inf)

    def even_s(self, shape: Shape, num_slices: int) -> float:
        """Return about the seconds with equal stages, in `num_slices` equal slices, and nothing recomputed."""
        rounds = self.num_micro_batches + self._waits(shape, num_slices) * (self.num_stages - 1) / num_slices
        return rounds * sum(self._sums_s(num_slices)) / self.num_stages

    def least_bytes(self, shape: Shape, num_slices: int) -> float:
        """Return approximately the least limit in which some cut fits, with everything recomputed that can be."""
        again = self._kinds(shape.schedule)[:2][-1]
        return least_maximum(list(self._peaks(shape, num_slices, again)))

    def _work(self, num_slices: int, recompute: int) -> Floats:
        forward, backward = self._sliced(recompute, num_slices)
        return forward + backward

    def _peaks(self, shape: Shape, num_slices: int, recompute: int) -> Floats:
        """Return about the peak bytes of each stage for every span of layers.

        Shape: [K, L + 1, L + 1].
        """
        shares, away = self._shares(shape, num_slices)
        # spans without layers have infinite bytes, and the differences and shares of these are no numbers
        with np.errstate(invalid="ignore"):
            held, running = self._bytes(shape, num_slices, self._rates[recompute])
            held[0] += running  # of all that a stage has once
            peaks = np.einsum("kn,njl->kjl", shares, held)  # a matrix product would wake threads, which takes longer
        peaks += (away + self._context_bytes)[:, None, None]
        return np.where(np.isnan(peaks), np.inf, peaks)

    def _shares(self, shape: Shape, num_slices: int) -> tuple[Floats, Floats]:
        """Return how many of each kind of `_bytes` every stage holds, and its bytes of slices that are on the host."""
        live = self._live(shape, num_slices)
        there = live
        if self.candidate.levers.offload_activations:
            # where every slice leaves, one comes back while another one goes
            all_leave = (live - num_slices >= _NEVER_AWAY) & (not shape.fills_and_drains)
            there = np.minimum(live, (_ON_DEVICE + all_leave) / shape.chunks)
        # keys and values of a micro-batch stay until the B of its first slice: one more than its slices fill
        stores = 1 + np.ceil((np.maximum(there if num_slices == 1 else live, 1) - 1) / num_slices)
        stores = np.minimum(stores, self.num_micro_batches)
        messages = (np.arange(self.num_stages) > 0) * min(self.num_micro_batches * num_slices, _MESSAGES)
        waiting = self._slices(shape.waiting_slices, num_slices) / num_slices
        shares = np.stack(
            [np.ones(self.num_stages), there / num_slices, waiting, stores, messages / num_slices], axis=1
        )
        return shares, (live - there) / num_slices * self._ends()

    def _copied(self, shape: Shape, num_slices: int) -> list[tuple[float, float]]:
        """Return, per stage, the share of its slices that the host keeps for a while, and a micro-batch's bytes of
        these that stay on the device."""
        if not self.candidate.levers.offload_activations:
            return [(0.0, 0.0)] * self.num_stages
        # of a micro-batch whose slices come back in reverse, the last ones stay
        leaving = np.clip(self._live(shape, num_slices) - _NEVER_AWAY / shape.chunks, 0, num_slices) / num_slices
        return list(zip(leaving.tolist(), self._ends().tolist(), strict=True))

    def _copies_s(self, kept: Floats, share: float, staying: float) -> Floats:
        """Return the seconds of the copies of a micro-batch to the host and back, where slices keep these bytes."""
        away = np.maximum(0.0, np.where(np.isfinite(kept), kept, 0.0) - staying)
        return 2 * share * away / self.cluster.host_link.bandwidth_bytes_per_s

    def _live(self, shape: Shape, num_slices: int) -> Floats:
        """Return the most slices of each stage that are between their F and their B."""
        return self._slices(shape.live_slices, num_slices) - self._slices(shape.waiting_slices, num_slices)

    def _slices(self, slices_of: Callable[[int, int, int], float], num_slices: int) -> Floats:
        """Return a number of slices of each stage, of as many as there are."""
        numbers = [slices_of(self.num_stages, stage_id, num_slices) for stage_id in range(self.num_stages)]
        return np.minimum(self.num_micro_batches * num_slices, numbers)

    def _ends(self) -> Floats:
        """Return, per stage, the bytes of a micro-batch's input and output."""
        stages, size = np.arange(self.num_stages), float(self.layers.output_bytes(self.candidate.setting)[0])
        return self.length * size * ((stages > 0) + 1.0 * (stages < self.num_stages - 1))

    def _bytes(self, shape: Shape, num_slices: int, rates: Mapping[str, Floats]) -> tuple[Floats, Floats]:
        """Return the bytes of spans of layers with these rates: by kind, and those of the largest computation.

        The kinds: held once, of a micro-batch its slices before B and before W, its keys and values, and its messages.
        """
        whole = rates["whole"] if num_slices == 1 else rates["store"]
        gradients = 0.0 if num_slices == 1 else rates["store_grad"]
        # short slices wait after their B for the others of their products, which then copy what all of them keep
        part = self.length / num_slices
        waiting = min(max(0.0, self._part.joined_tokens - part), self.length - part) / self.length
        held = np.stack([rates["static"] + gradients, rates["slice"], rates["weight"], whole, rates["sent"]])
        running = rates["working"] / num_slices
        if num_slices > 1:
            # while a B rereads the longest prefix, one micro-batch fewer has keys and values
            are_all_live = shape.fills_and_drains or self.num_micro_batches == 1
            reread = rates["reread"] if are_all_live else np.maximum(0.0, rates["reread"] - rates["store"])
            running = np.maximum(running, rates["beside"] / num_slices + reread)
        if waiting:
            stays = (rates["slice"] - rates["joined"]) / num_slices
            copies = np.where(rates["joined"] > 0, np.maximum(0.0, waiting * rates["working"] - stays), 0.0)
            running += waiting * rates["joined"] + copies
        if shape.is_split:  # the slice whose B ends waits for its W as well
            running += np.maximum(0.0, rates["weight"] - rates["slice"]) / num_slices
        loss = rates["loss"] * min(part, self._part.loss_chunk_tokens)
        return held, np.maximum(running, loss) + rates["fixed"]

    @functools.cached_property
    def _part(self) -> PartMemory:
        """Return the memory of all layers as one part, for the numbers of tokens that it has in common with others."""
        count = self.layers.num_layers
        return self.layers.memory_of_spans(self.candidate.setting, [Span(0, count)])[0]

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
        for bound, link in zip(bounds[1:-1], self._links(tuple(owners)), strict=True):
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
                    if kind == Again.OFF and offloads:  # its copies may be what takes too long
                        over = self._estimated_over(bounds, shape, plan, limit_bytes)
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

    def _estimated_over(
        self, bounds: Bounds, shape: ScheduleShape, plan: SlicePlan, limit_bytes: float
    ) -> tuple[bool, ...]:
        """Return which stages do not fit without recomputation, about."""
        one = Shape(shape.schedule, shape.chunks_per_stage)
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks_per_stage)
        peaks = self._peaks_of(bounds, owners, one, plan.num_slices, Again.OFF)
        return tuple((peaks > limit_bytes).tolist())

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
        """Return the score of one choice of recomputation; None where its host is too small, or it is too slow."""
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks_per_stage)
        # no stage takes less than its own computations
        if plan == SlicePlan.equal(self.length, plan.num_slices):
            busy_s = self.num_micro_batches * self._busy_s(bounds, owners, plan.num_slices, recompute)
            if self._step_s(busy_s.tolist(), bounds, owners) > beat_s:
                return None
        replays = functools.partial(replay_of, shape)
        replay = functools.partial(replay_few, shape, self.num_micro_batches, replays, plan, most=most)
        costs, memory = self.parts(bounds, recompute, owners), self.memory(bounds, recompute, owners)
        # the seconds and the host's bytes are known sooner than the device's
        timed = replay(costs=costs)
        if (seconds := self._step_s(list(timed.ends_s), bounds, owners)) > beat_s:
            return None
        if memory.offloads:
            timed = replay(costs=costs, memory=memory)
            if (seconds := self._step_s(list(timed.ends_s), bounds, owners)) > beat_s:
                return None
        few = functools.partial(replays, min(self.num_micro_batches, shape.filling))
        hosts = self.host_bytes(few, bounds, plan, memory, owners)
        if hosts > USABLE * (self.cluster.card.host_memory_bytes or math.inf):
            return None
        held = replay(memory=memory)
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
