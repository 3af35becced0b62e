"""Measure what slices of a stage take, on all stages at once, before or between batches.

All ranks run the same points in the same order and begin each together: stages share a machine in training as well, and
tensor-parallel peers meet inside the layers. Points come in groups of about a whole sequence, all forwards and then all
backwards in reverse: slices that are live together use memory that is not warm any more, as in training. Groups come
round after round, so that a machine that drifts meets all of them alike, and the median over the rounds is what counts:
of the runs in which no other program had the processor. A few short commands of somebody else would otherwise stand in
the costs of a slice or two, and the plan would avoid these slices.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from terapipe_ds.costs.profile import CostSample

Point = tuple[int, int]
"""(tokens, prefix)."""

MIN_ROUNDS, MAX_ROUNDS = 3, 8
WEIGHT_ROUNDS = 3  # W alone: a product of matrices, which varies little
LIMIT_STEPS = 10  # the rounds take at most so many unsliced steps, as far as the least number of rounds allows
WIDE_SPREAD = 0.15  # an interquartile range over the median beyond which the numbers deserve a warning
_DISTURBED = 0.02  # a run that was without a processor for so much more of its time than the least disturbed one
_SMALL_TOKENS = 128  # slices of fewer tokens run several times a round: they are cheap, and timers are coarse
_PREFIX_SIZES = 4  # how many slice lengths are measured with a prefix as well


class Peers(Protocol):
    """The other ranks that measure at the same time."""

    def barrier(self) -> None:
        """Wait for all of them."""

    def largest(self, value: float) -> float:
        """The largest of the values that the ranks have."""


class Alone:
    """No other rank."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def largest(self, value: float) -> float:
        """It is the only one."""
        return value


def grid(sequence_length: int, granularity_tokens: int) -> tuple[Point, ...]:
    """The points to measure: slices without a prefix from one granule, doubling, to the whole sequence, and some of
    these lengths with prefixes up to all that fits. Few: the cost model fills in the rest."""
    smallest = min(granularity_tokens, sequence_length)
    lengths = [smallest]
    while 2 * lengths[-1] < sequence_length:
        lengths.append(2 * lengths[-1])
    bases = [(tokens, 0) for tokens in (*lengths, sequence_length) if tokens == sequence_length or tokens in lengths]
    candidates = [tokens for tokens in lengths if 2 * tokens <= sequence_length]
    stride = max(1, -(-len(candidates) // _PREFIX_SIZES))
    contexts = []
    for tokens in candidates[::-stride]:
        contexts.append((tokens, sequence_length - tokens))
        if (sequence_length - tokens) // 2 >= tokens:
            contexts.append((tokens, (sequence_length - tokens) // 2))
    if not contexts and smallest < sequence_length:  # two slices, of which the second is less than a granule
        contexts.append((sequence_length - smallest, smallest))
    return tuple(dict.fromkeys(bases + contexts))


def groups_of(points: Sequence[Point], sequence_length: int) -> tuple[tuple[Point, ...], ...]:
    """The points in groups that are live together, each of about a whole sequence; short slices stand in one
    several times."""
    groups: list[list[Point]] = []
    room = 0
    for point in sorted(points, reverse=True):
        repeats = max(1, min(_SMALL_TOKENS, sequence_length) // point[0])
        needed = repeats * point[0]
        if needed > room:
            groups.append([])
            room = sequence_length
        groups[-1] += [point] * repeats
        room -= needed
    return tuple(map(tuple, groups))


class Runs(Protocol):
    """What is measured: ``probe.StageProbe``."""

    def forward(self, tokens: int, prefix: int) -> tuple[float, Any]:
        """Seconds of F, and what B needs."""

    def backward(self, live: Any) -> float:
        """Seconds of B."""


class RunsWeights(Protocol):
    """What W is measured on: ``probe.StageProbe``."""

    def weight(self, tokens: int) -> float:
        """Seconds of W of a slice whose F and B run before it."""


class Taken(NamedTuple):
    """One run: its seconds, and in how many of them this process had no processor, because of another program or
    because a peer was waited for inside the layers."""

    seconds: float
    lost_s: float = 0.0


@dataclass
class Measurement:
    """What the runs of one rank took, by point.

    Args:
        processor_s: the processor time of this process so far; None where that says nothing of the work (a device
            computes beside the host).
    """

    processor_s: Callable[[], float] | None = None
    forwards: dict[Point, list[Taken]] = field(default_factory=dict)
    backwards: dict[Point, list[Taken]] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0

    def run(self, probe: Runs, group: Sequence[Point], peers: Peers) -> None:
        """The forwards of a group, and its backwards in reverse."""
        live = []
        for point in group:
            peers.barrier()
            begin_s = self._processor_s()
            seconds, kept = probe.forward(*point)
            self._note(self.forwards, point, seconds, begin_s)
            live.append((point, kept))
        while live:
            point, kept = live.pop()
            peers.barrier()
            begin_s = self._processor_s()
            self._note(self.backwards, point, probe.backward(kept), begin_s)

    def _processor_s(self) -> float:
        return 0.0 if self.processor_s is None else self.processor_s()

    def _note(self, runs: dict[Point, list[Taken]], point: Point, seconds: float, begin_s: float) -> None:
        lost_s = 0.0 if self.processor_s is None else max(0.0, seconds - (self.processor_s() - begin_s))
        runs.setdefault(point, []).append(Taken(seconds, lost_s))

    def samples(self) -> tuple[CostSample, ...]:
        """Medians of the runs that nobody disturbed, and spreads of all."""
        return tuple(
            CostSample(
                *point, statistics.median(undisturbed(forward)), statistics.median(undisturbed(self.backwards[point])),
                forward_spread=_spread_of(forward), backward_spread=_spread_of(self.backwards[point]),
                repeats=len(forward),
            )
            for point, forward in self.forwards.items()
        )  # fmt: skip


def weights(
    probe: RunsWeights, lengths: Sequence[int], peers: Peers | None = None
) -> dict[int, float]:
    """Tokens -> seconds of W, which no prefix changes. Largest slices first, as in :func:`measure`; a collective."""
    peers = peers or Alone()
    found: dict[int, list[float]] = {tokens: [] for tokens in sorted(lengths, reverse=True)}
    for _ in range(1 + WEIGHT_ROUNDS):  # once to warm up
        for tokens, seconds in found.items():
            peers.barrier()
            seconds.append(probe.weight(tokens))
    return {tokens: statistics.median(seconds[1:]) for tokens, seconds in found.items()}


def with_weights(samples: Sequence[CostSample], weight_s: dict[int, float]) -> tuple[CostSample, ...]:
    """The samples, each with what W takes of its backward."""
    return tuple(
        dataclasses.replace(sample, weight_s=min(weight_s[sample.tokens], sample.backward_s)) for sample in samples
    )


def undisturbed(runs: Sequence[Taken]) -> list[float]:
    """The seconds of the runs that lost no more than the one that lost least, but for ``_DISTURBED`` of their time.

    Relative to the least, since peers that meet inside the layers wait for one another in every run.
    """
    least_s = min(run.lost_s for run in runs)
    return [run.seconds for run in runs if run.lost_s <= least_s + _DISTURBED * run.seconds]


def _spread_of(runs: Sequence[Taken]) -> float:
    return spread([run.seconds for run in runs])


def spread(values: Sequence[float]) -> float:
    """The interquartile range over the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / statistics.median(values)


def measure(
    probe: Runs,
    points: Sequence[Point],
    sequence_length: int,
    *,
    num_stages: int = 1,
    num_micro_batches: int = 1,
    peers: Peers | None = None,
    processor_s: Callable[[], float] | None = None,
    progress: Callable[[float], Any] = lambda share: None,
) -> Measurement:
    """Run all ``points`` round after round; a collective over ``peers``.

    Args:
        probe: this rank's stage.
        num_stages, num_micro_batches: of a training step; its unsliced time is what measuring is limited by.
        processor_s: see :class:`Measurement`.
        progress: told the share that is done, between 0 and 1.
    """
    peers, begin_s = peers or Alone(), time.perf_counter()
    groups = groups_of(points, sequence_length)
    warm = Measurement()
    for _ in range(2):  # once to warm up, and once to know what a step takes
        warm.run(probe, [(sequence_length, 0)], peers)
    whole = sequence_length, 0
    whole_s = peers.largest(warm.forwards[whole][-1].seconds + warm.backwards[whole][-1].seconds)
    limit_s = LIMIT_STEPS * (num_micro_batches + num_stages - 1) * whole_s
    result, planned = Measurement(processor_s), MAX_ROUNDS
    while result.rounds < planned:
        round_s = time.perf_counter()
        for index, group in enumerate(groups):
            result.run(probe, group, peers)
            progress((result.rounds + (index + 1) / len(groups)) / planned)
        result.rounds += 1
        now_s = time.perf_counter()
        next_s = peers.largest(now_s - begin_s) + peers.largest(now_s - round_s)
        if next_s > limit_s:
            planned = max(MIN_ROUNDS, result.rounds)
    progress(1.0)
    result.seconds = time.perf_counter() - begin_s
    return result


def noise_warning(samples: Sequence[CostSample]) -> str | None:
    """A sentence where the spread is too wide for a plan that could be trusted; None where it is not."""
    wide = [s for s in samples if max(s.forward_spread, s.backward_spread) > WIDE_SPREAD]
    if len(wide) * 2 <= len(samples):
        return None
    worst = max(wide, key=lambda s: max(s.forward_spread, s.backward_spread))
    share = max(worst.forward_spread, worst.backward_spread)
    return (
        f"{len(wide)} of {len(samples)} measured slices vary by more than {WIDE_SPREAD:.0%} (the worst, {worst.tokens} "
        f"tokens after {worst.prefix}, by {share:.0%}): the machine is busy with something else, and the plan may not "
        "be the best; measure again when it is quiet"
    )
