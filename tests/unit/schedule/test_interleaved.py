"""Schedules on a loop of v chunks: any number of stages, micro-batches, slices and chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import even_shapes, golden_order, ragged_shapes

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Kind, build, validate
from terapipe_ds.simulator import UnitCosts, simulate

NAMES = ("interleaved", "seq1f1b-interleaved")
chunk_counts = st.integers(1, 4)


def test_the_published_order() -> None:
    """The interleaved order of the authors of Seq1F1B: 2 stages, 4 micro-batches, 2 slices, 2 chunks."""
    schedule = build("seq1f1b-interleaved", 2, 4, 2, chunks_per_stage=2)
    assert [schedule.compute_order(k) for k in range(2)] == golden_order("seq1f1b_i_p2_m4_s2_v2")


def torch_order(num_stages: int, num_micro_batches: int, chunks: int, rank: int) -> list[str]:
    """torch's ScheduleInterleaved1F1B, which is Megatron's order where K divides m."""
    from torch.distributed.pipelining import schedules

    warm_up = min((chunks - 1) * num_stages + 2 * (num_stages - 1 - rank), num_micro_batches * chunks)
    total = num_micro_batches * chunks
    actions: Any = schedules._get_1f1b_rank_ops(
        chunks, num_stages, warm_up, total - warm_up, warm_up, rank,
        lambda step: (step // num_stages) % chunks * num_stages + rank,
        lambda step: (chunks - 1 - (step - warm_up) // num_stages % chunks) * num_stages + rank,
    )  # fmt: skip
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    return [
        f"{letters[a.computation_type.name]}{a.microbatch_index}.0c{a.stage_index // num_stages}"
        for a in actions
        if a is not None
    ]


@pytest.mark.parametrize(("num_stages", "rounds", "chunks"), [(2, 2, 2), (4, 2, 2), (4, 1, 3), (3, 3, 2), (8, 2, 4)])
def test_as_in_torch_where_k_divides_m(num_stages: int, rounds: int, chunks: int) -> None:
    m = num_stages * rounds
    schedule = build("interleaved", num_stages, m, 1, chunks_per_stage=chunks)
    for rank in range(num_stages):
        assert schedule.compute_order(rank) == torch_order(num_stages, m, chunks, rank)


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(ragged_shapes, chunk_counts)
def test_every_shape_is_valid(shape: tuple[int, list[int]], chunks: int) -> None:
    num_stages, num_slices = shape
    for name in NAMES:
        schedule = build(name, num_stages, len(num_slices), num_slices, chunks_per_stage=chunks)
        validate(schedule)
        assert sum(map(len, schedule.orders)) == 2 * num_stages * chunks * sum(num_slices)


@pytest.mark.parametrize(("name", "base"), list(zip(NAMES, ("1f1b", "seq1f1b"), strict=True)))
@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(shape=ragged_shapes)
def test_one_chunk_is_the_schedule_without_chunks(name: str, base: str, shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    chunked, plain = (build(each, num_stages, len(num_slices), num_slices) for each in (name, base))
    assert (chunked.orders, chunked.placement, chunked.chunks_per_stage) == (plain.orders, plain.placement, 1)


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(even_shapes, st.integers(2, 4))
def test_whole_micro_batches_expanded(shape: tuple[int, int, int], chunks: int) -> None:
    num_stages, m, s = shape
    whole, sliced = (build("interleaved", num_stages, m, n, chunks_per_stage=chunks) for n in (1, s))
    for stage_id in range(num_stages):
        expected = [
            name.replace(".0c", f".{i}c")
            for name in whole.compute_order(stage_id)
            for i in (range(s) if name[0] == "F" else reversed(range(s)))
        ]
        assert sliced.compute_order(stage_id) == expected


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(even_shapes, st.integers(2, 4))
def test_peaks_of_live_slices(shape: tuple[int, int, int], chunks: int) -> None:
    """(v - 1) G + 2 (K - 1 - i) + 1 micro-batches on stage i, of v m at most; G: what a group has."""
    num_stages, m, s = shape
    group = -(-m // max(m // num_stages, 1))
    schedule = build("interleaved", num_stages, m, s, chunks_per_stage=chunks)
    for stage_id, peak in enumerate(schedule.peak_live_slices()):
        assert peak <= s * min((chunks - 1) * group + 2 * (num_stages - 1 - stage_id) + 1, chunks * m)
        if m % num_stages == 0:
            assert peak == s * min((chunks - 1) * group + 2 * (num_stages - 1 - stage_id) + 1, chunks * m)
    by_slices = build("seq1f1b-interleaved", num_stages, m, s, chunks_per_stage=chunks).peak_live_slices()
    group = -(-m * s // max(m * s // num_stages, 1))
    for stage_id, peak in enumerate(by_slices):
        # before the B of a micro-batch's last slice stand the forwards of the groups that it reaches into
        groups_ahead = (chunks - 1) * group * (1 + -(-(s - 1) // group))
        assert peak <= min(groups_ahead + 2 * s + 2 * (num_stages - 1 - stage_id), chunks * m * s)
        if s <= num_stages and num_stages % s == 0 and (m * s) % num_stages == 0:
            assert peak == min((chunks - 1) * num_stages + s + 2 * (num_stages - 1 - stage_id), chunks * m * s)


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 4), st.integers(2, 3))
def test_the_bubble_is_a_vth(num_stages: int, rounds: int, s: int, chunks: int) -> None:
    """Where K divides m: (K - 1)(F + B) / v over the ideal m (F + B) (Narayanan et al., section 2.2)."""
    m = num_stages * rounds
    costs = UnitCosts(60, share=1 / chunks)
    whole = simulate(build("interleaved", num_stages, m, 1, chunks_per_stage=chunks), SlicePlan((60,)), costs)
    assert whole.makespan_s == pytest.approx(3 * m + 3 * (num_stages - 1) / chunks)
    if num_stages % s == 0:
        sliced = build("seq1f1b-interleaved", num_stages, m, s, chunks_per_stage=chunks)
        found = simulate(sliced, SlicePlan.equal(60, s), costs).makespan_s
        assert found == pytest.approx(3 * m + 3 * (num_stages - 1) / (chunks * s))


def test_forwards_of_a_stage_stand_in_groups_chunk_by_chunk() -> None:
    """5 micro-batches on 2 stages: groups of 3 and 2, never of 1, which would wait for itself."""
    schedule = build("interleaved", 2, 5, 1, chunks_per_stage=2)
    for order in schedule.orders:
        forwards = [(a.micro_batch_id, a.chunk_id) for a in order if a.kind is Kind.FORWARD]
        assert forwards == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
