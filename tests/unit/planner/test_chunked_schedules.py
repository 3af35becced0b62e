"""Plans for schedules whose stages hold several chunks: against brute force over all plans."""

from __future__ import annotations

import pytest
from planner_cases import split_parts

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import (
    MemoryLimitError,
    MemoryModel,
    PartMemory,
    PlannerError,
    best_schedule,
    plan_slices,
)
from terapipe_ds.simulator import UnitCosts

SHAPES = [
    ("interleaved", 2, 2, 4), ("seq1f1b-interleaved", 2, 2, 4), ("seq1f1b-interleaved", 2, 3, 6), ("zbv", 2, 2, 4),
    ("chimera", 2, 2, 2), ("chimera-seq", 4, 2, 4),
]  # fmt: skip
"""(schedule, stages, chunks, parts)."""


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
