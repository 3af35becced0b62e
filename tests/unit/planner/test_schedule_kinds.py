"""What is particular to schedules with several chunks per stage, with split backwards, and with options."""

from typing import Any

import pytest
from planner_cases import parts_of, split_parts

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import MemoryLimitError, MemoryModel, PartMemory, PlannerError, best_schedule, plan_slices
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SPLIT_SCHEDULES, build
from terapipe_ds.simulator import Replay, UnitCosts, simulate
from tests.costs import CostsOf

# --- several chunks


def test_one_cost_for_all_parts_is_that_of_one_of_v_k_parts() -> None:
    """Interleaving halves the bubble of whole micro-batches: (K - 1)(F + B) / v."""
    whole = best_schedule(UnitCosts(8, share=0.5), SlicePlan((8,)), 4, 4, chunks_per_stage=2)
    assert whole.schedule == "seq1f1b-interleaved-zb" and whole.predicted_s == pytest.approx(12 + 3 / 2)
    without_w = plan_slices(UnitCosts(8, share=0.5), 8, 4, 4, 8, "interleaved", chunks_per_stage=2)
    assert without_w.predicted_s == pytest.approx(12 + 9 / 2)


def test_the_limit_counts_all_chunks_of_a_stage() -> None:
    memory = MemoryModel(tuple(PartMemory(1000 * (part_id + 1), 5) for part_id in range(4)))
    costs, shape = UnitCosts(8, share=0.5), (8, 2, 2, 1, "seq1f1b-interleaved")
    options = {"memory": memory, "chunks_per_stage": 2}
    free = plan_slices(costs, *shape, **options)
    assert free.peak_bytes is not None and 4000 < free.peak_bytes[0] < 6000 < free.peak_bytes[1]  # parts 0, 2 and 1, 3
    with pytest.raises(MemoryLimitError, match="'seq1f1b-interleaved' the least .* stage 1.* 5.588e-06 GiB of it are "):
        plan_slices(costs, *shape, memory_limit_bytes=6000, **options)
    fitting = best_schedule(costs, SlicePlan((4, 4)), 2, 2, memory_limit_bytes=6000, with_order=False, **options)
    assert fitting.schedule == "zbv"  # parts 0 and 3 on stage 0, 1 and 2 on stage 1: 5000 each
    with pytest.raises(MemoryLimitError, match="no schedule fits in .* .5e-06 GB. .* zbv, needs .* raise the limit"):
        best_schedule(costs, SlicePlan((4, 4)), 2, 2, memory_limit_bytes=5000, **options)


@pytest.mark.parametrize(("schedule", "num_parts", "chunks", "reason"), [
    ("seq1f1b", 4, 2, "chunks_per_stage is 2: schedule 'seq1f1b' has one part"),
    ("chimera", 3, 2, "num_stages is 3: a bidirectional"),
    ("interleaved", 4, 2, "4 costs for 6 parts"),
    ("auto", 4, 2, "4 costs: on 3 stages no schedule has 2 chunks per stage"),
    ("auto", 6, 0, "chunks_per_stage"),
])  # fmt: skip
def test_what_does_not_fit_together(schedule: str, num_parts: int, chunks: int, reason: str) -> None:
    with pytest.raises(PlannerError, match=reason):
        plan_slices(split_parts(3, num_parts), 8, 3, 2, 1, schedule, chunks_per_stage=chunks)


# --- split backwards

ON_A_LINE = tuple(name for name in SPLIT_SCHEDULES if name not in CHUNKED_SCHEDULES)


def test_without_the_time_of_w_there_is_no_split_schedule() -> None:
    with pytest.raises(PlannerError, match=r"'zb-h1' splits backwards, but the costs have no weight_s"):
        plan_slices(parts_of(3, 4), 8, 4, 2, 1, "zb-h1")
    mixed = [*split_parts(4, 2)[:1], *parts_of(4, 2)[1:]]
    assert plan_slices(mixed, 8, 2, 2, 1, "auto").schedule not in ON_A_LINE
    assert best_schedule(mixed, SlicePlan((4, 4)), 2, 2).schedule not in ON_A_LINE


@pytest.mark.parametrize("schedule", ON_A_LINE)
def test_memory_that_does_not_say_what_w_needs_keeps_all_of_the_slice_until_w(schedule: str) -> None:
    def peaks(weight_bytes: int | None) -> tuple[int, ...]:
        memory = MemoryModel((PartMemory(0, slice_bytes_per_token=5, weight_bytes_per_token=weight_bytes),) * 3)
        return Replay(build(schedule, 3, 4, 3)).peak_bytes(SlicePlan((4, 3, 1)), memory)

    assert peaks(None) == peaks(5) > peaks(1)


# --- options


# Links take as long as a forward: what policy B of `dapple` is for.
BY_TOKENS = lambda tokens, prefix=0: 1.0 * tokens  # noqa: E731
SLOW_LINKS = CostsOf(BY_TOKENS, BY_TOKENS, weight_s=lambda tokens, prefix: 0.4 * tokens, send_s=BY_TOKENS)


def planned(schedule: str, **options: object) -> float:
    return plan_slices(SLOW_LINKS, 4, 3, 6, 4, schedule, schedule_options=options).predicted_s


@pytest.mark.parametrize(("name", "options"), [
    ("dapple", {"policy": "A"}), ("dapple", {"policy": "B"}), ("zbv", {"max_live_slices": 4}),
])  # fmt: skip
def test_a_plan_is_judged_with_the_options(name: str, options: dict[str, Any]) -> None:
    expected = simulate(build(name, 3, 6, 1, **options), SlicePlan((4,)), SLOW_LINKS).makespan_s
    assert planned(name, **options) == pytest.approx(expected)
    assert options == {"policy": "A"} or planned(name) != pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "options", "message"), [
    ("auto", {"policy": "B"}, "not with 'auto'"),
    ("dapple", {"policy": "C"}, "give 'A'"),
    ("dapple", {"forward_only": True}, "takes no option 'forward_only'"),
])  # fmt: skip
def test_refused_options(schedule: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        planned(schedule, **options)
