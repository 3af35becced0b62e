"""Plans for stages that differ (embedding, head, uneven layers): exact scores, proven bounds, local improvement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.branch import Objective, Search
from terapipe_ds.planner.equal_stages import SliceSolution, band_of, search_plans
from terapipe_ds.planner.flow_shop import fill_drain_s
from terapipe_ds.planner.programs import Band, Floats, least_tails
from terapipe_ds.planner.tabulate import CostTable, check_count, check_seconds, tabulate

MAX_TABLE_ELEMENTS = 1 << 24  # over all different stages; above, only the slowest one is tabulated
NUM_SCORED = 32  # plans of each search that are scored exactly
NUM_MOVES = 600  # changes of the best plan that are tried
SAMPLE_SLICES = 8
MIX_GRANULES = 512  # up to here, more bounds are tried
EQUAL = 1e-9  # relative: predicted and bound are summed in different orders


def solve_unequal(
    costs: Sequence[Any],
    sequence_length: int,
    num_micro_batches: int = 1,
    granularity_tokens: int = 64,
    max_slices: int | None = None,
    max_work: float | None = None,
) -> SliceSolution:
    """A good plan for stages with ``costs[k]`` each, its exact fill-drain time, and a bound that no plan can beat.

    Candidates are the plans that the search for the lower bound meets (see `_Bound`): its objective is that of equal
    stages with an effective stage count, sums over stages in place of K times the slowest one. They are scored by
    `fill_drain_s`, and the best one is improved by moving, adding and removing single cuts. ``optimal`` is True only
    where the time meets the bound. The same object for several stages is asked once; a transfer takes the sender's
    ``send_s``.

    With so many different stages and granules that their tables would not fit (2**24 elements), only the slowest is
    tabulated, the others are asked for single plans, and the bound is weaker.
    """
    num_micro_batches = check_count("num_micro_batches", num_micro_batches)
    if max_slices is not None:
        max_slices = check_count("max_slices", max_slices)
    stages = _Stages(costs, sequence_length, granularity_tokens)
    searches = [
        search_plans(bound.band, bound.objective, max_slices, max_work) for bound in stages.bounds(num_micro_batches)
    ]
    score = functools.cache(lambda lengths: fill_drain_s(*stages.times(lengths), num_micro_batches))
    best = min(_promising(searches, max_slices), key=lambda lengths: (score(lengths), len(lengths), lengths))
    best = _improve(best, score, max_slices)
    predicted_s = score(best)
    lower_bound_s = min(predicted_s, max((x.lower_bound_s for x in searches if x.num_programs), default=0.0))
    forward, backward, send = (None if x is None else x[stages.slowest] for x in stages.times(best))
    assert forward is not None and backward is not None
    hop = 0.0 if send is None else send
    return SliceSolution(
        plan=stages.plan(best),
        predicted_s=predicted_s,
        optimal=predicted_s <= lower_bound_s * (1 + EQUAL),
        lower_bound_s=lower_bound_s,
        sum_s=float((forward + backward).sum()),
        max_forward_s=float((forward + hop).max()),
        max_backward_s=float((backward + hop).max()),
        num_programs=sum(search.num_programs for search in searches),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound:
    """A problem of the form that `Search` solves, whose least value no plan can beat. Why:

    The makespan of a flow shop is the longest monotone path through the grid of machines and jobs, so that any one path
    is a lower bound. Take stages a <= k <= z and a slice i. The first slice goes from stage 0 to a. Slices before i of
    the first micro-batch run on a; slice i goes from a to k; m - 1 whole micro-batches run on k; slice i of the last
    micro-batch goes from k to z; the slices after i run on z; the last slice goes on to stage K - 1. That path takes

        pre(first slice) + sum_{j<i} f_a(j) + g(i) + (m - 1) * sum_j f_k(j) + sum_{j>i} f_z(j) + post(last slice)
        >=  pre + post + sum_j [(m - 1) * f_k(j) + h(j)] + [g(i) - h(i)],    h = min(f_a, f_z)

    with g(i) = sum of f(i) over the stages a..z and of the links between them. The backward path is its mirror image.
    Both hold for every i, so the last term may be its maximum over the slices, forward and backward each: a sum over
    slices plus two maxima. With equal stages, a = 0 and z = K - 1 this is the exact time.
    """

    band: Band
    objective: Objective


class _Stages:
    """The costs of K stages, equal objects once: whole tables where they fit, else single slices when needed."""

    def __init__(self, costs: Sequence[Any], sequence_length: int, granularity_tokens: int) -> None:
        different = {id(part): part for part in costs}
        parts = list(different.values())
        self.part_of = [list(different).index(id(part)) for part in costs]
        self.sequence_length = check_count("sequence_length", sequence_length)
        self.granularity = check_count("granularity_tokens", granularity_tokens)
        granules = -(-self.sequence_length // self.granularity)
        self.tables: dict[int, CostTable] = {}
        self.asked = [_Asked(part) for part in parts]
        if len(parts) * granules**2 <= MAX_TABLE_ELEMENTS:
            self.tables = {p: tabulate(part, sequence_length, granularity_tokens) for p, part in enumerate(parts)}
            sums = [least_tails(band_of(self.tables[p]))[0, 0, 0] for p in range(len(parts))]
        else:
            sample = SlicePlan.equal(self.sequence_length, min(SAMPLE_SLICES, granules), self.granularity)
            sums = [sum(sum(asked(tokens, start)) for tokens, start in _pairs(sample)) for asked in self.asked]
        heaviest = int(np.argmax(sums))
        self.slowest = self.part_of.index(heaviest)
        if not self.tables:
            self.tables[heaviest] = tabulate(self.asked[heaviest].known_first(), sequence_length, granularity_tokens)
        self.with_links = any(asked.send is not None for asked in self.asked)

    @property
    def complete(self) -> bool:
        return len(self.tables) == len(self.asked)

    def plan(self, lengths: Sequence[int]) -> SlicePlan:
        return next(iter(self.tables.values())).plan(lengths)

    def times(self, lengths: tuple[int, ...]) -> tuple[Floats, Floats, Floats | None]:
        """Forward, backward and send seconds of a plan in granules, [K, s] each; no send without links."""
        rows = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.intp)))
        columns = np.asarray(lengths) - 1
        pairs = _pairs(self.plan(lengths))
        forward, backward, send = [], [], []
        for part, asked in enumerate(self.asked):
            table = self.tables.get(part)
            if table is not None:
                forward.append(table.forward_s[rows, columns])
                backward.append(table.backward_s[rows, columns])
                send.append(np.zeros(len(lengths)) if table.send_s is None else table.send_s[rows, columns])
            else:
                both = np.array([asked(tokens, start) for tokens, start in pairs])
                forward.append(both[:, 0])
                backward.append(both[:, 1])
                send.append(np.array([asked.send_s(tokens) for tokens, _ in pairs]))
        stages = self.part_of
        sends = np.array(send)[stages] if self.with_links else None
        return np.array(forward)[stages], np.array(backward)[stages], sends

    def bounds(self, num_micro_batches: int) -> Iterator[_Bound]:
        """Lower-bound problems, the one with all stages first; just one where not all stages are tabulated."""
        if not self.complete:
            count = self.part_of.count(self.part_of[self.slowest])
            table = self.tables[self.part_of[self.slowest]]
            yield _Bound(band_of(table), Objective(num_micro_batches, count - 1))
            return
        for a, z in self._spans():
            yield self._bound(a, min(max(a, self.slowest), z), z, num_micro_batches)

    def _spans(self) -> list[tuple[int, int]]:
        """Stages (a, z) for `_Bound`: all stages, those of the slowest and of the most common kind, and mixtures."""
        parts = self.part_of
        stop = len(parts) - 1
        kinds = [parts[self.slowest], max(parts, key=parts.count)]
        (first, last), (common, last_common) = ((parts.index(p), stop - parts[::-1].index(p)) for p in kinds)
        spans = [(0, stop), (first, last), (first, first), (common, last_common)]
        if next(iter(self.tables.values())).num_granules <= MIX_GRANULES:
            spans += [(0, last), (0, last_common), (first, stop), (common, stop), (common, last), (first, last_common)]
        return [(a, z) for a, z in dict.fromkeys(spans) if a <= z]

    def _bound(self, a: int, k: int, z: int, num_micro_batches: int) -> _Bound:
        tables = [self.tables[part] for part in self.part_of]
        n = tables[0].num_granules
        last = np.arange(n), np.arange(n - 1, -1, -1)  # the slices that end with the sequence
        total = np.zeros((n, n))
        spare = []
        for forward, sends in ((True, range(a, z)), (False, range(a + 1, z + 1))):
            times = [table.forward_s if forward else table.backward_s for table in tables]
            least = np.minimum(times[a], times[z])
            through = _sum_tables([*times[a : z + 1], *(tables[s].send_s for s in sends)], n)
            spare.append(np.maximum(0.0, through - np.where(np.isfinite(least), least, 0.0)))
            total += least if num_micro_batches == 1 else least + (num_micro_batches - 1) * times[k]
            before = [*times[:a], *(tables[s].send_s for s in (range(a) if forward else range(1, a + 1)))]
            after = [*times[z + 1 :], *(tables[s].send_s for s in _sends_after(z, len(tables), forward))]
            total[0] += sum(x[0] for x in before if x is not None)
            total[last] += sum(x[last] for x in after if x is not None)
        return _Bound(Band(total, spare[0], spare[1]), Objective(1, 1.0))


def _sends_after(z: int, num_stages: int, forward: bool) -> range:
    return range(z, num_stages - 1) if forward else range(z + 1, num_stages)


def _sum_tables(tables: Iterable[Floats | None], n: int) -> Floats:
    """The sum of tables of which many are the same object."""
    counted: dict[int, tuple[Floats, int]] = {}
    for table in tables:
        if table is not None:
            counted[id(table)] = table, counted.get(id(table), (table, 0))[1] + 1
    total = np.zeros((n, n))
    for table, count in counted.values():
        total += table if count == 1 else count * table
    return total


class _Asked:
    """A costs object that is asked for each slice at most once."""

    def __init__(self, costs: Any) -> None:
        self.costs = costs
        self.send: Callable[[int], float] | None = getattr(costs, "send_s", None)
        self.seconds: dict[tuple[int, int], tuple[float, float]] = {}
        self.sends: dict[int, float] = {}

    def __call__(self, tokens: int, prefix: int) -> tuple[float, float]:
        pair = tokens, prefix
        if pair not in self.seconds:
            forward_s, backward_s = float(self.costs.forward_s(*pair)), float(self.costs.backward_s(*pair))
            check_seconds("forward_s", tokens, prefix, forward_s)
            self.seconds[pair] = forward_s, check_seconds("backward_s", tokens, prefix, backward_s)
        return self.seconds[pair]

    def send_s(self, tokens: int) -> float:
        if self.send is None:
            return 0.0
        if tokens not in self.sends:
            self.sends[tokens] = check_seconds("send_s", tokens, None, float(self.send(tokens)))
        return self.sends[tokens]

    def known_first(self) -> Any:
        """The costs object itself, or one in front of it that answers what was asked already."""
        return self.costs if getattr(self.costs, "vectorized", False) else _Known(self)


class _Known:
    def __init__(self, asked: _Asked) -> None:
        self.asked = asked
        if asked.send is not None:
            self.send_s = asked.send_s

    def forward_s(self, tokens: int, prefix: int) -> float:
        known = self.asked.seconds.get((tokens, prefix))
        return float(self.asked.costs.forward_s(tokens, prefix)) if known is None else known[0]

    def backward_s(self, tokens: int, prefix: int) -> float:
        known = self.asked.seconds.get((tokens, prefix))
        return float(self.asked.costs.backward_s(tokens, prefix)) if known is None else known[1]


def _pairs(plan: SlicePlan) -> list[tuple[int, int]]:
    return list(zip(plan.lengths, plan.starts, strict=True))


def _promising(searches: Sequence[Search], max_slices: int | None) -> list[tuple[int, ...]]:
    """The plans that the searches rate best."""
    plans: dict[tuple[int, ...], None] = {}
    for search in searches:
        found = [x for x in search.found.values() if max_slices is None or x.num_slices <= max_slices]
        plans.update((x.lengths, None) for x in sorted(found, key=search.objective)[:NUM_SCORED])
    return list(plans)


def _improve(
    best: tuple[int, ...], score: Callable[[tuple[int, ...]], float], max_slices: int | None
) -> tuple[int, ...]:
    """Walk to a plan that no single change makes better, as far as `NUM_MOVES` tries reach."""
    tries = 0
    improved = True
    while improved:
        improved = False
        for plan in _neighbours(best):
            if max_slices is not None and len(plan) > max_slices:
                continue
            tries += 1
            if tries > NUM_MOVES:
                return best
            if score(plan) < score(best) * (1 - EQUAL):
                best, improved = plan, True
                break
    return best


def _neighbours(plan: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One cut moved (by much, then by little), removed or added; and single granules from any slice to any other."""
    step = max(plan) // 2
    while step >= 1:
        for i, sign in itertools.product(range(len(plan) - 1), (step, -step)):
            if plan[i] + sign >= 1 and plan[i + 1] - sign >= 1:
                yield (*plan[:i], plan[i] + sign, plan[i + 1] - sign, *plan[i + 2 :])
        step //= 2
    for i in range(len(plan) - 1):
        yield (*plan[:i], plan[i] + plan[i + 1], *plan[i + 2 :])
    for i, length in enumerate(plan):
        if length > 1:
            yield (*plan[:i], length // 2, length - length // 2, *plan[i + 1 :])
    for i, j in itertools.permutations(range(len(plan)), 2):
        if plan[i] > 1 and abs(i - j) > 1:
            yield tuple(length - (x == i) + (x == j) for x, length in enumerate(plan))
