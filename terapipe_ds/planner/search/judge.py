"""Judge plans under one schedule: predicted seconds, and whether a plan fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from terapipe_ds.messages import gib, limit_text
from terapipe_ds.planner.errors import TRY_FEWER_SEQUENCES, TRY_RECOMPUTE, TRY_SEQ1F1B, MemoryLimitError
from terapipe_ds.planner.search.pipeline import Lengths, Pipeline
from terapipe_ds.planner.slice_program.least_sums import Floats
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SPLIT_SCHEDULES, build, placement_for
from terapipe_ds.schedule.placement import Placement
from terapipe_ds.schedule.show import many
from terapipe_ds.simulator import Replay, ScheduleShape, replay_few
from terapipe_ds.simulator.few import FILL_DRAIN

Progress = Callable[[str, int, int], None]
"""Called now and then with (schedule or step, work done, of how much), for a progress line."""

# Work is counted in replayed computations, never in time, so that a search yields the same plan on every machine.
_BUILD = 30  # to build and order a computation of a schedule, in replays of one
_BUILD_LISTED = {"zbv": 200, "chimera-seq": 70}  # the same for orders that are played stage by stage (`list_schedule`)
_WALK = 6  # to add up its bytes
_CALL = 400  # of a call, on top of its computations


class Judge:
    """Score slice lengths (in granules) under one schedule; keep every score.

    `terapipe`, `gpipe` and every schedule of a single micro-batch (except schedules that split backwards or have
    several chunks) are two flow shops one after the other, whose recursion takes no replay. The others are replayed:
    with all micro-batches (`seconds`), or with few of them where there are many (`estimate`).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: str,
        *,
        budget: int = 0,
        progress: Progress | None = None,
        schedule_options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.pipeline, self.schedule, self.schedule_options = pipeline, schedule, schedule_options
        self.placement = placement_for(schedule, pipeline.num_stages, pipeline.chunks_per_stage)
        self.has_chunks = schedule in CHUNKED_SCHEDULES
        self.splits_backward = schedule in SPLIT_SCHEDULES
        is_single = pipeline.num_micro_batches == 1 and not self.splits_backward and not self.has_chunks
        self.is_flow_shop = schedule in FILL_DRAIN or is_single
        self.budget, self.spent, self._progress = budget, 0, progress
        # computations of a slice of one micro-batch: F and B, or F, B and W, of every part
        self._per_slice = (3 if self.splits_backward else 2) * len(pipeline.parts)
        self._build = _BUILD_LISTED.get(schedule, _BUILD)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._seconds: dict[Lengths, float] = {}
        self._estimates: dict[Lengths, float] = {}
        self._bounds: dict[Lengths, float] = {}
        self._peaks: dict[Lengths, tuple[int, ...]] = {}
        self._tightest: int | None = None  # the stage that took the most of the last plan that did not fit
        self._least_needs: dict[Lengths, int] = {}  # bytes of one stage, the tightest at that time: a lower bound

    def report(self) -> None:
        if self._progress is not None:
            self._progress(self.schedule, min(self.spent, self.budget), self.budget)

    @property
    def exhausted(self) -> bool:
        return self.spent > self.budget

    @property
    def num_tried(self) -> int:
        """Count the plans that have a score, or a bound that made a score needless."""
        return len(self._seconds.keys() | self._estimates.keys() | self._bounds.keys())

    def seconds(self, lengths: Lengths) -> float:
        """Return the predicted seconds of a batch, every micro-batch replayed."""
        if lengths not in self._seconds:
            self._seconds[lengths] = self._replayed_s(lengths, math.inf)
        return self._seconds[lengths]

    def has_score(self, lengths: Lengths) -> bool:
        """Return whether the plan was replayed, whole or in part."""
        return lengths in self._seconds or lengths in self._estimates

    def bound_s(self, lengths: Lengths) -> float:
        """Return a lower bound on the seconds of this plan, at a small part of the cost of a replay.

        On every stage k, in this order and without overlap: the forwards of micro-batch 0 down to k (a flow shop), its
        work on the slices of m - 1 micro-batches, and the last micro-batch in backward from k up to stage 0 (the mirror
        image). See `bounds`. Where backwards are split a stage may end with any W, so that no way back counts. With
        several chunks it is the work of the busiest stage, or the mean over all stages.
        """
        if self.is_flow_shop:
            return self.seconds(lengths)
        if lengths not in self._bounds:
            self.spent += self._flow_shop_cost(0)
            forward, backward, send, gradient = self.pipeline.times(lengths)
            work_s = (forward + backward).sum(axis=1)
            if self.has_chunks:
                all_s = self.pipeline.num_micro_batches * work_s
                self._bounds[lengths] = most_work_s(all_s, self.placement, self.pipeline.num_stages)
            else:
                between = (self.pipeline.num_micro_batches - 1) * work_s
                end = backward.sum(axis=1) if self.splits_backward else ends_s(backward, gradient[1:])
                self._bounds[lengths] = float((ends_s(forward, send[:-1]) + between + end).max())
        return self._bounds[lengths]

    def estimate(self, lengths: Lengths) -> float:
        """Return `seconds` at a bounded cost: a few micro-batches predict many."""
        if lengths not in self._estimates:
            self._estimates[lengths] = self._replayed_s(lengths, None)
        return self._estimates[lengths]

    def cost_of(self, counts: dict[int, int]) -> int:
        """Return the share of the budget to judge `counts`: number of slices -> number of plans."""
        if self.is_flow_shop:
            return sum(self._flow_shop_cost(slices) * plans for slices, plans in counts.items())
        per_slice = self._per_slice * self.pipeline.num_micro_batches
        replay = 1 if self.pipeline.memory_limit_bytes is None else 1 + _WALK
        return sum(
            per_slice * slices * (self._build + plans * replay) + _CALL * plans for slices, plans in counts.items()
        )

    def fastest(
        self, plans: Iterable[Lengths], score: Callable[[Lengths], float], *, within_budget: bool = False
    ) -> Lengths | None:
        """Return the plan that fits with the least `score`, then the fewest slices; None where none fits."""
        best: tuple[float, int, Lengths] | None = None
        for lengths in sorted(plans, key=lambda lengths: (self.bound_s(lengths), len(lengths), lengths)):
            self.report()
            if (best is not None and self.bound_s(lengths) > best[0]) or (within_budget and self.exhausted):
                break
            rank = score(lengths), len(lengths), lengths
            if (best is None or rank < best) and self.fits(lengths):
                best = rank
        return None if best is None else best[2]

    def peak_bytes(self, lengths: Lengths) -> tuple[int, ...] | None:
        """Return the peak bytes of every stage, or None without memory."""
        if self.pipeline.memory is None:
            return None
        if lengths not in self._peaks:
            self._peaks[lengths] = self._replayed_bytes(lengths)
        return self._peaks[lengths]

    def _replayed_bytes(self, lengths: Lengths, stages: Sequence[int] | None = None) -> tuple[int, ...]:
        walk = _WALK if stages is None else _WALK * len(stages) / self.pipeline.num_stages
        shape, replay_of = self._shape(len(lengths)), partial(self._replay, len(lengths), work=walk)
        plan, count, memory = self.pipeline.plan(lengths), self.pipeline.num_micro_batches, self.pipeline.memory
        return replay_few(shape, count, replay_of, plan, memory=memory, most=math.inf, stages=stages).peak_bytes

    def fits(self, lengths: Lengths) -> bool:
        """Return whether every stage stays within the limit; True without one."""
        limit = self.pipeline.memory_limit_bytes
        if limit is None:
            return True
        if self.needs_at_least(lengths) > limit:
            return False
        peaks = self.peak_bytes(lengths) or (0,)
        if max(peaks) > limit:
            self._tightest = peaks.index(max(peaks))
        return max(peaks) <= limit

    def needs_at_least(self, lengths: Lengths) -> int:
        """Return a lower bound on the most bytes of a stage: of the one on which plans failed so far, if any."""
        if lengths in self._peaks:
            return max(self._peaks[lengths])
        if self._tightest is None:
            return 0
        if lengths not in self._least_needs:
            (self._least_needs[lengths],) = self._replayed_bytes(lengths, (self._tightest,))
        return self._least_needs[lengths]

    def _flow_shop_cost(self, num_slices: int) -> int:
        return _CALL + self.pipeline.num_stages * (60 + self.pipeline.num_micro_batches * num_slices // 20)

    def _replayed_s(self, lengths: Lengths, most: float | None) -> float:
        """Return the seconds of a batch; a few micro-batches predict one of more than `most` computations."""
        count = self.pipeline.num_micro_batches
        if self.is_flow_shop:
            self.spent += self._flow_shop_cost(len(lengths))
            return fill_drain_s(*self.pipeline.times(lengths), count)
        shape, replay_of = self._shape(len(lengths)), partial(self._replay, len(lengths))
        costs = list(self.pipeline.parts)
        return replay_few(shape, count, replay_of, self.pipeline.plan(lengths), costs, most=most).makespan_s

    def _shape(self, num_slices: int) -> ScheduleShape:
        chunks = len(self.placement) // self.pipeline.num_stages
        return ScheduleShape(self.schedule, self.pipeline.num_stages, num_slices, chunks)

    def _replay(self, num_slices: int, num_micro_batches: int, work: float = 1) -> Replay:
        """Return the replay of `num_micro_batches`, and charge the budget for `work` walks over it."""
        key = num_micro_batches, num_slices
        computations = self._per_slice * num_micro_batches * num_slices
        self.spent += _CALL + round(work * computations)
        if key not in self._replays:
            self.spent += self._build * computations
            options: dict[str, Any] = {"chunks_per_stage": self.pipeline.chunks_per_stage, **self.schedule_options}
            self._replays[key] = Replay(build(self.schedule, self.pipeline.num_stages, *key, **options))
        return self._replays[key]


def most_work_s(work_s: Iterable[float], placement: Placement, num_stages: int) -> float:
    """Return the least seconds of the stages under any order, where part p has work for `work_s[p]` seconds."""
    seconds = list(work_s)
    of_stage = [0.0] * num_stages
    if len(placement) == len(seconds):  # each part has one place
        for (stage_id, _), part_id in placement.items():
            of_stage[stage_id] += seconds[part_id]
    return float(max(sum(seconds) / num_stages, *of_stage))


def memory_limit_error(judge: Judge, tried: Iterable[Lengths]) -> MemoryLimitError:
    """Return the error where nothing fits: the least need among the tried plans, its stage, and advice."""
    memory, limit = judge.pipeline.memory, judge.pipeline.memory_limit_bytes or 0.0
    needs: list[tuple[int, tuple[int, ...], int]] = []
    for least, plan in sorted(((judge.needs_at_least(plan), plan) for plan in tried), key=itemgetter(0)):
        if needs and least >= min(needs)[0]:
            break
        peaks = judge.peak_bytes(plan) or ()
        needs.append((max(peaks), peaks, len(plan)))
    need, peaks, count = min(needs, key=itemgetter(0))
    stage_id = peaks.index(need)
    parts = {part_id for (stage, _), part_id in judge.placement.items() if stage == stage_id}
    static = memory.process_bytes + memory.static_bytes(*parts) + memory.gradient_bytes(*parts)
    step = memory.step_bytes(*parts)  # beside them, at another time than slices
    smaller_model = "more stages, more tensor parallelism, ZeRO-1 with data parallelism"
    states = ", optimizer states, CUDA and NCCL" if memory.process_bytes else " and optimizer states"
    problem = (
        f"no plan fits in {limit_text(limit)}: with schedule {judge.schedule!r} the least need found is {gib(need)} "
        f"on stage {stage_id} ({many(count, 'slice')}); {gib(static)} of it are parameters, gradients{states}"
    )
    if static + step > limit:
        alone = "these alone are" if static > limit else f"with the {gib(step)} of the optimizer's step these are"
        text = f"{problem}; {alone} too much: try {smaller_model}, or devices with more memory"
        return MemoryLimitError(text, need, stage_id)
    schedules = () if judge.schedule == "seq1f1b" else (TRY_SEQ1F1B,)
    advice = *schedules, TRY_RECOMPUTE, TRY_FEWER_SEQUENCES, smaller_model
    return MemoryLimitError(problem, need, stage_id, advice)


# --- unequal stages: the exact recursion of a permutation flow shop, with links as machines


def fill_drain_s(
    forward_s: Floats, backward_s: Floats, send_s: Floats, send_gradient_s: Floats, num_micro_batches: int
) -> float:
    """Return the seconds from the first forward on the first stage to the last backward on it, exactly.

    All arrays [K, s]: stage and slice; `send_s[k]` and `send_gradient_s[k]` are transfers out of stage k. Every stage
    runs all forwards, then all backwards in the reverse order (the schedule "terapipe"). No stage starts its backwards
    before the last one has run all forwards, so the time is the sum of two flow shops, one after the other.
    """

    def makespan(times_s: Floats, links_s: Floats) -> float:
        return float(ends_s(np.tile(times_s, num_micro_batches), np.tile(links_s, num_micro_batches))[-1])

    return makespan(forward_s, send_s[:-1]) + makespan(backward_s[::-1, ::-1], send_gradient_s[:0:-1, ::-1])


def ends_s(times_s: Floats, links_s: Floats) -> Floats:
    """Return the time [K] when each machine has done all jobs.

    `times_s` [K, s] of job i on machine k, `links_s` [K - 1, s] from machine k to k + 1. Machines and links take the
    jobs in order, one at a time: end[k, i] = max(end[k, i - 1], end[k - 1, i]) + time[k, i].

    With the times of backwards the result is the mirror image: the seconds from the start of the last job on each
    machine until the first job leaves machine 0.
    """
    ready = np.zeros(times_s.shape[1])
    ends = []
    for k, row in enumerate(times_s):
        ready = _through(ready, row)
        ends.append(ready[-1])
        if k < len(links_s):
            ready = _through(ready, links_s[k])
    return np.array(ends)


def _through(ready: Floats, times_s: Floats) -> Floats:
    """Return when each job leaves one machine: the latest, over j <= i, of ready[j] plus the times of j..i."""
    ends = np.cumsum(times_s)
    latest: Floats = np.maximum.accumulate(ready - (ends - times_s)) + ends
    return latest
