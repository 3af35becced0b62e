"""`plan_slices(..., schedule="search")`: orders with their plans, within limits, never slower than named schedules."""

import functools
import json
from typing import Any

import pytest

from studies.orders import Costs
from terapipe_ds import planner, simulate
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryLimitError, MemoryModel, PartMemory, PlannerError, describe
from terapipe_ds.schedule import ScheduleError, build, from_csv, validate
from terapipe_ds.schedule.placement import v_shape
from tests.costs import CostsOf

plan_slices = functools.partial(planner.plan_slices, budget=500_000)
best_order = functools.partial(planner.best_order, budget=0.05)
SHORT_W = Costs(weight=0.07, slope=0.3)


WHOLE_BACKWARDS = CostsOf(lambda tokens, prefix: 1e-4 * tokens + 1e-3, lambda tokens, prefix: 2e-4 * tokens + 2e-3)


@pytest.mark.parametrize("costs", [SHORT_W, WHOLE_BACKWARDS], ids=["split", "whole"])
@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_not_slower_than_the_named_schedules(costs: Any, micro_batches: int) -> None:
    found = plan_slices(costs, 1024, 3, micro_batches, 128, "search")
    names = ("seq1f1b", "1f1b", "seq1f1b-zb") if hasattr(costs, "weight_s") else ("seq1f1b", "1f1b")
    named = [plan_slices(costs, 1024, 3, micro_batches, 128, name) for name in names]
    assert found.predicted_s <= min(one.predicted_s for one in named) * (1 + 1e-9)
    order = found.build()
    validate(order)
    timeline = simulate(order, found.plans, costs)
    assert timeline.makespan_s == pytest.approx(found.predicted_s, rel=1e-12)
    assert found.bubble_fraction == pytest.approx(timeline.bubble_fraction)
    assert found.order_bound_s <= found.predicted_s and found.lower_bound_s <= found.predicted_s
    assert len(found.plans) == micro_batches and (found.plan is None) == (len(set(found.plans)) > 1)
    assert all(length % 128 == 0 for plan in found.plans for length in plan.lengths)
    assert found == plan_slices(costs, 1024, 3, micro_batches, 128, "search"), "the same on every machine"


def test_the_outer_micro_batches_get_more_slices() -> None:
    found = plan_slices(Costs(), 1024, 4, 8, 128, "search")
    counts = found.num_slices
    assert counts[0] > min(counts) and counts[-1] > min(counts)
    same = best_order(Costs(), found.plans[0], 4, 8)
    assert found.predicted_s < same.predicted_s
    text = "\n".join(describe(found))
    assert all(said in text for said in ("micro-batches 0 to", "which no order of these slices beats", "  search"))
    told = json.loads(json.dumps(found.to_dict()))
    assert told["plan"] is None and [len(lengths) for lengths in told["plans"]] == list(counts)
    assert from_csv(told["order"], "search") == found.order


def test_limits() -> None:
    assert max(plan_slices(Costs(), 1024, 3, 6, 128, "search", 2).num_slices) <= 2
    memory = MemoryModel(tuple(PartMemory(1000, 10) for _ in range(3)))
    free = plan_slices(SHORT_W, 1024, 3, 6, 128, "search", memory=memory)
    assert free.peak_bytes is not None
    limit = 0.6 * max(free.peak_bytes)
    fitting = plan_slices(SHORT_W, 1024, 3, 6, 128, "search", memory=memory, memory_limit_bytes=limit)
    assert max(fitting.peak_bytes or ()) <= limit and fitting.predicted_s >= free.predicted_s * (1 - 1e-9)
    with pytest.raises(MemoryLimitError, match="no plan fits"):
        plan_slices(SHORT_W, 1024, 3, 6, 128, "search", memory=memory, memory_limit_bytes=2000)
    with pytest.raises(PlannerError, match="keeps the limit of 2000 bytes: raise it"):
        best_order(SHORT_W, SlicePlan((1024,)), 3, 6, memory=memory, memory_limit_bytes=2000)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_limit_that_a_named_schedule_keeps_is_never_too_tight(chunks: int) -> None:
    """On one stage all named orders have few live slices, and only the right slices fit."""
    memory = MemoryModel(
        tuple(PartMemory(1000, 10, working_bytes_per_token=3, gradient_bytes=500) for _ in range(chunks))
    )
    shape: tuple[Any, ...] = SHORT_W.half() if chunks == 2 else SHORT_W, 1024, 1, 2, 64
    names = ("interleaved", "seq1f1b-interleaved") if chunks == 2 else ("seq1f1b",)
    options: dict[str, Any] = {"memory": memory, "chunks_per_stage": chunks}
    with pytest.raises(MemoryLimitError) as nothing:
        plan_slices(*shape, names[0], memory_limit_bytes=2000, **options)
    for limit in (nothing.value.need_bytes, 1.01 * nothing.value.need_bytes):
        named = [plan_slices(*shape, name, memory_limit_bytes=limit, **options) for name in names]
        found = plan_slices(*shape, "search", memory_limit_bytes=limit, **options)
        assert found.predicted_s <= min(one.predicted_s for one in named) * (1 + 1e-9)
        timeline = simulate(found.build(), found.plans, shape[0], memory=memory)
        assert timeline.makespan_s == pytest.approx(found.predicted_s) and timeline.peak_bytes == found.peak_bytes
        assert max(found.peak_bytes or ()) <= limit
        assert 0 < found.lower_bound_s <= found.predicted_s and 0 < found.order_bound_s <= found.predicted_s


def test_an_order_may_fit_where_no_named_schedule_does() -> None:
    """Stage 0 of 1F1B holds a sequence per stage; with one at a time it holds less, and takes longer."""
    memory = MemoryModel(tuple(PartMemory(1000, 10) for _ in range(4)))
    names = "1f1b", "zb-h1", "seq1f1b", "gpipe"
    limit = 1000 + 3.5 * 10 * 1024
    for name in names:
        with pytest.raises(MemoryLimitError):
            plan_slices(SHORT_W, 1024, 4, 8, 128, name, 1, memory, limit)
    found = plan_slices(SHORT_W, 1024, 4, 8, 128, "search", 1, memory, limit)
    assert max(simulate(found.build(), found.plans, SHORT_W, memory=memory).peak_bytes or ()) <= limit
    with pytest.raises(MemoryLimitError, match="no plan fits") as nothing:
        plan_slices(SHORT_W, 1024, 4, 8, 128, "search", 1, memory, 2000)
    assert "try schedule 'seq1f1b'" not in str(nothing.value), "the search has tried it"


def test_without_a_limit_it_holds_no_more_than_unsliced_1f1b() -> None:
    found = best_order(SHORT_W, SlicePlan.equal(1024, 4), 3, 8)
    whole = build("1f1b", 3, 8, 1).peak_live_slices()
    assert found.order is not None and max(found.order.peak_live_slices()) <= 4 * max(whole) == 12


def test_two_parts_per_stage_in_a_v() -> None:
    costs = SHORT_W.half()
    found = plan_slices(costs, 1024, 3, 4, 256, "search", chunks_per_stage=2)
    assert found.chunks_per_stage == 2 and found.build().placement == v_shape(3)
    named = plan_slices(costs, 1024, 3, 4, 256, "zbv")
    assert found.predicted_s <= named.predicted_s * (1 + 1e-9)
    unsplit = plan_slices(WHOLE_BACKWARDS, 1024, 3, 4, 256, "search", chunks_per_stage=2)
    assert simulate(unsplit.build(), unsplit.plans, WHOLE_BACKWARDS).makespan_s == pytest.approx(unsplit.predicted_s)
    with pytest.raises(PlannerError, match="or of two in a V; give 1 or 2"):
        plan_slices(costs, 1024, 3, 4, 256, "search", chunks_per_stage=3)


def test_search_has_no_order_without_costs() -> None:
    with pytest.raises(ScheduleError, match="has no order without costs"):
        build("search", 2, 2, 2)
    with pytest.raises(PlannerError, match="takes no option 'policy'"):
        plan_slices(SHORT_W, 1024, 2, 2, 256, "search", schedule_options={"policy": "A"})
