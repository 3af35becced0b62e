"""The best schedule for slices that are given, and plans in words."""

from __future__ import annotations

import pytest

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryLimitError, MemoryModel, PartMemory, best_schedule, describe, plan_slices

MEMORY = MemoryModel.measured([PartMemory(10**6, 1000.0)] * 4)


class Costs:
    """A token takes a unit forward and two backward, and as much again for 64 tokens of prefix."""

    def forward_s(self, tokens: int, prefix: int) -> float:
        return 1e-3 * tokens * (1 + prefix / 64)

    def backward_s(self, tokens: int, prefix: int) -> float:
        return 2 * self.forward_s(tokens, prefix)


def test_a_limit_leaves_the_schedules_that_fit() -> None:
    plan, m = SlicePlan((16, 16, 16, 16)), 8
    free = best_schedule(Costs(), plan, 4, m, memory=MEMORY)
    all_live = 10**6 + m * 64 * 1000  # gpipe and terapipe keep every slice live
    fitting = best_schedule(Costs(), plan, 4, m, memory=MEMORY, memory_limit_bytes=all_live - 1)
    assert fitting.schedule in ("seq1f1b", "1f1b") and free.peak_bytes is not None
    with pytest.raises(MemoryLimitError, match=r"no schedule fits .* seq1f1b, needs .* stage 0.* raise the limit"):
        best_schedule(Costs(), plan, 4, m, memory=MEMORY, memory_limit_bytes=10**6)


def test_a_plan_in_words() -> None:
    found = plan_slices(Costs(), 64, 4, 1, 8, "seq1f1b", memory=MEMORY, memory_limit_bytes=10**9)
    text = "\n".join(describe(found))
    assert f"{found.plan.num_slices} slices" in text and "schedule  seq1f1b" in text and "(chosen)" not in text
    assert f"({found.unsliced_s / found.predicted_s:.3f}x)" in text
    assert f"bubble    {found.bubble_fraction:.1%}" in text
    assert "1.1 MB on stage 0" in text and "the limit is 1.00 GB" in text
    assert "proof" in text
    given = best_schedule(Costs(), SlicePlan((64,)), 4)
    lines = describe(given, schedule_chosen=True)
    assert any("1 slice:" in line for line in lines) and "(chosen)" in lines[0]
    assert not any("proof" in line or "memory" in line for line in lines)  # nothing is known of either
