"""Predict the seconds and bytes of a batch of many micro-batches by replaying a few of them.

A full pipeline repeats itself: each further micro-batch takes as long as the one before it. So two runs that both fill
the pipeline predict the time of any longer one, exactly where the schedule is periodic and nearly elsewhere. A stage
reaches its peak once the pipeline is full. With all forwards before all backwards, each micro-batch instead adds as
many bytes as the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import SPLIT_SCHEDULES
from terapipe_ds.schedule.split_chunks import TAKE_LIMITS
from terapipe_ds.simulator.peak_memory import Memory
from terapipe_ds.simulator.replay import Replay

FEW = 10_000
"""Computations of a batch up to which all of its micro-batches are replayed."""

_FILLED = 3_000  # computations that fill a small pipeline, about

FILL_DRAIN = ("terapipe", "gpipe")
"""The schedules that run all forwards before all backwards."""


class ScheduleShape(NamedTuple):
    """Hold the numbers that decide how many micro-batches fill a pipeline."""

    schedule: str
    num_stages: int
    num_slices: int
    chunks_per_stage: int = 1

    @property
    def num_computations(self) -> int:
        """Return the computations of one micro-batch."""
        kinds = 3 if self.schedule in SPLIT_SCHEDULES else 2
        return kinds * self.num_stages * self.chunks_per_stage * self.num_slices

    @property
    def filling(self) -> int:
        """Return the number of micro-batches that fill the pipeline twice, or more where they are small."""
        count = max(4, 2 * (-(-self.num_stages // self.num_slices) + 1), _FILLED // self.num_computations)
        # stages of several parts take micro-batches in groups of this size
        group = 1 if self.chunks_per_stage == 1 else 2 * self.num_stages
        return group * -(-count // group)

    def few_of_many(self, offloads: bool) -> int:
        """Return the number of micro-batches from which on each adds the same bytes, if all forwards come first."""
        return self.filling if offloads else 3

    @property
    def most_live(self) -> tuple[int, bool]:
        """Return the number of micro-batches after which no stage holds more, and whether that is proven.

        A stage has at most K micro-batches live under `1f1b`, 2 K - 1 under `dapple`, and K + s - 1 slices under
        `seq1f1b`. Tensors that a stage has sent, or keeps for weight gradients, stay for up to three more.
        """
        stages, slices, chunks = self.num_stages, self.num_slices, self.chunks_per_stage
        by_slices = -(-stages // slices) + 4
        proven = {
            "1f1b": stages + 1,
            "dapple": 2 * stages,
            "zb-h1": stages + 2,
            "seq1f1b": by_slices,
            "seq1f1b-zb": by_slices + 1,
        }
        if self.schedule in proven:
            return proven[self.schedule], True
        if self.schedule in TAKE_LIMITS:
            return stages + 3, False
        live = (chunks + 1) * stages * (slices if self.schedule == "interleaved" else 1) + 3 * slices
        return -(-live // slices) + 1, False


@dataclass(frozen=True)
class Outcome:
    """Hold the seconds and bytes of a batch; if `is_proven`, a replay of all micro-batches gives the same."""

    ends_s: tuple[float, ...]  # per stage, the end of its last computation; empty without costs
    peak_bytes: tuple[int, ...]  # per stage; empty without memory
    is_proven: bool

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s)


def replay_few(
    shape: ScheduleShape,
    num_micro_batches: int,
    replay_of: Callable[[int], Replay],
    plan: SlicePlan,
    costs: Any = None,
    memory: Memory | None = None,
    *,
    most: float | None = None,
    stages: Sequence[int] | None = None,
) -> Outcome:
    """Return a batch's seconds under `costs` and bytes under `memory`, replaying as few micro-batches as suffice.

    Args:
        replay_of: returns the replay of the shape's schedule with a number of micro-batches.
        most: computations of a batch up to which all micro-batches are replayed; None: `FEW`.
        stages: those whose bytes count; None: all.
    """
    is_short = num_micro_batches * shape.num_computations <= (FEW if most is None else most)
    ends_s: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    is_proven = True
    if costs is not None:
        few = num_micro_batches if is_short else min(num_micro_batches, shape.filling)
        ends_s = tuple(replay_of(few).ends_of_stages(plan, costs, memory))
        if few < num_micro_batches:
            # each further micro-batch takes as long as those in the second half
            half = few // 2
            times = (num_micro_batches - few) / (few - half)
            earlier_s = replay_of(half).ends_of_stages(plan, costs, memory)
            ends_s = tuple(end + times * (end - earlier) for end, earlier in zip(ends_s, earlier_s, strict=True))
            is_proven = False
    if memory is not None and shape.schedule in FILL_DRAIN:
        few = num_micro_batches if memory.offloads and is_short else shape.few_of_many(memory.offloads)
        # the optimizer's step, which may need most after few micro-batches, does not grow with live slices
        found = of_many(lambda count: replay_of(count).peaks_and_steps(plan, memory, stages), few, num_micro_batches)
        peaks = tuple(map(max, found))
        is_proven &= not memory.offloads or few >= num_micro_batches
    elif memory is not None:
        enough, is_sure = shape.most_live
        if memory.offloads:  # a slice is away for a while that the rest of the batch decides
            enough, is_sure = (num_micro_batches if is_short else shape.filling), False
        elif is_short and not is_sure:
            enough = num_micro_batches
        peaks = replay_of(min(num_micro_batches, enough)).peak_bytes(plan, memory, stages)
        is_proven &= is_sure or enough >= num_micro_batches
    return Outcome(ends_s, peaks, is_proven)


def of_many(numbers_of: Callable[[int], Any], few: int, many: int) -> Any:
    """Return integers of a batch of `many` micro-batches, where each adds as much as the last of `few`."""
    last = np.array(numbers_of(min(few, many)), np.int64)
    more = (many - few) * (last - np.array(numbers_of(few - 1), np.int64)) if few < many else 0
    return (last + more).tolist()
