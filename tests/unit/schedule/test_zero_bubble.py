"""Schedules whose backwards are split in B and W."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from schedule_cases import even_shapes, ragged_shapes

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Kind, build, validate
from terapipe_ds.schedule.zero_bubble import with_weights
from terapipe_ds.simulator import UnitCosts, simulate


def torch_order(num_stages: int, num_micro_batches: int, rank: int) -> list[str]:
    """The order of torch's own zero-bubble schedule with one part per rank (ZB1P, which is ZB-H1)."""
    from torch.distributed.pipelining import schedules

    warm_up = min(num_stages - 1 - rank, num_micro_batches)
    actions: Any = schedules._get_1f1b_rank_ops(
        1, num_stages, warm_up, num_micro_batches - warm_up, warm_up, rank, lambda step: rank, lambda step: rank,
        num_1f1b_microbatches=rank, enable_zero_bubble=True,
    )  # fmt: skip
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [f"{letters[a.computation_type.name]}{a.microbatch_index}.0" for a in actions if a is not None]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_zb_h1_equals_torchs_order(num_stages: int) -> None:
    """From K micro-batches on. With fewer no stage is ever full, and ours fills the waits at the end earlier."""
    for num_micro_batches in (num_stages, num_stages + 1, 2 * num_stages, 3 * num_stages + 2):
        schedule = build("zb-h1", num_stages, num_micro_batches, 1)
        for rank in range(num_stages):
            assert schedule.compute_order(rank) == torch_order(num_stages, num_micro_batches, rank)


def test_zb_h1_as_in_figure_3_of_its_paper() -> None:
    """Qi et al., arXiv 2401.10241: K = 4, m = 8, F = B = W = 1 slot; bubbles (K-1)(F+B-W) = 3 slots a stage."""
    schedule = build("zb-h1", 4, 8, 1)
    last = "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7"
    assert [name.removesuffix(".0") for name in schedule.compute_order(3)] == last.split()
    assert schedule.peak_live_slices() == (4, 4, 4, 4)
    timeline = simulate(schedule, SlicePlan((4,)), UnitCosts(4))
    assert timeline.makespan_s == pytest.approx(8 * 3 + 3)
    assert simulate(build("1f1b", 4, 8, 1), SlicePlan((4,)), UnitCosts(4)).makespan_s == pytest.approx(8 * 3 + 9)


@given(even_shapes)
def test_zb_h1_expands_each_unit_to_its_slices(shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    whole, sliced = build("zb-h1", num_stages, m, 1), build("zb-h1", *shape)
    for stage_id in range(num_stages):
        expected = [
            f"{name[:-2]}.{i}"
            for name in whole.compute_order(stage_id)
            for i in (range(s) if name[0] == "F" else reversed(range(s)))
        ]
        assert sliced.compute_order(stage_id) == expected


@given(even_shapes)
def test_what_is_between_f_and_w_stays_within_the_formula(shape: tuple[int, int, int]) -> None:
    num_stages, _, s = shape
    assert max(build("seq1f1b-zb", *shape).peak_live_slices()) <= num_stages + s - 1
    assert max(build("zb-h1", *shape).peak_live_slices()) <= num_stages * s
    for name, base in (("seq1f1b-zb", "seq1f1b"), ("zb-h1", "1f1b")):
        peak, peak_of_base = (max(build(each, *shape).peak_live_slices()) for each in (name, base))
        assert peak == peak_of_base, "stage 0 of the base has as many"


@given(ragged_shapes)
def test_f_and_b_stand_as_without_w_and_each_b_has_one_w(shape: tuple[int, list[int]]) -> None:
    num_stages, num_slices = shape
    for name, base in (("seq1f1b-zb", "seq1f1b"), ("zb-h1", "1f1b")):
        schedule, unsplit = (build(each, num_stages, len(num_slices), num_slices) for each in (name, base))
        validate(schedule)
        for order, plain in zip(schedule.orders, unsplit.orders, strict=True):
            assert [a for a in order if a.kind is not Kind.WEIGHT] == list(plain)
            backwards = [a.unit for a in order if a.kind is Kind.BACKWARD]
            assert [a.unit for a in order if a.kind is Kind.WEIGHT] == backwards, "in the order of the B"


@given(even_shapes)
def test_no_slower_and_with_waits_to_fill_faster(shape: tuple[int, int, int]) -> None:
    num_stages, m, s = shape
    plan, costs = SlicePlan.equal(60, s), UnitCosts(60)
    for name, base in (("seq1f1b-zb", "seq1f1b"), ("zb-h1", "1f1b")):
        split, plain = (simulate(build(each, *shape), plan, costs).makespan_s for each in (name, base))
        assert split <= plain + 1e-9
        if num_stages > 1 and m > num_stages:
            assert split < plain - 1e-9


def test_the_rule_by_hand() -> None:
    """With room for two units the third forward waits for the oldest W; after the last forward W follow their B."""

    def units(text: str) -> list[tuple[Kind, int, int]]:
        return [(Kind(word[0]), int(word[1]), 0) for word in text.split()]

    order = units("F0 F1 B0 F2 B1 B2")
    assert with_weights(order, 2) == units("F0 F1 B0 W0 F2 B1 W1 B2 W2")
    assert with_weights(order, 3) == units("F0 F1 B0 F2 B1 W0 B2 W1 W2")
