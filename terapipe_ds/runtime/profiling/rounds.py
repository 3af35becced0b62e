"""Measure the times of a part's slices, on all stages at once, before or between batches.

All ranks run the same points in the same order and begin each together: stages share a machine in training as well, and
tensor-parallel peers meet inside the layers. Points come in groups of about a whole sequence, all forwards and then all
backwards in reverse: slices that are live together use memory that is no longer warm, as in training. Groups repeat
round after round, so that a drift of the machine affects all alike. The result is the median of the runs in which no
other program had the processor: otherwise a few commands of another user would make the plan avoid a slice or two.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from terapipe_ds.costs.profile import CostSample
from terapipe_ds.runtime.agreement import barrier, largest
from terapipe_ds.runtime.layout.sequence_axis import shortest_slice_on
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer

Point = tuple[int, int]  # (tokens, prefix)

MIN_ROUNDS, MAX_ROUNDS = 3, 8
LIMIT_STEPS = 10  # the rounds take at most this many unsliced steps, as far as the least number of rounds allows
WIDE_SPREAD = 0.15  # an interquartile range over the median beyond which the numbers deserve a warning
_DISTURBED = 0.02  # of its time: a run that lost this much more than the least disturbed one does not count
_SMALL_TOKENS = 128  # slices of fewer tokens run several times a round: they are cheap, and timers are coarse
_PREFIX_SIZES = 4  # how many slice lengths are measured with a prefix as well


def time_part(
    timer: SliceTimer,
    granularity_tokens: int,
    num_stages: int,  # of a training step, whose unsliced time limits the measuring
    num_micro_batches: int,
    *,
    group: Any = None,  # of the ranks that measure at the same time, on the CPU; None: this rank alone
    progress: Callable[[float], Any] = lambda share: None,  # called with the finished share, between 0 and 1
) -> tuple[CostSample, ...]:
    """Return the seconds of one part; a collective over `group`."""
    length = timer.sequence_length
    points = grid(length, granularity_tokens, shortest_slice_on(timer.module))
    # a job must not wait longer for its plan than for a few of its steps
    limit_steps = LIMIT_STEPS * (num_micro_batches + num_stages - 1)
    processor_s = time.process_time if get_accelerator().is_synchronized_device() else None
    with timer.leaving_weights():
        rounds = measure(timer, points, length, limit_steps, group, processor_s, progress)
    alone = rounds.weight_s() if timer.can_split else None
    return rounds.samples(shares(alone, timer.joined_tokens) if alone and timer.joins_unsplit else alone)


def grid(sequence_length: int, granularity_tokens: int, shortest: int = 1) -> tuple[Point, ...]:
    """Return the points to measure: few, because the cost model fills in the rest.

    They are slices without a prefix from one granule, doubling, to the whole sequence, and some of these lengths with
    prefixes up to the longest that fits. Layers cannot run fewer tokens than `shortest`, except a whole sequence.
    """
    smallest = min(max(granularity_tokens, shortest), sequence_length)
    lengths = [smallest]
    while 2 * lengths[-1] < sequence_length:
        lengths.append(2 * lengths[-1])
    bases = [(tokens, 0) for tokens in (*lengths, sequence_length)]
    candidates = [tokens for tokens in lengths if 2 * tokens <= sequence_length]
    stride = max(1, -(-len(candidates) // _PREFIX_SIZES))
    contexts = []
    # prefixes from large slices to small ones, as evenly as their number allows
    for tokens in candidates[::-stride]:
        contexts.append((tokens, sequence_length - tokens))
        if (sequence_length - tokens) // 2 >= tokens:
            contexts.append((tokens, (sequence_length - tokens) // 2))
    if not contexts and smallest < sequence_length:  # two slices; the second one is less than a granule
        second = max(sequence_length - smallest, shortest)
        contexts.append((second, sequence_length - second))
    return tuple(dict.fromkeys(bases + contexts))


def groups_of(points: Sequence[Point], sequence_length: int) -> tuple[tuple[Point, ...], ...]:
    """Group points that are live together, about a whole sequence each; a group repeats short slices."""
    groups: list[list[Point]] = []
    room = 0
    for point in sorted(points, reverse=True):
        repeats = max(1, min(_SMALL_TOKENS, sequence_length) // point[0])
        needed = repeats * point[0]
        # slices of a group are live together, and no more than a sequence fits in memory
        if needed > room:
            groups.append([])
            room = sequence_length
        groups[-1] += [point] * repeats
        room -= needed
    return tuple(map(tuple, groups))


class Taken(NamedTuple):
    """Hold the time of one run."""

    seconds: float
    lost_s: float = 0.0  # without a processor: another program had it, or this rank waited for a peer inside the layers


@dataclass
class Rounds:
    """Collect the times of one rank's runs, by point."""

    processor_s: Callable[[], float] | None = None  # of this process so far; None: a device computes beside the host
    forwards: defaultdict[Point, list[Taken]] = field(default_factory=partial(defaultdict, list))
    backwards: defaultdict[Point, list[Taken]] = field(default_factory=partial(defaultdict, list))
    weights: defaultdict[int, list[Taken]] = field(default_factory=partial(defaultdict, list))  # W, by tokens
    count: int = 0

    def run(self, timer: SliceTimer, points: Sequence[Point], group: Any) -> None:
        """Run the forwards of points that are live together, and their backwards in reverse."""
        live = []
        for point in points:
            barrier(group)
            begin_s = self._processor_s()
            seconds, kept = timer.forward(*point)
            self.forwards[point].append(Taken(seconds, self._lost_s(seconds, begin_s)))
            live.append((point, kept))
        # backwards in reverse, as in training
        while live:
            point, kept = live.pop()
            barrier(group)
            begin_s = self._processor_s()
            backward_s, weight_s = timer.backward(kept)
            lost_s = self._lost_s(backward_s + weight_s, begin_s)
            self.backwards[point].append(Taken(backward_s, lost_s))
            self.weights[point[0]].append(Taken(weight_s, lost_s))

    def _processor_s(self) -> float:
        return 0.0 if self.processor_s is None else self.processor_s()

    def _lost_s(self, seconds: float, begin_s: float) -> float:
        return 0.0 if self.processor_s is None else max(0.0, seconds - (self.processor_s() - begin_s))

    def weight_s(self) -> dict[int, float]:
        """Return tokens -> seconds of W, which no prefix changes."""
        return {tokens: statistics.median(undisturbed(runs)) for tokens, runs in self.weights.items()}

    def samples(self, weight_s: Mapping[int, float] | None = None) -> tuple[CostSample, ...]:
        """Return medians of the runs without disturbance, and spreads of all.

        `weight_s` has tokens -> seconds of W, if the backwards that ran have left it.
        """
        samples = []
        for point, forwards in self.forwards.items():
            both = forwards, self.backwards[point]
            forward_s, backward_s = (statistics.median(undisturbed(runs)) for runs in both)
            forward_spread, backward_spread = (spread([run.seconds for run in runs]) for runs in both)
            w_s = None if weight_s is None else weight_s[point[0]]
            numbers = forward_s, backward_s + (w_s or 0.0), forward_spread, backward_spread
            samples.append(CostSample(*point, *numbers, len(forwards), w_s))
        return tuple(samples)


def measure(
    timer: SliceTimer,
    points: Sequence[Point],
    sequence_length: int,
    limit_steps: int,
    group: Any = None,
    processor_s: Callable[[], float] | None = None,
    progress: Callable[[float], Any] = lambda share: None,
) -> Rounds:
    """Run all `points` in rounds that take at most `limit_steps` unsliced steps; a collective over `group`."""
    begin_s = time.perf_counter()
    groups = groups_of(points, sequence_length)
    warm, whole = Rounds(), (sequence_length, 0)
    # all ranks run as many rounds as the slowest can afford
    for _ in range(2):  # once to warm up, and once to measure a step
        warm.run(timer, [whole], group)
    runs = warm.forwards[whole], warm.backwards[whole], warm.weights[sequence_length]
    limit_s = limit_steps * largest(sum(taken[-1].seconds for taken in runs), group)
    rounds, planned = Rounds(processor_s), MAX_ROUNDS
    while rounds.count < planned:
        round_s = time.perf_counter()
        for index, together in enumerate(groups):
            rounds.run(timer, together, group)
            progress((rounds.count + (index + 1) / len(groups)) / planned)
        rounds.count += 1
        now_s = time.perf_counter()
        if largest(now_s - begin_s, group) + largest(now_s - round_s, group) > limit_s:
            planned = max(MIN_ROUNDS, rounds.count)
    progress(1.0)
    return rounds


def shares(alone: Mapping[int, float], joined_tokens: float) -> dict[int, float]:
    """Return tokens -> each slice's share of W, which is one product for slices of `joined_tokens` tokens together.

    `alone` has the seconds of W of single slices.
    """
    joined = min((tokens for tokens in alone if tokens >= joined_tokens), default=max(alone))
    return {
        tokens: seconds if tokens >= joined_tokens else alone[joined] * tokens / joined
        for tokens, seconds in alone.items()
    }


def undisturbed(runs: Sequence[Taken]) -> list[float]:
    """Return the seconds of the runs that lost little more than the least disturbed one.

    Peers that meet inside the layers wait for one another in every run, so the loss is relative to the least.
    """
    least_s = min(run.lost_s for run in runs)
    return [run.seconds for run in runs if run.lost_s <= least_s + _DISTURBED * run.seconds]


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / statistics.median(values)


def noise_warning(samples: Sequence[CostSample]) -> str | None:
    """Return a warning if the spread is too wide for a plan to be trusted, else None."""
    by_spread = sorted((max(s.forward_spread, s.backward_spread), s.tokens, s.prefix) for s in samples)
    wide = [entry for entry in by_spread if entry[0] > WIDE_SPREAD]
    if len(wide) * 2 <= len(samples):
        return None
    share, tokens, prefix = wide[-1]
    return (
        f"{len(wide)} of {len(samples)} measured slices vary by more than {WIDE_SPREAD:.0%} (the worst, {tokens} "
        f"tokens after {prefix}, by {share:.0%}): the machine is busy with something else, and the plan may not "
        "be the best; measure again when it is quiet"
    )
