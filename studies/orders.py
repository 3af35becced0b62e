"""Show what orders found for the costs at hand gain: `python -m studies.orders` prints what docs/schedules.md has.

Costs are seconds of a stage for a whole micro-batch, what each slice costs on top, and what a message takes. Makespans
are over the work of one stage without slices. Everything is simulated; nothing is measured but the search itself.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from terapipe_ds import simulate
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.orders.find import NAMED, FoundOrder, find_order
from terapipe_ds.planner.orders.ramps import find_order_and_slices
from terapipe_ds.schedule import Kind, Schedule, ScheduleError, build, validate

LENGTH = 1024
Chain = list[tuple[Kind, int, int]]


@dataclass(frozen=True)
class Costs:
    """Hold the costs of one stage. `slope`: how much longer the last tokens of a sequence take than the first ones."""

    forward: float = 0.1
    backward: float = 0.2
    weight: float = 0.1
    base: float = 0.004
    send: float = 0.0015
    slope: float = 0.0

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.forward * self._share(tokens, prefix) + self.base / 3

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self.backward * self._share(tokens, prefix) + 2 * self.base / 3

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.weight * tokens / LENGTH + self.base / 3

    def send_s(self, tokens: int) -> float:
        return self.send

    def _share(self, tokens: int, prefix: int) -> float:
        return tokens / LENGTH * (1 + self.slope * prefix / LENGTH)

    def half(self) -> Costs:
        """Return a part that is half of the stage; a slice costs as much on top."""
        return replace(self, forward=self.forward / 2, backward=self.backward / 2, weight=self.weight / 2)


EQUAL = Costs()
SHORT_W = Costs(weight=0.07, slope=0.3)
MODELS = {"F 100, B 200 (W 100) ms": EQUAL, "W 70 ms, later tokens cost up to 30 % more": SHORT_W}


COUNTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Row:
    """Hold a schedule: its makespan and bound over the work, the most live sequences of a stage, seconds of search."""

    name: str
    slices: str
    ratio: float
    bound: float | None
    live: float
    found_in_s: float | None = None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"{self.bound:.4f}"
        seconds = "" if self.found_in_s is None else f"{self.found_in_s:.1f}"
        return f"| {self.name} | {self.slices} | {self.ratio:.4f} | {bound} | {self.live:.3g} | {seconds} |"


def work_s(costs: Costs, num_micro_batches: int) -> float:
    """Return the seconds that a stage takes for unsliced micro-batches."""
    return num_micro_batches * (costs.forward_s(LENGTH, 0) + costs.backward_s(LENGTH, 0))


class Table:
    """Hold the rows of one case, all with a multiple of the live slices of `seq1f1b-zb` at `slices` slices."""

    def __init__(self, costs: Costs, stages: int, micro_batches: int, slices: int, budget: float) -> None:
        self.costs, self.counts, self.slices, self.budget = costs, (stages, micro_batches), slices, budget
        self.unit, self.plan = work_s(costs, micro_batches), SlicePlan.equal(LENGTH, slices)
        self.limit = max(build("seq1f1b-zb", *self.counts, slices).peak_live_slices())

    def named(self, name: str, slices: int) -> Row:
        """Return a named schedule with equal slices."""
        schedule, plan = build(name, *self.counts, slices), SlicePlan.equal(LENGTH, slices)
        own = self.costs.half() if schedule.chunks_per_stage > 1 else self.costs
        ratio = simulate(schedule, plan, own).makespan_s / self.unit
        return Row(name, str(slices), ratio, None, live_sequences(schedule, [plan] * self.counts[1]))

    def found(self, name: str, find: Callable[[], FoundOrder]) -> Row:
        """Return the order that `find` returns, with the seconds of the search."""
        begin_s = time.perf_counter()
        found = find()
        seconds, live = time.perf_counter() - begin_s, live_sequences(found.schedule, found.plans)
        numbers = [plan.num_slices for plan in found.plans]
        runs = [(count, len(list(group))) for count, group in itertools.groupby(numbers)]
        slices = " ".join(str(count) if times == 1 else f"{times}x{count}" for count, times in runs)
        slices = str(numbers[0]) if len(runs) == 1 else slices
        return Row(name, slices, found.makespan_s / self.unit, found.lower_bound_s / self.unit, live, seconds)

    def rows(self) -> list[Row]:
        """Return the named schedules, with `slices` and with their best number of slices, and the searched orders."""
        names = ("seq1f1b-zb", "seq1f1b", "zbv")
        table = [self.named(name, self.slices) for name in names]
        for name in names:
            best = min((self.named(name, count) for count in COUNTS), key=lambda row: row.ratio)
            table.append(replace(best, name=f"{name}, best of 1 to 8 slices"))
        options: dict[str, Any] = {"budget": self.budget}
        for times in (1, 3):
            counts = *self.counts, times * self.limit
            find = functools.partial(find_order, self.costs, self.plan, *counts, **options)
            table.append(self.found(f"search, {times} x", find))
        sequences = 3 * self.limit / self.slices
        ramps: dict[str, Any] = {"most_slices": 2 * self.slices, "max_live_sequences": sequences, **options}
        starts = sorted({self.slices, max(1, self.slices // 2)}, reverse=True)
        ramp = functools.partial(find_order_and_slices, self.costs, cut, starts, *self.counts, **ramps)
        table.append(self.found("search, 3 x, slices of each micro-batch", ramp))
        options |= {"chunks_per_stage": 2, "max_live_sequences": sequences}
        in_a_v = functools.partial(find_order, self.costs.half(), self.plan, *self.counts, **options)
        table.append(self.found("search in a V, 3 x", in_a_v))
        return table


def cut(num_slices: int) -> SlicePlan:
    """Return equal slices."""
    return SlicePlan.equal(LENGTH, num_slices)


def live_sequences(schedule: Schedule, plans: Sequence[SlicePlan]) -> float:
    """Return the most tokens of a stage between F and the last of B and W, in whole sequences of a whole stage."""
    most, share = 0.0, schedule.num_stages / schedule.num_parts
    for order in schedule.orders:
        last = {(action.part_id, action.unit): index for index, action in enumerate(order)}
        now = 0.0
        for index, action in enumerate(order):
            amount = plans[action.micro_batch_id].lengths[action.slice_id] / LENGTH * share
            now += amount if action.kind is Kind.FORWARD else 0.0
            most = max(most, now)
            now -= amount if last[action.part_id, action.unit] == index else 0.0
    return most


def gain(table: Sequence[Row], name: str) -> tuple[float, float]:
    """Return how much less time the order in row `name` takes than `seq1f1b-zb`, and how much less its bound allows."""
    named = next(row for row in table if row.name == "seq1f1b-zb")
    found = next(row for row in table if row.name == name)
    assert found.bound is not None
    return 1 - found.ratio / named.ratio, 1 - found.bound / named.ratio


# -- random cost models --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Hold unequal parts, uneven slices, a link, and a limit of live slices."""

    costs: list[Costs]
    plan: SlicePlan
    micro_batches: int
    limit: int


def random_model(seed: int) -> Model:
    """Return a model of 2 to 16 stages and 1 to 4 K micro-batches."""
    chance = random.Random(seed)
    stages = chance.randint(2, 16)
    count = chance.randint(1, 4)
    edges = sorted(chance.sample(range(1, 16), count - 1))
    plan = SlicePlan(tuple(64 * (b - a) for a, b in zip([0, *edges], [*edges, 16], strict=True)))
    split = chance.uniform(0.2, 0.5)
    costs = []
    for _ in range(stages):
        size = chance.uniform(0.08, 0.13)
        costs.append(Costs(size, 2 * size, 2 * size * split, 0.004, chance.choice((0.0, 0.002, 0.02)), 1.0))
    return Model(costs, plan, chance.randint(1, 4 * stages), stages + count - 1 + seed % 7)


def compared(model: Model, **budget: float) -> tuple[float, float]:
    """Return the simulated makespans of the best named schedule within the limit, and of the order from the search."""
    counts = len(model.costs), model.micro_batches
    named = [build(name, *counts, model.plan.num_slices) for name in NAMED]
    possible = [one for one in named if max(one.peak_live_slices()) <= model.limit]
    best_s = min(simulate(one, model.plan, model.costs).makespan_s for one in possible)
    found = find_order(model.costs, model.plan, *counts, model.limit, **budget)  # type: ignore[arg-type]
    assert max(found.schedule.peak_live_slices()) <= model.limit
    return best_s, simulate(found.schedule, model.plan, model.costs).makespan_s


# -- brute force ---------------------------------------------------------------------------------------------------


def merged(chains: list[Chain], with_weights: bool = True) -> Iterator[Chain]:
    """Yield every order of a stage: F and B of a micro-batch as its chain says, W anywhere after its B."""

    def extend(at: tuple[int, ...], weights: frozenset[tuple[int, int]], left: int) -> Iterator[Chain]:
        if not left:
            yield []
        for i, chain in enumerate(chains):
            if at[i] < len(chain):
                kind, m, s = chain[at[i]]
                more = weights | {(m, s)} if kind is Kind.BACKWARD and with_weights else weights
                for rest in extend((*at[:i], at[i] + 1, *at[i + 1 :]), more, left - 1):
                    yield [chain[at[i]], *rest]
        for m, s in sorted(weights):
            for rest in extend(at, weights - {(m, s)}, left - 1):
                yield [(Kind.WEIGHT, m, s), *rest]

    total = sum(len(chain) + with_weights * (len(chain) // 2) for chain in chains)
    return extend((0,) * len(chains), frozenset(), total)


def brute_force_s(costs: Sequence[Costs], plan: SlicePlan, micro_batches: int, limit: int) -> float:
    """Return the least simulated makespan of all valid orders of two stages."""
    slices = range(plan.num_slices)
    chains = [
        [(Kind.FORWARD, m, s) for s in slices] + [(Kind.BACKWARD, m, s) for s in reversed(slices)]
        for m in range(micro_batches)
    ]
    model = build("seq1f1b-zb", 2, micro_batches, plan.num_slices)
    actions = [{(a.kind, a.micro_batch_id, a.slice_id): a for a in order} for order in model.orders]
    every = list(merged(chains))
    best = float("inf")
    for first, second in product(every, every):
        orders = tuple(tuple(actions[k][key] for key in order) for k, order in enumerate((first, second)))
        schedule: Schedule = replace(model, orders=orders)
        try:
            validate(schedule)
        except ScheduleError:
            continue
        if max(schedule.peak_live_slices()) <= limit:
            best = min(best, simulate(schedule, plan, list(costs)).makespan_s)
    return best


# -- what is printed -----------------------------------------------------------------------------------------------


def print_table(title: str, costs: Costs, stages: int, micro_batches: int, slices: int, budget: float) -> None:
    table = Table(costs, stages, micro_batches, slices, budget).rows()
    print(f"\n{title}: {stages} stages, {micro_batches} micro-batches, {slices} slices\n")
    print("| schedule | slices | makespan / work | bound / work | live sequences | found in s |")
    print("|---|---|---|---|---|---|")
    print("\n".join(map(str, table)))
    for name in (row.name for row in table if row.found_in_s is not None):
        gained, most = gain(table, name)
        print(f"{name}: {gained:.2%} less than seq1f1b-zb with {slices} slices; the bound allows {most:.2%}")


def print_random(count: int, budget: float) -> None:
    pairs = [compared(random_model(seed), budget=budget) for seed in range(count)]
    slower = sum(found_s > named_s * (1 + 1e-12) for named_s, found_s in pairs)
    gains = sorted(1 - found_s / named_s for named_s, found_s in pairs)
    text = f"{slower} slower than the best named schedule within the same limit"
    print(f"\n{count} random cost models: {text}; gain {gains[len(gains) // 2]:.2%} (median), {gains[-1]:.2%} (most)")


def print_brute_force() -> None:
    cases = ((1024,), 2, 3), ((700, 324), 1, 3), ((512, 384, 128), 1, 3), ((384, 256, 256, 128), 1, 1)
    for lengths, micro_batches, seeds in cases:
        for seed in range(seeds):
            costs, plan = random_model(seed).costs[:2], SlicePlan(lengths)
            limit = plan.num_slices + 1
            best_s = brute_force_s(costs, plan, micro_batches, limit)
            found_s = find_order(costs, plan, 2, micro_batches, limit).makespan_s
            case = f"2 stages, {micro_batches} micro-batches of {plan.num_slices} slices, costs {seed}"
            print(f"brute force, {case}: {best_s:.6f} s, found {found_s:.6f} s ({found_s / best_s - 1:+.2e})")


def main() -> None:
    """Print all figures; some four minutes on one core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1.0, help="of each search: 1 is some five seconds")
    parser.add_argument("--random", type=int, default=40, help="random cost models")
    arguments = parser.parse_args()
    print_table("F 100, B 200 (W 100) ms", EQUAL, 2, 4, 2, arguments.budget)
    for title, costs in MODELS.items():
        for micro_batches in (8, 16):
            print_table(title, costs, 8, micro_batches, 8, arguments.budget)
    print_random(arguments.random, 0.2 * arguments.budget)
    print_brute_force()


if __name__ == "__main__":
    main()
