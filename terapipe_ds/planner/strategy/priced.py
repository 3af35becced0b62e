"""Price the cuts of one candidate by a replay of the schedule that will run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.layers.cuts import Bounds
from terapipe_ds.planner.layers.part_costs import NO_WIRE, PartCosts, Wire
from terapipe_ds.planner.layers.parts import Again, Span
from terapipe_ds.planner.memory import MEMORY_KINDS, MemoryModel
from terapipe_ds.planner.strategy.candidate import NO_LEVERS, USABLE, Score, owners_of, replay_of
from terapipe_ds.planner.strategy.estimate import Estimated
from terapipe_ds.planner.strategy.rates import equal_plan
from terapipe_ds.planner.strategy.shapes import Shape
from terapipe_ds.simulator import ScheduleShape, replay_few
from terapipe_ds.simulator.few import FILL_DRAIN, of_many

MOST_WHOLE = 3_000_000
"""Computations of a batch up to which a final answer is replayed whole: half a minute, a gigabyte."""


class Priced(Estimated):
    """Price the cuts of one candidate on one cluster.

    `replayed_bytes` is the least need of the replayed cuts that did not fit in memory. In all
    methods `owners[k]` is the stage of part k, and `recompute[k]` belongs to stage k.
    """

    replayed_bytes: int | None = None

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
            beyond = self.layers.overhead(self.candidate.setting, span[1] - 1)
            layers = [*costs[recompute[stage_id]][slice(*span)], *beyond]
            send_s, send_gradient_s = wires[part_id + 1], wires[part_id]
            key = tuple(map(id, layers)), send_s, send_gradient_s
            part = PartCosts(layers, send_s=send_s, send_gradient_s=send_gradient_s)
            parts.append(kept.setdefault(key, part))
        return parts

    def memory(self, bounds: Bounds, recompute: Sequence[int], owners: Sequence[int]) -> MemoryModel:
        edges = zip(itertools.pairwise(bounds), owners, strict=True)
        spans = [Span(*ends, recompute[stage_id]) for ends, stage_id in edges]
        parts = self.layers.memory_of_spans(self.candidate.setting, spans)
        memory = MemoryModel(parts, process_bytes=self._process_bytes)
        if not self.candidate.levers.offload_activations:
            return memory
        return dataclasses.replace(memory, offloads=True, host_bytes_per_s=self.cluster.host_link.bandwidth_bytes_per_s)

    def score(
        self,
        bounds: Bounds,
        shape: Shape,
        plan: SlicePlan,
        limit_bytes: float,
        most: float | None = MOST_WHOLE,
        beat_s: float = math.inf,
    ) -> Score | None:
        """Replay a cut under a schedule and return its score; None where it does not fit, or takes more than `beat_s`.

        Stages that do not fit otherwise recompute, where they may. With offloaded activations recomputation saves
        copies too: the fastest choice counts. A few micro-batches predict a batch of more than `most` computations.
        """
        kinds, offloads = self._kinds(shape.schedule), self.candidate.levers.offload_activations
        over, best = (everything := (True,) * self.num_stages), None
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks)
        host_bytes = USABLE * (self.cluster.card.host_memory_bytes or math.inf)
        # nothing recomputes, then the kind that takes the least time, full recomputation last
        for kind in (kinds[0], *reversed(kinds[1:])):
            for again in filter(any, dict.fromkeys((over, everything)) if offloads else (over,)):
                recompute = tuple(kind if recomputes else Again.OFF for recomputes in again)
                score = self.price(bounds, shape, plan, recompute, most, beat_s)
                if score is None or score.host_bytes > host_bytes:
                    if kind == Again.OFF and offloads:  # its copies may be what takes too long
                        peaks = self._peaks_of(bounds, owners, shape, plan.num_slices, Again.OFF)
                        over = tuple((peaks > limit_bytes).tolist())
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

    def price(
        self,
        bounds: Bounds,
        shape: Shape,
        plan: SlicePlan,
        recompute: Sequence[Again],
        most: float | None = MOST_WHOLE,
        beat_s: float = math.inf,
    ) -> Score | None:
        """Return the score of one choice of recomputation; None where it takes more than `beat_s`."""
        owners = owners_of(shape.schedule, self.num_stages, shape.chunks)
        # no stage takes less than its own computations
        if plan == equal_plan(self.candidate.setting, self.length, plan.num_slices):
            busy_s = self.num_micro_batches * self._busy_s(bounds, owners, plan.num_slices, recompute)
            if self._step_s(busy_s.tolist(), bounds, owners) > beat_s:
                return None
        replayed = ScheduleShape(shape.schedule, self.num_stages, plan.num_slices, shape.chunks)
        replays = functools.partial(replay_of, replayed)
        replay = functools.partial(replay_few, replayed, self.num_micro_batches, replays, plan, most=most)
        costs, memory = self.parts(bounds, recompute, owners), self.memory(bounds, recompute, owners)
        # the seconds are known sooner than the bytes, and those without copies to the host sooner than those with them
        for copied in (None, memory) if memory.offloads else (None,):
            timed = replay(costs=costs, memory=copied)
            if (seconds := self._step_s(list(timed.ends_s), bounds, owners)) > beat_s:
                return None
        hosts = self._host_bytes(replayed, bounds, plan, memory, owners)
        held = replay(memory=memory)
        is_final = most is not None or (held.is_proven and timed.is_proven)
        return Score(seconds, self.candidate, bounds, tuple(recompute), shape, plan, held.peak_bytes, is_final, hosts)

    def _step_s(self, done_s: list[float], bounds: Bounds, owners: Sequence[int]) -> float:
        """Return the seconds to the end of each stage's reduction and step, which follow its last computation."""
        if self._has_tied_copy(owners):  # its two stages wait for each other
            done_s[owners[0]] = done_s[owners[-1]] = max(done_s[owners[0]], done_s[owners[-1]])
        return float(max(done + end for done, end in zip(done_s, self.ends_s(bounds, owners), strict=True)))

    def _host_bytes(
        self, shape: ScheduleShape, bounds: Bounds, plan: SlicePlan, memory: MemoryModel, owners: Sequence[int]
    ) -> int:
        """Return the bytes of offloaded slices and optimizer states on the host of the fullest node."""
        if self.candidate.levers == NO_LEVERS:
            return 0
        of_stages = np.zeros(self.num_stages)
        if memory.offloads:  # else no schedule is built for it
            few, number = shape.filling, self.num_micro_batches
            number = number if shape.schedule in FILL_DRAIN else min(few, number)
            of_stages += of_many(lambda count: replay_of(shape, count).host_bytes(plan, memory), few, number)
        of_layers = self.layers.host_bytes(self.candidate.setting)
        for (start, stop), stage_id in zip(itertools.pairwise(bounds), owners, strict=True):
            of_stages[stage_id] += of_layers[start:stop].sum()
        return math.ceil(self.cluster.fullest_node(self.candidate.grid, of_stages))

    def peak_by_kind(self, score: Score) -> dict[str, list[int]]:
        """Return the peak bytes of each stage by kind; they add up to the peaks of the score."""
        schedule, chunks = score.shape
        owners = owners_of(schedule, self.num_stages, chunks)
        shape = ScheduleShape(schedule, self.num_stages, score.plan.num_slices, chunks)
        whole = self.memory(score.bounds, score.recompute, owners)
        kinds = {kind: whole.only(kind) for kind in MEMORY_KINDS}
        memories = [whole, *kinds.values()]
        few = number = min(self.num_micro_batches, max(shape.filling, shape.most_live[0]))
        if score.shape.fills_and_drains:
            few, number = shape.few_of_many(whole.offloads), self.num_micro_batches
        found = of_many(lambda count: replay_of(shape, count).peak_by_kind(score.plan, memories), few, number)
        found = list(map(max, found))  # the larger of two peaks: before the optimizer's step, and in it
        by_kind = {kind: [of[index] for of in found] for index, kind in enumerate(kinds, 1)}
        # all else that the peak has belongs to the computation that runs, or to the step
        rest = (peak - sum(of[1:]) for peak, of in zip(score.peak_bytes, found, strict=True))
        return by_kind | {"running": list(rest)}
