"""Orders found are never slower than the named ones, keep the limit, and equal brute force on tiny cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from terapipe_ds import simulate
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.orders.find import NAMED, find_order, find_order_and_slices
from terapipe_ds.schedule import Kind, Schedule, ScheduleError, build, validate
from terapipe_ds.schedule.placement import v_shape

LENGTH = 1024


@dataclass(frozen=True)
class Costs:
    forward: float = 0.1
    backward: float = 0.2
    weight: float = 0.1
    base: float = 0.004
    send: float = 0.0015
    slope: float = 0.0

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.forward * tokens / LENGTH * (1 + self.slope * prefix / LENGTH) + self.base / 3

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self.backward * tokens / LENGTH * (1 + self.slope * prefix / LENGTH) + 2 * self.base / 3

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.weight * tokens / LENGTH + self.base / 3

    def send_s(self, tokens: int) -> float:
        return self.send


def random_case(seed: int) -> tuple[list[Costs], SlicePlan, int, int]:
    chance = random.Random(seed)
    stages = chance.randint(2, 16)
    micro_batches = chance.randint(1, min(4 * stages, 20) if seed % 8 else 4 * stages)
    count = chance.randint(1, 4)
    edges = sorted(chance.sample(range(1, 16), count - 1))
    lengths = tuple(64 * (b - a) for a, b in zip([0, *edges], [*edges, 16], strict=True))
    split = chance.uniform(0.2, 0.5)
    costs = []
    for _ in range(stages):
        size = chance.uniform(0.08, 0.13)
        costs.append(Costs(size, 2 * size, 2 * size * split, 0.004, chance.choice((0.0, 0.002, 0.02)), 1.0))
    return costs, SlicePlan(lengths), stages, micro_batches


@pytest.mark.parametrize("seed", range(40))
def test_never_slower_than_the_named_schedules_with_the_same_limit(seed: int) -> None:
    costs, plan, stages, micro_batches = random_case(seed)
    limit = stages + plan.num_slices - 1 + seed % 7
    result = find_order(costs, plan, stages, micro_batches, limit, evaluations=40)
    validate(result.schedule)
    assert max(result.schedule.peak_live_slices()) <= limit
    found_s = simulate(result.schedule, plan, costs).makespan_s
    assert found_s == pytest.approx(result.makespan_s, rel=1e-12)
    assert result.lower_bound_s <= found_s * (1 + 1e-12)
    named = [build(name, stages, micro_batches, plan.num_slices) for name in NAMED]
    named_s = [simulate(one, plan, costs).makespan_s for one in named if max(one.peak_live_slices()) <= limit]
    assert named_s
    assert found_s <= min(named_s) * (1 + 1e-12)


def merged(chains: list[list[tuple[Kind, int, int]]]) -> Iterator[list[tuple[Kind, int, int]]]:
    """Yield every order of a stage: F and B of a micro-batch as its chain says, W anywhere after its B."""

    def extend(at: tuple[int, ...], weights: frozenset[tuple[int, int]], left: int) -> Iterator[list]:
        if not left:
            yield []
        for i, chain in enumerate(chains):
            if at[i] < len(chain):
                kind, m, s = chain[at[i]]
                more = weights | {(m, s)} if kind is Kind.BACKWARD else weights
                for rest in extend((*at[:i], at[i] + 1, *at[i + 1 :]), more, left - 1):
                    yield [chain[at[i]], *rest]
        for m, s in sorted(weights):
            for rest in extend(at, weights - {(m, s)}, left - 1):
                yield [(Kind.WEIGHT, m, s), *rest]

    total = sum(len(chain) + len(chain) // 2 for chain in chains)
    return extend((0,) * len(chains), frozenset(), total)


def brute_force(costs: list[Costs], plan: SlicePlan, micro_batches: int, limit: int) -> float:
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
        schedule = replace(model, orders=orders)
        try:
            validate(schedule)
        except ScheduleError:
            continue
        if max(schedule.peak_live_slices()) <= limit:
            best = min(best, simulate(schedule, plan, costs).makespan_s)
    return best


@pytest.mark.parametrize(
    ("lengths", "micro_batches"), [((1024,), 2), ((700, 324), 1), ((512, 384, 128), 1)], ids=["1x2", "2x1", "3x1"]
)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_brute_force(lengths: tuple[int, ...], micro_batches: int, seed: int) -> None:
    costs, plan = random_case(seed)[0][:2], SlicePlan(lengths)
    limit = plan.num_slices + 1
    result = find_order(costs, plan, 2, micro_batches, limit)
    assert result.makespan_s == pytest.approx(brute_force(costs, plan, micro_batches, limit), rel=1e-12)


@pytest.mark.parametrize("micro_batches", [8, 16])
def test_faster_than_seq1f1b_zb_with_three_times_its_live_slices(micro_batches: int) -> None:
    plan = SlicePlan.equal(LENGTH, 4)
    named = build("seq1f1b-zb", 8, micro_batches, 4)
    named_s = simulate(named, plan, Costs()).makespan_s
    result = find_order(Costs(), plan, 8, micro_batches, 3 * max(named.peak_live_slices()))
    work_s = micro_batches * (0.3 + 4 * 0.004)
    assert result.lower_bound_s >= work_s
    assert result.makespan_s <= named_s * (0.98 if micro_batches == 8 else 0.99)


def test_two_runs_find_the_same_order() -> None:
    costs, plan, stages, micro_batches = random_case(5)
    one, other = (find_order(costs, plan, stages, micro_batches, 40, evaluations=60) for _ in range(2))
    assert one.schedule == other.schedule


def test_v_placement_keeps_its_limit() -> None:
    plan, costs = SlicePlan.equal(LENGTH, 2), Costs(0.05, 0.1, 0.05)
    result = find_order(costs, plan, 4, 6, 16, chunks_per_stage=2, evaluations=100)
    assert result.schedule.placement == v_shape(4)
    assert max(result.schedule.peak_live_slices()) <= 16
    assert simulate(result.schedule, plan, costs).makespan_s == pytest.approx(result.makespan_s, rel=1e-12)


def test_more_slices_at_the_ends_are_never_slower() -> None:
    def cut(count: int) -> SlicePlan:
        return SlicePlan.equal(LENGTH, count)

    same = find_order(Costs(), cut(3), 4, 6, 12, evaluations=60)
    ramp = find_order_and_slices(Costs(), cut, 3, 4, 6, 12, evaluations=60)
    assert ramp.makespan_s <= same.makespan_s
    assert isinstance(ramp.schedule, Schedule)
    validate(ramp.schedule)


def test_a_limit_below_a_micro_batch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="raise them"):
        find_order(Costs(), SlicePlan.equal(LENGTH, 4), 2, 2, 3, evaluations=20)
