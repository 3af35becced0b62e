"""Estimate the cuts of one candidate: about the seconds and the bytes of every span of layers, without a replay."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from terapipe_ds.costs.devices import LinkCard
from terapipe_ds.planner.layers.cuts import Bounds, best_cuts, least_maximum, spans_matrix
from terapipe_ds.planner.layers.parts import Again, Floats, Setting, Span
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.strategy.bound import Bounded
from terapipe_ds.planner.strategy.candidate import owners_of
from terapipe_ds.planner.strategy.rates import equal_cuts, equal_plan, seconds_of
from terapipe_ds.planner.strategy.shapes import UNSLICED, Shape
from terapipe_ds.schedule import SPLIT_SCHEDULES
from terapipe_ds.simulator.offload import LEAVES_AFTER, OFFLOAD_AHEAD

_ON_DEVICE = 1 + LEAVES_AFTER + OFFLOAD_AHEAD // 2  # slices of a stage that are not on the host, with F and B in turns
_NEVER_AWAY = (LEAVES_AFTER + OFFLOAD_AHEAD + 3) // 2  # live slices whose B comes too soon after their F
_MESSAGES = 2  # sent by a stage and not known to have arrived, at the stage's peak


class Estimated(Bounded):
    """Estimate the cuts of one candidate on one cluster.

    In all methods `owners[k]` is the stage of part k, and `recompute[k]` belongs to stage k.
    """

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
        overhead = self._overhead_s(num_slices)
        work = [spans_matrix(np.add(*self._sliced(again, num_slices))) + overhead for again in kinds]
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
        copied = np.array(self._copied(shape, num_slices))[np.array(owners)].T
        of_kinds = []
        for again in self._kinds(shape.schedule):
            fits = self._peaks_of(cut, owners, shape, num_slices, again) <= limit_bytes
            kept = self._rates[again]["slice"][np.array(cut[:-1]), np.array(cut[1:])]
            copies_s = self._copies_s(kept, *copied)
            busy_s = self._busy_s(cut, owners, num_slices, [again] * self.num_stages)
            of_kinds.append(np.where(fits, np.maximum(busy_s, np.bincount(owners, copies_s)), np.inf))
        times: list[float] = np.minimum.reduce(of_kinds).tolist()
        waits = self._waits(shape, num_slices) * (sum(times) - max(times))
        wires_s = zip(self._wires_s(num_slices, owners), cut[:-1], strict=True)
        waits += sum(float(wire_s[start]) for wire_s, start in wires_s) / shape.chunks
        return self.num_micro_batches * max(times) + waits / num_slices + max(self.ends_s(cut, owners))

    def _busy_s(self, cut: Bounds, owners: Sequence[int], num_slices: int, recompute: Sequence[int]) -> Floats:
        """Return the seconds of each stage's computations for one micro-batch."""
        starts, stops, stages = np.array(cut[:-1]), np.array(cut[1:]), np.array(owners)
        seconds, of_parts = np.zeros(len(stages)), np.array(recompute)[stages]
        for again in set(recompute):
            done = np.concatenate(([0.0], np.cumsum(np.add(*self._sliced(again, num_slices)))))
            seconds = np.where(of_parts == again, done[stops] - done[starts], seconds)
        return np.asarray(np.bincount(stages, seconds + self._overhead_s(num_slices)[stops]), float)

    def _peaks_of(self, cut: Bounds, owners: Sequence[int], shape: Shape, num_slices: int, recompute: int) -> Floats:
        """Return about the peak bytes of each stage of one cut."""
        stages, spans = np.array(owners), (np.array(cut[:-1]), np.array(cut[1:]))
        shares, away = self._shares(shape, num_slices)
        held, running = self._bytes(
            shape, num_slices, {name: rate[spans] for name, rate in self._rates[recompute].items()}
        )
        largest = np.zeros(self.num_stages)
        np.maximum.at(largest, stages, running)
        peaks = np.bincount(stages, (shares[stages].T * held).sum(axis=0) + away[stages]) + largest
        if owners[0] == owners[-1] and len(owners) > 1:  # the stage has a tied matrix once
            last = cut[-2], cut[-1]
            peaks[owners[0]] -= self._rates[recompute]["tied"][last] + self._rates[recompute]["tied_gradient"][last]
        return np.asarray(self._process_bytes + peaks)

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
        overhead_s = shape.chunks * float(self._overhead_s(num_slices)[1:].min())
        return rounds * (sum(self._sums_s(num_slices)) / self.num_stages + overhead_s)

    @functools.lru_cache(maxsize=16)  # noqa: B019 (as long as the candidate; a search asks again for each shape)
    def _overhead_s(self, num_slices: int) -> Floats:
        """Return, by the end of a part, the seconds of a micro-batch in equal slices beyond its layers."""
        setting = self.candidate.setting
        plan = equal_plan(setting, self.length, num_slices)
        costs = [self.layers.overhead(setting, layer) for layer in range(self.layers.num_layers)]
        return np.array([0.0, *(sum(map(sum, (seconds_of(one, plan) for one in of))) for of in costs)])

    def least_bytes(self, shape: Shape, num_slices: int) -> float:
        """Return approximately the least limit in which some cut fits, with nothing recomputed or everything."""
        kinds = self._kinds(shape.schedule)[:2]
        return min(least_maximum(list(self._peaks(shape, num_slices, again))) for again in kinds)

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
        peaks += (away + self._process_bytes)[:, None, None]
        return np.where(np.isnan(peaks), np.inf, peaks)

    def _shares(self, shape: Shape, num_slices: int) -> tuple[Floats, Floats]:
        """Return how many of each kind of `_bytes` every stage holds, and its bytes of slices that are on the host."""
        live, waiting = self._live(shape, num_slices)
        there = live
        if self.candidate.levers.offload_activations:
            # where every slice leaves, one comes back while another one goes
            all_leave = (live - num_slices >= _NEVER_AWAY) & (not shape.fills_and_drains)
            there = np.minimum(live, (_ON_DEVICE + all_leave) / shape.chunks)
        # keys and values of a micro-batch stay until the B of its first slice: one more than its slices fill
        stores = 1 + np.ceil((np.maximum(there if num_slices == 1 else live, 1) - 1) / num_slices)
        stores = np.minimum(stores, self.num_micro_batches)
        messages = (np.arange(self.num_stages) > 0) * min(self.num_micro_batches * num_slices, _MESSAGES)
        slices = there / num_slices, waiting / num_slices
        shares = np.stack([np.ones(self.num_stages), *slices, stores, messages / num_slices], axis=1)
        return shares, (live - there) / num_slices * self._ends()

    def _copied(self, shape: Shape, num_slices: int) -> list[tuple[float, float]]:
        """Return, per stage, the share of its slices that the host keeps for a while, and a micro-batch's bytes of
        these that stay on the device."""
        if not self.candidate.levers.offload_activations:
            return [(0.0, 0.0)] * self.num_stages
        # of a micro-batch whose slices come back in reverse, the last ones stay
        leaving = np.clip(self._live(shape, num_slices)[0] - _NEVER_AWAY / shape.chunks, 0, num_slices) / num_slices
        return list(zip(leaving.tolist(), self._ends().tolist(), strict=True))

    def _copies_s(self, kept: Floats, share: float | Floats, staying: float | Floats) -> Floats:
        """Return the seconds of the copies of a micro-batch to the host and back, where slices keep these bytes."""
        away = np.maximum(0.0, np.where(np.isfinite(kept), kept, 0.0) - staying)
        return 2 * share * away / self.cluster.host_link.bandwidth_bytes_per_s

    def _live(self, shape: Shape, num_slices: int) -> tuple[Floats, Floats]:
        """Return the most slices of each stage that are between their F and their B, and that wait for their W then."""
        of_stages = [(self.num_stages, stage_id, num_slices) for stage_id in range(self.num_stages)]
        most = np.minimum(self.num_micro_batches * num_slices, [shape.live_slices(*stage) for stage in of_stages])
        live = np.minimum(most, [shape.live_slices(*one) - shape.waiting_slices(*one) for one in of_stages])
        return live, most - live

    def _ends(self) -> Floats:
        """Return, per stage, the bytes of a micro-batch's input and output."""
        stages, size = np.arange(self.num_stages), float(self.layers.output_bytes(self.candidate.setting)[0])
        return self.length * size * ((stages > 0) + 1.0 * (stages < self.num_stages - 1))

    def _bytes(self, shape: Shape, num_slices: int, rates: Mapping[str, Floats]) -> tuple[Floats, Floats]:
        """Return the bytes of spans of layers with these rates, by kind, and the bytes of the largest computation.

        The kinds: held once, of a micro-batch its slices before B and before W, its keys and values, and its messages.
        """
        whole = rates["whole"] if num_slices == 1 else rates["store"]
        gradients = 0.0 if num_slices == 1 else rates["store_grad"]
        # short slices wait after their B for the others of their products, which then copy what all of them keep
        part = self.length / num_slices
        waiting = min(max(0.0, self._part.joined_tokens - part), self.length - part) / self.length
        held = np.stack([rates["static"] + gradients, rates["slice"], rates["weight"], whole, rates["sent"]])
        running = rates["working_whole" if num_slices == 1 else "working"] / num_slices
        if num_slices > 1:
            # while a B rereads the longest prefix, one micro-batch fewer has keys and values
            are_all_live = shape.fills_and_drains or self.num_micro_batches == 1
            reread = rates["reread"] if are_all_live else np.maximum(0.0, rates["reread"] - rates["store"])
            running = np.maximum(running, rates["beside"] / num_slices + reread)
        if waiting and shape.is_split:
            own = (rates["working"] - rates["factors"] - rates["copied"]) / num_slices
            running += waiting * rates["weight"] + np.maximum(0.0, waiting * rates["copied"] - own)
        elif waiting:
            stays = (rates["slice"] - rates["joined"]) / num_slices
            copies = np.where(rates["joined"] > 0, np.maximum(0.0, waiting * rates["working"] - stays), 0.0)
            running += waiting * rates["joined"] + copies
        if shape.is_split:  # the slice whose B ends waits for its W as well
            running += np.maximum(0.0, rates["weight"] - rates["slice"] - rates["factors"]) / num_slices
        loss = rates["loss"] * min(part, self._part.loss_chunk_tokens)
        return held, np.maximum(running, loss) + rates["fixed_whole" if num_slices == 1 else "fixed"]

    @functools.cached_property
    def _part(self) -> PartMemory:
        """Return the memory of all layers as one part, for the numbers of tokens that it has in common with others."""
        count = self.layers.num_layers
        return self.layers.memory_of_spans(self.candidate.setting, [Span(0, count)])[0]

    def ends_s(self, bounds: Bounds, owners: Sequence[int]) -> list[float]:
        """Return, per stage, the seconds of its reduction, of the tied matrix's exchange, and of its optimizer step."""
        setting = self.candidate.setting
        summed, moved = self.layers.end_bytes(setting)
        reachable = self.cluster.card.reachable_bytes_per_s
        seconds = [fixed_s for fixed_s, _ in self._reductions]
        for (start, stop), stage_id in zip(itertools.pairwise(bounds), owners, strict=True):
            per_byte = self._reductions[stage_id][1]
            seconds[stage_id] += per_byte * summed[start:stop].sum() + moved[start:stop].sum() / reachable
        copy = self.layers.tied_copy(setting)
        if copy is not None and self._has_tied_copy(owners):
            link = self.cluster.link_between(self.candidate.grid, owners[0], owners[-1])
            for stage_id in (owners[0], owners[-1]):
                seconds[stage_id] += copy.exchanged / link.bandwidth_bytes_per_s + 2 * link.latency_s
            seconds[owners[-1]] += self._reductions[owners[-1]][1] * copy.summed + copy.moved / reachable
        return seconds

    def _has_tied_copy(self, owners: Sequence[int]) -> bool:
        return owners[0] != owners[-1] and self.layers.tied_copy(self.candidate.setting) is not None
