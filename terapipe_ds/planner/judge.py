"""What a plan costs under one schedule: predicted seconds, and whether it fits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.asked import AskedCosts
from terapipe_ds.planner.candidates import Lengths, to_plan
from terapipe_ds.planner.flow_shop import ends_s, fill_drain_s
from terapipe_ds.planner.memory import fill_drain_peak_bytes
from terapipe_ds.planner.programs import Floats
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SPLIT_SCHEDULES, build, placement_for
from terapipe_ds.schedule.placement import Placement
from terapipe_ds.simulator import Replay

Progress = Callable[[str, int, int], None]
"""Called now and then with (schedule, work done, of how much), for a progress line."""

FILL_DRAIN = ("terapipe", "gpipe")
"""All forwards before all backwards, by any order of micro-batches."""

# Work is counted in computations replayed, never in time, so that a search gives the same plan on every machine.
_BUILD = 30  # to build and order a computation of a schedule, in replays of one
_BUILD_LISTED = {"zbv": 120, "chimera-seq": 70}  # the same of orders that are played stage by stage (`list_schedule`)
_WALK = 6  # to add up its bytes
_CALL = 400  # of a call besides its computations
_FEW = 40_000  # computations of one replay; above, fewer micro-batches stand for all of them


class Judge:
    """Scores slice lengths (in granules) under one schedule; every score is kept.

    ``terapipe``, ``gpipe`` and every schedule of a single micro-batch (but those that split backwards or have several
    chunks) are two flow shops one after the other, whose recursion takes no replay. The others are replayed: as they
    are (`seconds`), or, where they are large, with two smaller numbers of micro-batches that are continued on a line
    (`estimate`). ``parts`` are the costs of every part; without ``num_stages`` there is one part per stage.
    """

    def __init__(
        self, schedule: str, parts: tuple[AskedCosts, ...], num_micro_batches: int, *, sequence_length: int,
        granularity_tokens: int, memory: Any = None, memory_limit_bytes: float | None = None, budget: int = 0,
        progress: Progress | None = None, num_stages: int | None = None, chunks_per_stage: int = 1,
        schedule_options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.schedule, self.parts, self.num_micro_batches = schedule, parts, num_micro_batches
        self.num_stages = len(parts) if num_stages is None else num_stages
        self.chunks_per_stage, self.schedule_options = chunks_per_stage, schedule_options
        self.placement = placement_for(schedule, self.num_stages, chunks_per_stage)
        self.has_chunks = schedule in CHUNKED_SCHEDULES
        self.sequence_length, self.granularity_tokens = sequence_length, granularity_tokens
        self.num_granules = -(-sequence_length // granularity_tokens)
        self.memory, self.memory_limit_bytes = memory, memory_limit_bytes
        self.budget, self.spent, self._progress = budget, 0, progress
        self.splits_backward = schedule in SPLIT_SCHEDULES
        one_by_one = num_micro_batches == 1 and not self.splits_backward and not self.has_chunks
        self.is_flow_shop = schedule in FILL_DRAIN or one_by_one
        self._build = _BUILD_LISTED.get(schedule, _BUILD)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._seconds: dict[tuple[int, Lengths], float] = {}
        self._bounds: dict[Lengths, float] = {}
        self._peaks: dict[Lengths, tuple[int, ...] | None] = {}

    def report(self) -> None:
        """Tell the caller how far the search is."""
        if self._progress is not None:
            self._progress(self.schedule, min(self.spent, self.budget), self.budget)

    @property
    def placed_chunks(self) -> int:
        """Parts that a stage holds under this schedule, whatever was asked for."""
        return len(self.placement) // self.num_stages

    @property
    def exhausted(self) -> bool:
        """The budget is spent."""
        return self.spent > self.budget

    @property
    def num_tried(self) -> int:
        """Plans that have a score, or a bound that made a score needless."""
        return len({lengths for _, lengths in self._seconds} | self._bounds.keys())

    def plan(self, lengths: Lengths) -> SlicePlan:
        """In tokens."""
        return to_plan(lengths, self.sequence_length, self.granularity_tokens)

    def seconds(self, lengths: Lengths) -> float:
        """The predicted seconds of a batch, every micro-batch replayed."""
        return self._of(self.num_micro_batches, lengths)

    def is_exact(self, lengths: Lengths) -> bool:
        """`estimate` counts every micro-batch. Of schedules with chunks up to twice as many computations: two smaller
        orders would have 1.5 times `_FEW`, and bytes are asked of the whole one."""
        most = 2 * _FEW if self.has_chunks else _FEW
        return self.is_flow_shop or self._computations(self.num_micro_batches, lengths) <= most

    def has_score(self, lengths: Lengths) -> bool:
        """It was replayed, whole or in part."""
        return any(lengths == scored for _, scored in self._seconds)

    def bound_s(self, lengths: Lengths) -> float:
        """What this plan takes at least, at a small part of the cost of a replay.

        On every stage k, in this order and without overlap: until it has run the forwards of micro-batch 0 (a flow shop
        of the stages down to k), its work on as many slices as m - 1 micro-batches have, and the last micro-batch in
        backward from k up to stage 0 (the mirror image). See `bounds`. Where backwards are split a stage may end with
        W of any micro-batch: there all that it has to do after its first forwards counts, and no way back. With several
        chunks it is the work of the busiest stage, or of all of them by turns.
        """
        if self.is_flow_shop:
            return self.seconds(lengths)
        if lengths not in self._bounds:
            self.spent += self._flow_shop_cost(0)
            forward, backward, send = self._times(lengths)
            if self.has_chunks:
                work = self.num_micro_batches * (forward + backward).sum(axis=1)
                self._bounds[lengths] = most_work_s(work, self.placement, self.num_stages)
                return self._bounds[lengths]
            between = (self.num_micro_batches - 1) * (forward + backward).sum(axis=1)
            end = backward.sum(axis=1) if self.splits_backward else ends_s(backward, send[1:])
            self._bounds[lengths] = float((ends_s(forward, send[:-1]) + between + end).max())
        return self._bounds[lengths]

    def estimate(self, lengths: Lengths) -> float:
        """As `seconds`, at a bounded cost: from the ``few`` micro-batches that fit in a replay (at least 4), and
        half of them."""
        if self.is_exact(lengths):
            return self.seconds(lengths)
        few = max(4, _FEW // self._computations(1, lengths))
        if few >= self.num_micro_batches:
            return self.seconds(lengths)
        whole, half = self._of(few, lengths), self._of(few // 2, lengths)
        return whole + (self.num_micro_batches - few) * (whole - half) / (few - few // 2)

    def cost_of(self, counts: dict[int, int]) -> int:
        """What it takes of the budget to judge so many plans: number of slices -> number of plans."""
        if self.is_flow_shop:
            return sum(self._flow_shop_cost(slices) * plans for slices, plans in counts.items())
        per_slice = self._kinds * len(self.parts) * self.num_micro_batches
        walk = _WALK if self.memory_limit_bytes is not None else 0
        return sum(
            per_slice * slices * (self._build + plans * (1 + walk)) + _CALL * plans for slices, plans in counts.items()
        )

    def fastest(
        self, plans: Iterable[Lengths], score: Callable[[Lengths], float], *, within_budget: bool = False
    ) -> Lengths | None:
        """The plan with the least ``score`` (`seconds` or `estimate`) that fits, of equals the one with fewer slices;
        None where none fits. Plans whose bound is above the best score so far are not replayed."""
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
        """Per stage, or None without memory."""
        if self.memory is not None and lengths not in self._peaks:
            plan = self.plan(lengths)
            if self.is_flow_shop:
                peaks = fill_drain_peak_bytes(plan, self.memory, self.num_stages, self.num_micro_batches)
            else:
                few = self._micro_batches_of_peak(len(lengths))
                replay = self._replay(few, len(lengths))
                self.spent += _WALK * self._computations(few, lengths)
                peaks = replay.peak_bytes(plan, self.memory)
            self._peaks[lengths] = peaks
        return self._peaks.get(lengths)

    def _micro_batches_of_peak(self, num_slices: int) -> int:
        """More of them change no peak: a stage of ``1f1b`` has at most K micro-batches live (of ``dapple`` with policy
        "B" 2 K - 1), one of ``seq1f1b`` K + s - 1 slices; then every micro-batch is like the one before. So it is with
        W. Orders of several chunks depend on how many there are."""
        if self.has_chunks:
            return self.num_micro_batches
        by_slices = self.schedule in ("seq1f1b", "seq1f1b-zb")
        live = -(-self.num_stages // num_slices) + 2 if by_slices else self.num_stages
        live = 2 * self.num_stages - 1 if self.schedule == "dapple" else live
        return min(self.num_micro_batches, live + 1 + self.splits_backward)

    def fits(self, lengths: Lengths) -> bool:
        """Every stage stays within the limit; True without one."""
        if self.memory_limit_bytes is None:
            return True
        peaks = self.peak_bytes(lengths)
        return peaks is None or max(peaks) <= self.memory_limit_bytes

    def work_s(self, lengths: Lengths) -> float:
        """The seconds of all computations of all stages."""
        forward, backward, _ = self._times(lengths)
        return self.num_micro_batches * float(forward.sum() + backward.sum())

    def _times(self, lengths: Lengths) -> tuple[Floats, Floats, Floats]:
        """Forward, backward and send seconds, [K, s]."""
        plan = self.plan(lengths)
        tokens, prefixes = np.array(plan.lengths), np.array(plan.starts)
        found = {id(part): part.times(tokens, prefixes) for part in {id(part): part for part in self.parts}.values()}
        forward, backward, send = (np.array([found[id(part)][i] for part in self.parts]) for i in range(3))
        return forward, backward, send

    def _computations(self, num_micro_batches: int, lengths: Lengths) -> int:
        return self._kinds * len(self.parts) * num_micro_batches * len(lengths)

    @property
    def _kinds(self) -> int:
        """F and B, or F, B and W."""
        return 3 if self.splits_backward else 2

    def _flow_shop_cost(self, num_slices: int) -> int:
        return _CALL + self.num_stages * (60 + self.num_micro_batches * num_slices // 20)

    def _of(self, num_micro_batches: int, lengths: Lengths) -> float:
        key = num_micro_batches, lengths
        if key not in self._seconds:
            if self.is_flow_shop:
                self.spent += self._flow_shop_cost(len(lengths))
                self._seconds[key] = fill_drain_s(*self._times(lengths), num_micro_batches)
            else:
                self._seconds[key] = self._replayed(*key)
        return self._seconds[key]

    def _replayed(self, num_micro_batches: int, lengths: Lengths) -> float:
        replay = self._replay(num_micro_batches, len(lengths))
        self.spent += _CALL + self._computations(num_micro_batches, lengths)
        return replay.makespan(self.plan(lengths), list(self.parts))

    def _replay(self, num_micro_batches: int, num_slices: int) -> Replay:
        key = num_micro_batches, num_slices
        if key not in self._replays:
            self.spent += self._build * self._kinds * len(self.parts) * num_micro_batches * num_slices
            schedule = build(
                self.schedule, self.num_stages, num_micro_batches, num_slices, chunks_per_stage=self.chunks_per_stage,
                **self.schedule_options,  # type: ignore[arg-type]
            )  # fmt: skip
            self._replays[key] = Replay(schedule)
        return self._replays[key]


def most_work_s(work_s: Iterable[float], placement: Placement, num_stages: int) -> float:
    """What the stages take at least, whatever the order, where part p has work for ``work_s[p]`` seconds.

    The busiest stage's parts where each part has one place; and always a K-th of everything.
    """
    seconds = list(work_s)
    least_s = sum(seconds) / num_stages
    if len(placement) == len(seconds):
        of_stage = [0.0] * num_stages
        for (stage_id, _), part_id in placement.items():
            of_stage[stage_id] += seconds[part_id]
        least_s = max(least_s, *of_stage)
    return float(least_s)
