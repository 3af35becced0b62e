"""What a plan costs under one schedule: predicted seconds, and whether it fits in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.asked import AskedCosts
from terapipe_ds.planner.candidates import Lengths, to_plan
from terapipe_ds.planner.memory import fill_drain_peak_bytes
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay

FILL_DRAIN = ("terapipe", "gpipe")
"""All forwards before all backwards, by any order of micro-batches."""

# Work is counted in computations replayed, never in time, so that a search gives the same plan on every machine.
_BUILD = 12  # to build and order a computation of a schedule, in replays of one
_WALK = 8  # to add up its bytes
_CALL = 400  # of a call besides its computations
_FEW = 40_000  # computations of one replay; above, fewer micro-batches stand for all of them


class Judge:
    """Scores slice lengths (in granules) under one schedule; every score is kept.

    Where all stages are alike and no message takes longer than the computation before it, ``terapipe`` and ``gpipe``
    take exactly m sum(f + b) + (K - 1) (max(f + send) + max(b + send)), and nothing is replayed. Otherwise the schedule
    is replayed: as it is (`seconds`), or, where it is large, with two smaller numbers of micro-batches that are
    continued on a line (`estimate`).
    """

    def __init__(
        self, schedule: str, parts: tuple[AskedCosts, ...], num_micro_batches: int, *, sequence_length: int,
        granularity_tokens: int, memory: Any = None, memory_limit_bytes: float | None = None, budget: int = 0,
    ) -> None:  # fmt: skip
        self.schedule, self.parts, self.num_micro_batches = schedule, parts, num_micro_batches
        self.sequence_length, self.granularity_tokens = sequence_length, granularity_tokens
        self.num_granules = -(-sequence_length // granularity_tokens)
        self.memory, self.memory_limit_bytes = memory, memory_limit_bytes
        self.budget, self.spent = budget, 0
        self.may_have_formula = schedule in FILL_DRAIN and all(part is parts[0] for part in parts)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._seconds: dict[tuple[int, Lengths], float] = {}
        self._peaks: dict[Lengths, tuple[int, ...] | None] = {}

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.parts)

    @property
    def exhausted(self) -> bool:
        """The budget is spent."""
        return self.spent > self.budget

    @property
    def num_tried(self) -> int:
        """Plans that have a score."""
        return len({lengths for _, lengths in self._seconds})

    def plan(self, lengths: Lengths) -> SlicePlan:
        """In tokens."""
        return to_plan(lengths, self.sequence_length, self.granularity_tokens)

    def seconds(self, lengths: Lengths) -> float:
        """The predicted seconds of a batch, every micro-batch replayed."""
        return self._of(self.num_micro_batches, lengths)

    def is_exact(self, lengths: Lengths) -> bool:
        """`estimate` replays every micro-batch."""
        if self._computations(self.num_micro_batches, lengths) <= _FEW:
            return True
        return self.has_formula(lengths)

    def has_formula(self, lengths: Lengths) -> bool:
        """The time is known without a replay."""
        return self.may_have_formula and self._formula(lengths) is not None

    def estimate(self, lengths: Lengths) -> float:
        """As `seconds`, at a bounded cost: from the ``few`` micro-batches that fit in a replay, and half of them."""
        if self.is_exact(lengths):
            return self.seconds(lengths)
        few = max(2, _FEW // self._computations(1, lengths))
        if few >= self.num_micro_batches:
            return self.seconds(lengths)
        whole, half = self._of(few, lengths), self._of(few // 2, lengths)
        return whole + (self.num_micro_batches - few) * (whole - half) / (few - few // 2)

    def cost_of(self, counts: dict[int, int]) -> int:
        """What it takes of the budget to judge so many plans: number of slices -> number of plans."""
        if self.may_have_formula:
            return _CALL * sum(counts.values())
        per_slice = 2 * self.num_stages * self.num_micro_batches
        walk = _WALK if self.memory_limit_bytes is not None else 0
        return sum(
            per_slice * slices * (_BUILD + plans * (1 + walk)) + _CALL * plans for slices, plans in counts.items()
        )

    def peak_bytes(self, lengths: Lengths) -> tuple[int, ...] | None:
        """Per stage, or None without memory."""
        if self.memory is not None and lengths not in self._peaks:
            plan = self.plan(lengths)
            if self.schedule in FILL_DRAIN:
                peaks = fill_drain_peak_bytes(plan, self.memory, self.num_stages, self.num_micro_batches)
            else:
                replay = self._replay(self.num_micro_batches, len(lengths))
                self.spent += _WALK * self._computations(self.num_micro_batches, lengths)
                peaks = replay.peak_bytes(plan, self.memory)
            self._peaks[lengths] = peaks
        return self._peaks.get(lengths)

    def fits(self, lengths: Lengths) -> bool:
        """Every stage stays within the limit; True without one."""
        if self.memory_limit_bytes is None:
            return True
        peaks = self.peak_bytes(lengths)
        return peaks is None or max(peaks) <= self.memory_limit_bytes

    def work_s(self, lengths: Lengths) -> list[float]:
        """Per part, the seconds of all its computations."""
        found: dict[int, float] = {}
        for part in self.parts:
            if id(part) not in found:
                found[id(part)] = self.num_micro_batches * math.fsum(sum(self._times(part, lengths)))
        return [found[id(part)] for part in self.parts]

    def _times(self, part: AskedCosts, lengths: Lengths) -> tuple[Any, Any]:
        plan = self.plan(lengths)
        tokens, prefixes = np.array(plan.lengths), np.array(plan.starts)
        return part.forward_s(tokens, prefixes), part.backward_s(tokens, prefixes)

    def _computations(self, num_micro_batches: int, lengths: Lengths) -> int:
        return 2 * self.num_stages * num_micro_batches * len(lengths)

    def _of(self, num_micro_batches: int, lengths: Lengths) -> float:
        key = num_micro_batches, lengths
        if key not in self._seconds:
            known_s = self._formula(lengths) if self.may_have_formula else None
            self._seconds[key] = self._replayed(*key) if known_s is None else known_s
        return self._seconds[key]

    def _formula(self, lengths: Lengths) -> float | None:
        """None where a link is slower than the computation before it."""
        self.spent += _CALL
        part = self.parts[0]
        forward, backward = self._times(part, lengths)
        sends = np.zeros(len(lengths))
        if hasattr(part, "send_s"):
            sends = part.send_s(np.array(self.plan(lengths).lengths))
        if (sends > np.minimum(forward, backward)).any():
            return None
        slowest = float((forward + sends).max() + (backward + sends).max())
        return self.num_micro_batches * math.fsum(forward + backward) + (self.num_stages - 1) * slowest

    def _replayed(self, num_micro_batches: int, lengths: Lengths) -> float:
        replay = self._replay(num_micro_batches, len(lengths))
        self.spent += _CALL + self._computations(num_micro_batches, lengths)
        return replay.makespan(self.plan(lengths), list(self.parts))

    def _replay(self, num_micro_batches: int, num_slices: int) -> Replay:
        key = num_micro_batches, num_slices
        if key not in self._replays:
            self.spent += _BUILD * 2 * self.num_stages * num_micro_batches * num_slices
            self._replays[key] = Replay(build(self.schedule, self.num_stages, num_micro_batches, num_slices))
        return self._replays[key]
