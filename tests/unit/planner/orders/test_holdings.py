"""What a stage holds is what the simulator and the schedule say, and orders found keep the limit."""

import random
from dataclasses import replace

import pytest

from terapipe_ds import simulate
from terapipe_ds.costs.model_sizes import model_size
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryModel
from terapipe_ds.planner.orders.find import find_order
from terapipe_ds.planner.orders.holdings import limited
from terapipe_ds.planner.orders.priced_nodes import PricedNodes
from terapipe_ds.schedule import ScheduleError, build, placement_for
from tests.unit.planner.orders.test_find import Costs

LENGTH = 2048
PLANS = [SlicePlan((1024, 512, 512)), SlicePlan((LENGTH,)), SlicePlan((1500, 548)), SlicePlan((512,) * 4)]


def memory_of(num_parts: int, dtype: str = "bfloat16") -> MemoryModel:
    return MemoryModel.of_model(model_size("gpt3-1b"), num_stages=num_parts, dtype=dtype, micro_batch=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # fp32 has gradients in `.grad`
@pytest.mark.parametrize(("name", "chunks"), [("seq1f1b-zb", 1), ("zb-h1", 1), ("zbv", 2)])
def test_bytes_are_those_of_the_simulator(name: str, chunks: int, dtype: str) -> None:
    """All but keys and values, whose memory the simulator keeps from one micro-batch to the next."""
    stages, parts = 3, memory_of(3 * chunks, dtype).parts
    memory = MemoryModel(tuple(replace(part, store_bytes_per_token=0, store_grad_bytes_per_token=0) for part in parts))
    schedule = build(name, stages, len(PLANS), [plan.num_slices for plan in PLANS])
    nodes = PricedNodes(placement_for(name, stages, chunks), PLANS, Costs())
    holdings = limited(nodes, memory=memory, num_bytes=1e12)
    peaks = [holdings.peak(k, order) for k, order in enumerate(nodes.of_schedule(schedule))]
    senders = [part for (stage, _), part in placement_for(name, stages, chunks).items() if part > 0]
    stage_of = {part: stage for (stage, _), part in placement_for(name, stages, chunks).items()}
    for k, simulated in enumerate(simulate(schedule, PLANS, Costs(), memory=memory).peak_bytes or ()):
        parts = [part for part in senders if stage_of[part] == k != stage_of[part - 1]]
        messages = sum(8 * memory.sent_bytes(part, LENGTH) for part in parts)
        assert 0 <= peaks[k] - simulated <= messages, "all but what is on its way, at most eight messages a link"


def test_live_slices_are_those_of_the_schedule() -> None:
    schedule = build("zbv", 3, len(PLANS), [plan.num_slices for plan in PLANS])
    nodes = PricedNodes(schedule.placement, PLANS, Costs())
    holdings = limited(nodes, (9, 9, 9))
    assert tuple(holdings.peak(*each) for each in enumerate(nodes.of_schedule(schedule))) == schedule.peak_live_slices()


def test_tokens_of_unsliced_1f1b_fill_the_first_stage() -> None:
    whole = [SlicePlan((LENGTH,))] * 6
    nodes = PricedNodes(placement_for("1f1b", 4, 1), whole, Costs())
    holdings = limited(nodes, live_sequences=4)
    peaks = [holdings.peak(*each) for each in enumerate(nodes.of_schedule(build("1f1b", 4, 6, 1)))]
    assert peaks == [4 * LENGTH, 3 * LENGTH, 2 * LENGTH, LENGTH]
    assert holdings.fits(0, [0]) and holdings.limits[0] > 4 * LENGTH
    halves = limited(PricedNodes(placement_for("zbv", 4, 2), whole, Costs()), live_sequences=4)
    assert halves.gain[0] == LENGTH / 2, "a part of two on a stage"


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_orders_found_keep_a_limit_of_bytes(seed: int, chunks: int) -> None:
    chance, stages = random.Random(seed), 3
    memory, costs = memory_of(stages * chunks), Costs(weight=chance.uniform(0.05, 0.1), send=0.002)
    plans = [chance.choice(PLANS) for _ in range(5)]
    name = "seq1f1b-zb" if chunks == 1 else "zbv"
    named = build(name, stages, 5, [plan.num_slices for plan in plans])
    limit = 1.05 * max(simulate(named, plans, costs, memory=memory).peak_bytes or ())
    options = {"memory": memory, "chunks_per_stage": chunks}
    found = find_order(costs, plans, stages, 5, memory_limit_bytes=limit, evaluations=60, **options)
    timeline = simulate(found.schedule, plans, costs, memory=memory)
    assert max(timeline.peak_bytes or ()) <= limit
    assert timeline.makespan_s <= simulate(named, plans, costs).makespan_s * (1 + 1e-12)
    with pytest.raises(ScheduleError, match="bytes: raise it"):
        find_order(costs, plans, stages, 5, memory_limit_bytes=1e6, evaluations=8, **options)
