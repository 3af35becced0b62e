"""Plans for schedules whose stages hold several chunks: against brute force over all plans."""

from __future__ import annotations

import pytest
from planner_cases import every_plan, split_parts

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import (
    MemoryLimitError,
    MemoryModel,
    PartMemory,
    PlannerError,
    best_schedule,
    plan_slices,
    ranked_schedules,
)
from terapipe_ds.planner.search import search
from terapipe_ds.schedule import build
from terapipe_ds.simulator import UnitCosts, simulate

SHAPES = [
    ("interleaved", 2, 2, 4), ("seq1f1b-interleaved", 2, 2, 4), ("seq1f1b-interleaved", 2, 3, 6), ("zbv", 2, 2, 4),
    ("chimera", 2, 2, 2), ("chimera-seq", 4, 2, 4),
]  # fmt: skip
"""(schedule, stages, chunks, parts)."""


def best_by_hand(schedule: str, num_stages: int, chunks: int, num_micro_batches: int, parts: list[object]) -> float:
    return min(
        simulate(
            build(schedule, num_stages, num_micro_batches, plan.num_slices, chunks_per_stage=chunks), plan, parts
        ).makespan_s
        for plan in every_plan(7, 1)
    )


@pytest.mark.parametrize(("schedule", "num_stages", "chunks", "num_parts"), SHAPES)
@pytest.mark.parametrize(("m", "seed"), [(1, 3), (4, 5)])
def test_against_brute_force(
    schedule: str, num_stages: int, chunks: int, num_parts: int, m: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best_s = best_by_hand(schedule, num_stages, chunks, m, list(split_parts(seed, num_parts)))
    exact = plan_slices(split_parts(seed, num_parts), 7, num_stages, m, 1, schedule, chunks_per_stage=chunks)
    assert exact.optimal and exact.num_stages == num_stages
    assert exact.predicted_s == pytest.approx(best_s, rel=1e-9)
    monkeypatch.setattr(search, "_ALL_PLANS", 0)
    climbed = plan_slices(split_parts(seed, num_parts), 7, num_stages, m, 1, schedule, chunks_per_stage=chunks)
    assert best_s * (1 - 1e-9) <= climbed.predicted_s <= 1.03 * best_s
    assert 0 < climbed.lower_bound_s <= best_s * (1 + 1e-9)


def test_auto_is_the_best_of_each() -> None:
    for num_parts in (4, 8):
        parts = split_parts(3, num_parts)
        best = plan_slices(parts, 8, 4, 3, 1, "auto", chunks_per_stage=2)
        names = ranked_schedules(4, 2, num_parts)
        each = {name: plan_slices(parts, 8, 4, 3, 1, name, chunks_per_stage=2).predicted_s for name in names}
        assert best.schedule in names
        assert best.predicted_s <= 1.001 * min(each.values())
        given = best_schedule(parts, best.plan, 4, 3, chunks_per_stage=2)
        assert given.schedule in names and given.predicted_s <= best.predicted_s * (1 + 1e-9)


def test_one_cost_for_all_parts_is_that_of_one_of_v_k_parts() -> None:
    """Interleaving halves the bubble of whole micro-batches: (K - 1)(F + B) / v."""
    whole = best_schedule(UnitCosts(8, share=0.5), SlicePlan((8,)), 4, 4, chunks_per_stage=2)
    assert whole.schedule == "zbv"
    without_w = plan_slices(UnitCosts(8, share=0.5), 8, 4, 4, 8, "interleaved", chunks_per_stage=2)
    assert without_w.predicted_s == pytest.approx(12 + 9 / 2)


def test_the_limit_counts_all_chunks_of_a_stage() -> None:
    memory = MemoryModel(tuple(PartMemory(1000 * (part_id + 1), 5) for part_id in range(4)))
    costs = UnitCosts(8, share=0.5)
    free = plan_slices(costs, 8, 2, 2, 1, "seq1f1b-interleaved", memory=memory, chunks_per_stage=2)
    assert free.peak_bytes is not None and 4000 < free.peak_bytes[0] < 6000 < free.peak_bytes[1]  # parts 0, 2 and 1, 3
    with pytest.raises(MemoryLimitError, match="'seq1f1b-interleaved' the least need .* on stage 1") as caught:
        plan_slices(
            costs, 8, 2, 2, 1, "seq1f1b-interleaved", memory=memory, memory_limit_bytes=6000, chunks_per_stage=2
        )
    assert "6e-06 GB are parameters" in str(caught.value)
    options = {"memory": memory, "chunks_per_stage": 2}
    fitting = best_schedule(costs, SlicePlan((4, 4)), 2, 2, memory_limit_bytes=6000, **options)
    assert fitting.schedule == "zbv"  # parts 0 and 3 on stage 0, 1 and 2 on stage 1: 5000 each
    with pytest.raises(MemoryLimitError, match="no schedule fits in the memory limit of 5000 bytes .* zbv, needs"):
        best_schedule(costs, SlicePlan((4, 4)), 2, 2, memory_limit_bytes=5000, **options)


@pytest.mark.parametrize(
    ("schedule", "num_parts", "chunks", "reason"),
    [
        ("seq1f1b", 4, 2, "chunks_per_stage is 2: schedule 'seq1f1b' has one part"),
        ("chimera", 3, 2, "num_stages is 3: a bidirectional"),
        ("interleaved", 4, 2, "4 costs for 6 parts"),
        ("auto", 4, 2, "4 costs: on 3 stages no schedule has 2 chunks per stage"),
        ("auto", 6, 0, "chunks_per_stage"),
    ],
)
def test_what_does_not_fit_together(schedule: str, num_parts: int, chunks: int, reason: str) -> None:
    with pytest.raises(PlannerError, match=reason):
        plan_slices(split_parts(3, num_parts), 8, 3, 2, 1, schedule, chunks_per_stage=chunks)
