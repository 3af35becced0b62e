"""Cost objects and slow, obvious answers to compare the planner with."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay

Slices = list[tuple[int, int]]  # (tokens, prefix)


@dataclass
class TableCosts:
    """Times by (tokens, prefix) from a function; counts who asks for what."""

    forward: Callable[[int, int], float]
    backward: Callable[[int, int], float]
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def forward_s(self, tokens: int, prefix: int) -> float:
        self.asked.append(("forward", tokens, prefix))
        return self.forward(tokens, prefix)

    def backward_s(self, tokens: int, prefix: int) -> float:
        self.asked.append(("backward", tokens, prefix))
        return self.backward(tokens, prefix)


class LinkCosts(TableCosts):
    """The same with links; messages back may take other times."""

    send: Callable[[int], float]
    back: Callable[[int], float] | None = None

    def send_s(self, tokens: int) -> float:
        self.asked.append(("send", tokens, -1))
        return self.send(tokens)

    def send_gradient_s(self, tokens: int) -> float:
        self.asked.append(("back", tokens, -1))
        return (self.back or self.send)(tokens)


def messages_s(costs: TableCosts, slices: Slices) -> tuple[list[float], list[float]]:
    """Seconds of the messages of slices, onwards and back."""
    if not isinstance(costs, LinkCosts):
        return [0.0] * len(slices), [0.0] * len(slices)
    return [costs.send(x[0]) for x in slices], [(costs.back or costs.send)(x[0]) for x in slices]


KINDS = ("random", "zeros_and_ties", "proportional", "small_noise", "measured", "opposed", "floor")


def random_costs(rng: np.random.Generator, length: int, granularity: int, kind: str, links: bool = False) -> TableCosts:
    """Costs of every slice of a sequence, of a given kind; a plain dictionary behind."""
    forward, backward = {}, {}
    for prefix in range(0, length, granularity):
        for stop in [*range(prefix + granularity, length, granularity), length]:
            granules = (stop - prefix) / granularity
            smooth = (0.5 + granules + 0.1 * granules * (prefix + stop) / granularity) * 1e-3
            if kind == "random":
                pair = rng.random(), rng.random()
            elif kind == "zeros_and_ties":
                pair = float(rng.integers(0, 3)), float(rng.integers(0, 3))
            elif kind == "proportional":
                pair = smooth, 2 * smooth
            elif kind == "small_noise":
                pair = smooth, 2 * smooth * (1 + 1e-3 * rng.standard_normal())
            elif kind == "measured":
                pair = smooth * rng.lognormal(0, 0.05), 2 * smooth * rng.lognormal(0, 0.05)
            elif kind == "opposed":  # forward is worst at the end of the sequence, backward at its begin
                pair = (1 + granules) * (1 + prefix / granularity), (1 + granules) * (1 + (length - stop) / granularity)
            else:
                pair = max(3.0, granules) * rng.uniform(1, 1.1), max(4.0, granules) * rng.uniform(1, 1.1)
            forward[stop - prefix, prefix], backward[stop - prefix, prefix] = pair
    costs = (LinkCosts if links else TableCosts)(
        lambda tokens, prefix: forward[tokens, prefix], lambda tokens, prefix: backward[tokens, prefix]
    )
    if isinstance(costs, LinkCosts):
        slope = float(rng.uniform(0, 2)) * max(forward.values()) / length
        costs.send = lambda tokens: slope * tokens + 1e-4
        costs.back = lambda tokens: (0.4, 1.0, 1.7)[granularity % 3] * slope * tokens
    return costs


def compositions(length: int, granularity: int, max_slices: int | None = None) -> Iterator[Slices]:
    """Every way to cut the sequence at multiples of the granularity."""
    places = range(granularity, length, granularity)
    for count in range(min(len(places) + 1, max_slices or len(places) + 1)):
        for cuts in itertools.combinations(places, count):
            edges = [0, *cuts, length]
            yield [(stop - start, start) for start, stop in itertools.pairwise(edges)]


def fill_drain_time(costs: TableCosts, slices: Slices, num_stages: int, num_micro_batches: int) -> float:
    """The formula of equal stages, word by word."""
    forward = [costs.forward(*x) for x in slices]
    backward = [costs.backward(*x) for x in slices]
    send, back = messages_s(costs, slices)
    slowest = max(f + s for f, s in zip(forward, send, strict=True))
    slowest += max(b + s for b, s in zip(backward, back, strict=True))
    return num_micro_batches * (sum(forward) + sum(backward)) + (num_stages - 1) * slowest


def unequal_time(stages: list[TableCosts], slices: Slices, num_micro_batches: int) -> float:
    """Forward and backward flow shops, one after the other, the links being machines between the stages."""
    total = 0.0
    for forward in (True, False):
        order = stages if forward else stages[::-1]
        jobs = (slices if forward else slices[::-1]) * num_micro_batches
        rows = []
        for i, costs in enumerate(order):
            rows.append([(costs.forward if forward else costs.backward)(*job) for job in jobs])
            if i < len(order) - 1:
                rows.append(messages_s(costs, jobs)[not forward])
        total += makespan_by_grid(rows)
    return total


def makespan_by_grid(rows: list[list[float]]) -> float:
    """The makespan of a flow shop, [machines][jobs]: the longest monotone path, by its recursion over the grid."""
    ends = [0.0] * len(rows[0])
    for row in rows:
        before = 0.0
        for i, seconds in enumerate(row):
            ends[i] = before = max(before, ends[i]) + seconds
    return ends[-1]


class Costs:
    """A launch floor, growth with tokens and prefix, and noise that is the same whenever a pair is asked."""

    def __init__(self, seed: int, scale: float = 1.0, send_s: float | None = None, noise: float = 0.1) -> None:
        """A third of the costs with links has another time for messages back."""
        draw = random.Random(seed)
        self.seed, self.scale, self.noise = seed, scale, noise
        self.floor, self.per_pair = draw.uniform(0.2, 3.0), draw.uniform(0.0, 0.3)
        self.backward = draw.uniform(1.0, 3.0)
        self.asked: Counter[tuple[str, int, int]] = Counter()
        if send_s is not None:
            self.send_s = lambda tokens: 0.1 + send_s * tokens
            if seed % 3 == 2:
                self.send_gradient_s = lambda tokens: 0.7 * tokens

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self._seconds("forward", tokens, prefix)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self.backward * self._seconds("backward", tokens, prefix)

    def _seconds(self, name: str, tokens: int, prefix: int) -> float:
        assert type(tokens) is int and type(prefix) is int
        self.asked[name, tokens, prefix] += 1
        draw = random.Random(f"{self.seed} {name} {tokens} {prefix}")
        busy = max(self.floor, tokens) + self.per_pair * tokens * (prefix + tokens / 2)
        return self.scale * busy * draw.uniform(1 - self.noise, 1 + self.noise)


def parts_of(seed: int, num_stages: int) -> list[Costs]:
    """Equal stages, unequal ones and a slow last one in turns; every other time with links."""
    send_s = 0.3 if seed % 2 else None
    if seed % 3 == 0:
        return [Costs(seed, send_s=send_s)] * num_stages
    kinds = [Costs(10 * seed + kind, 1 + 0.3 * kind, send_s) for kind in range(2)]
    if seed % 3 == 1:
        return [kinds[stage % 2] for stage in range(num_stages)]
    return [*[kinds[0]] * (num_stages - 1), kinds[1]]


class SplitCosts(Costs):
    """W takes a third of the tokens' share of the backward."""

    def weight_s(self, tokens: int, prefix: int) -> float:
        self.asked["weight", tokens, prefix] += 1
        return 0.3 * self.backward * self.scale * tokens


def split_parts(seed: int, num_stages: int) -> list[Costs]:
    """Return what `parts_of` gives, with W; parts that are one object stay one."""
    made: dict[int, SplitCosts] = {}
    plain = parts_of(seed, num_stages)
    for part in plain:
        made.setdefault(id(part), SplitCosts(part.seed, part.scale, 0.3 if seed % 2 else None))
    return [made[id(part)] for part in plain]


def every_plan(length: int, granularity: int) -> list[SlicePlan]:
    return [SlicePlan([tokens for tokens, _ in slices]) for slices in compositions(length, granularity)]


CHUNKED = [
    ("interleaved", 2, 2, 4), ("seq1f1b-interleaved", 2, 2, 4), ("seq1f1b-interleaved", 2, 3, 6), ("zbv", 2, 2, 4),
    ("chimera", 2, 2, 2), ("chimera-seq", 4, 2, 4),
]  # fmt: skip
"""(schedule, stages, chunks, parts)."""


def brute_force_s(
    parts: list[Costs], schedule: str, num_stages: int, length: int, num_micro_batches: int, chunks: int = 1
) -> float:
    """Return the least simulated time over all plans."""
    replays = {
        count: Replay(build(schedule, num_stages, num_micro_batches, count, chunks_per_stage=chunks))
        for count in range(1, length + 1)
    }
    return min(replays[plan.num_slices].makespan(plan, parts) for plan in every_plan(length, 1))
