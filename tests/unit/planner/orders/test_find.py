"""Orders found are never slower than the named ones, keep the limit, and equal brute force on tiny cases."""

import random
from itertools import product

import pytest

from studies.orders import Costs, brute_force_s, merged
from terapipe_ds import simulate
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.planner.orders.find import NAMED, find_order
from terapipe_ds.planner.orders.ramps import find_order_and_slices
from terapipe_ds.schedule import SPLIT_SCHEDULES, Kind, Schedule, ScheduleError, build, validate
from terapipe_ds.schedule.placement import v_shape
from terapipe_ds.simulator import Replay
from tests.costs import CostsOf

LENGTH = 1024


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


@pytest.mark.sample(10)
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
    assert named_s and [*result.named_s.values()] == pytest.approx(named_s, rel=1e-12)
    assert found_s <= min(named_s) * (1 + 1e-12)


@pytest.mark.parametrize("knows_weights", [True, False])
def test_a_named_schedule_that_fits_only_with_whole_backwards_stays_whole(knows_weights: bool) -> None:
    costs, plan, schedule = random_case(0)[0][:2], SlicePlan((512, 512)), build("seq1f1b", 2, 3, 2)
    parts = costs if knows_weights else [CostsOf(cost.forward_s, cost.backward_s) for cost in costs]
    memory = MemoryModel((PartMemory(0, 100, weight_bytes_per_token=400),) * 2)
    limit = max(Replay(schedule).peak_bytes(plan, memory))
    result = find_order(parts, plan, 2, 3, memory=memory, memory_limit_bytes=limit)
    assert max(Replay(result.schedule).peak_bytes(plan, memory)) <= limit
    assert simulate(result.schedule, plan, parts).makespan_s == pytest.approx(result.makespan_s, rel=1e-12)
    assert knows_weights or not {*result.named_s} & {*SPLIT_SCHEDULES}


@pytest.mark.parametrize(
    ("lengths", "micro_batches"), [((1024,), 2), ((700, 324), 1), ((512, 384, 128), 1)], ids=["1x2", "2x1", "3x1"]
)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_brute_force(lengths: tuple[int, ...], micro_batches: int, seed: int) -> None:
    costs, plan = random_case(seed)[0][:2], SlicePlan(lengths)
    limit = plan.num_slices + 1
    result = find_order(costs, plan, 2, micro_batches, limit)
    assert result.makespan_s == pytest.approx(brute_force_s(costs, plan, micro_batches, limit), rel=1e-12)


def whole_backwards(scale: float, send: float) -> CostsOf:
    """Return costs without W."""
    return CostsOf(
        lambda tokens, prefix: scale * tokens * (1 + prefix / LENGTH),
        lambda tokens, prefix: 2 * scale * tokens * (1 + prefix / LENGTH),
        send_s=lambda tokens: send,
    )


def timed(orders: tuple[list, list], costs: list, plan: SlicePlan) -> float:
    """Return when two stages are done; infinity on a deadlock. Each link carries one message at a time, in order."""
    ends: dict[tuple[int, Kind, int, int], float] = {}
    free, at, link = [0.0, 0.0], [0, 0], [0.0, 0.0]
    moved = True
    while moved:
        moved = False
        for k in (0, 1):
            while at[k] < len(orders[k]):
                kind, m, s = orders[k][at[k]]
                sends = (kind, k) in ((Kind.FORWARD, 0), (Kind.BACKWARD, 1))
                came = 0.0 if sends else ends.get((1 - k, kind, m, s))
                if came is None:
                    break
                tokens, prefix = plan.lengths[s], plan.starts[s]
                takes = costs[k].forward_s if kind is Kind.FORWARD else costs[k].backward_s
                free[k] = max(free[k], came) + takes(tokens, prefix)
                if sends:
                    link[k] = max(link[k], free[k]) + costs[k].send_s(tokens)
                ends[k, kind, m, s] = link[k] if sends else free[k]
                at[k], moved = at[k] + 1, True
    return max(free) if at == [len(order) for order in orders] else float("inf")


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_brute_force_with_two_micro_batches_of_two_slices(seed: int) -> None:
    chance = random.Random(seed)
    costs = [whole_backwards(chance.uniform(0.8, 1.2), chance.uniform(0, 100)) for _ in range(2)]
    plan = SlicePlan((576, 448))
    chains = [
        [(Kind.FORWARD, m, 0), (Kind.FORWARD, m, 1), (Kind.BACKWARD, m, 1), (Kind.BACKWARD, m, 0)] for m in range(2)
    ]
    every = list(merged(chains, with_weights=False))
    assert len(every) == 70

    def link_orders(order: list) -> tuple[list, list]:
        return tuple([unit for unit in order if unit[0] is kind] for kind in (Kind.FORWARD, Kind.BACKWARD))

    pairs = [(one, two) for one, two in product(every, every) if link_orders(one) == link_orders(two)]
    least = min(timed(pair, costs, plan) for pair in pairs)
    assert find_order(costs, plan, 2, 2, 4).makespan_s == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("micro_batches", [8, 16])
def test_faster_than_seq1f1b_zb_with_three_times_its_live_slices(micro_batches: int) -> None:
    # W is shorter than the rest of a backward and later slices cost more, as attention makes them.
    costs, plan = Costs(weight=0.07, slope=0.3), SlicePlan.equal(LENGTH, 8)
    named = build("seq1f1b-zb", 8, micro_batches, 8)
    limit = 3 * max(named.peak_live_slices())
    result = find_order(costs, plan, 8, micro_batches, limit, evaluations=60)
    assert max(result.schedule.peak_live_slices()) <= limit
    found_s = simulate(result.schedule, plan, costs).makespan_s
    assert found_s <= simulate(named, plan, costs).makespan_s * 0.98


@pytest.mark.parametrize("micro_batches", [8, 16])
def test_reaches_the_bound_where_slices_cost_the_same(micro_batches: int) -> None:
    # The bound by hand: work of the last stage after seven forwards and seven messages of the first slice.
    # F, B and W are equal, so `seq1f1b-zb` is within 1.2 % of this bound and 2 % cannot be had.
    result = find_order(Costs(), SlicePlan.equal(LENGTH, 8), 8, micro_batches, 45)
    bound_s = micro_batches * (0.3 + 8 * 0.004) + 7 * (0.1 / 8 + 0.004 / 3 + 0.0015)
    assert result.makespan_s == pytest.approx(bound_s, rel=1e-12)
    assert result.lower_bound_s == pytest.approx(bound_s, rel=1e-12)


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


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_few_tries_find_an_order_without_a_named_schedule(stages: int, micro_batches: int) -> None:
    plan = SlicePlan((LENGTH,))  # a V without the seconds of W has no named schedule
    result = find_order(whole_backwards(1.0, 0.0), plan, stages, micro_batches, chunks_per_stage=2, evaluations=8)
    assert max(result.schedule.peak_live_slices()) <= 2 * min(stages, micro_batches)


def test_more_slices_at_the_ends_are_never_slower() -> None:
    def cut(count: int) -> SlicePlan:
        return SlicePlan.equal(LENGTH, count)

    same = find_order(Costs(), cut(3), 4, 6, 12, evaluations=60)
    ramp = find_order_and_slices(Costs(), cut, [3], 4, 6, most_slices=8, max_live_slices=12, evaluations=120)
    assert ramp.makespan_s <= same.makespan_s
    assert isinstance(ramp.schedule, Schedule)
    validate(ramp.schedule)


def test_a_limit_below_a_micro_batch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="raise it"):
        find_order(Costs(), SlicePlan.equal(LENGTH, 4), 2, 2, 3, evaluations=20)
