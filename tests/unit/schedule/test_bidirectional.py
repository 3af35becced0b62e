"""Chimera: two pipelines in opposite directions over the same stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import GOLDEN, bidirectional

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Kind, build, validate
from terapipe_ds.schedule.bidirectional import directions
from terapipe_ds.schedule.show import count_slots
from terapipe_ds.schedule.validate import replay
from terapipe_ds.simulator import UnitCosts, simulate

even_stages = st.integers(1, 4).map(lambda half: 2 * half)
slice_counts = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def test_the_published_order() -> None:
    """Nothing starts after its published slot; a stage that need not wait starts some forwards before it."""
    schedule = build("chimera", 4, 4, 1)
    assert schedule.orders == bidirectional().orders
    assert schedule.placement == bidirectional().placement
    published = [[int(cell.split(":")[0]) for cell in row] for row in GOLDEN["chimera_D4N4"]["devices"].values()]
    for mine, theirs in zip(replay(schedule), published, strict=True):
        assert all(slot <= given for slot, given in zip(mine, theirs, strict=True))
        assert mine[-1] == theirs[-1]


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_idle_slots_at_f_equal_to_b(num_stages: int, units: int) -> None:
    """K - 2 of each device (Li and Hoefler, table 2), however many basic units follow one another."""
    count = count_slots(build("chimera", num_stages, units * num_stages, 1))
    assert count.num_idle == num_stages * (num_stages - 2)
    assert count.num_slots == 2 * units * num_stages + num_stages - 2


@pytest.mark.parametrize("name", ["chimera", "chimera-seq"])
@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(num_stages=even_stages, num_slices=slice_counts)
def test_every_shape_is_valid(name: str, num_stages: int, num_slices: list[int]) -> None:
    schedule = build(name, num_stages, len(num_slices), num_slices)
    validate(schedule)
    assert sum(map(len, schedule.orders)) == 2 * num_stages * sum(num_slices)
    ways = directions(num_stages, len(num_slices))
    for order in schedule.orders:
        assert all(action.chunk_id == ways[action.micro_batch_id] for action in order)


@pytest.mark.parametrize("m", [1, 3, 4, 8])
def test_by_slices_with_one_slice_each_it_is_the_schedule_of_whole_micro_batches(m: int) -> None:
    assert build("chimera-seq", 4, m, 1).orders == build("chimera", 4, m, 1).orders


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(even_stages, slice_counts)
def test_live_slices_by_slices(num_stages: int, num_slices: list[int]) -> None:
    """2(K - k) + s - 1 of the direction whose stage k it is, for both directions; where all fit, as many as there are.

    (With one slice each it is chimera, whose peak is lower.)
    """
    schedule = build("chimera-seq", num_stages, len(num_slices), num_slices)
    s = max(num_slices)
    for stage_id, order in enumerate(schedule.orders):
        live, peaks = [0, 0], [0, 0]
        for action in order:
            live[action.chunk_id] += 1 if action.kind is Kind.FORWARD else -1
            peaks[action.chunk_id] = max(peaks[action.chunk_id], live[action.chunk_id])
        assert peaks[0] <= 2 * (num_stages - stage_id) + s - 1
        assert peaks[1] <= 2 * (stage_id + 1) + s - 1
    assert max(schedule.peak_live_slices()) <= 2 * (num_stages + s)


@pytest.mark.parametrize(("num_stages", "m", "s"), [(4, 4, 4), (4, 8, 4), (8, 4, 4), (8, 8, 4), (8, 8, 8)])
def test_slices_shorten_both_and_by_slices_takes_less_memory(num_stages: int, m: int, s: int) -> None:
    """At F = 1, B = 2: faster than seq1f1b, and than chimera without slices; at less memory than chimera with them."""
    plan, costs = SlicePlan.equal(480, s), UnitCosts(480)
    by_slices, whole, one_way = (build(name, num_stages, m, s) for name in ("chimera-seq", "chimera", "seq1f1b"))
    makespan_s = simulate(by_slices, plan, costs).makespan_s
    assert makespan_s < simulate(one_way, plan, costs).makespan_s
    assert makespan_s < simulate(build("chimera", num_stages, m, 1), SlicePlan((480,)), costs).makespan_s
    assert max(by_slices.peak_live_slices()) <= max(whole.peak_live_slices())


@given(even_stages, st.integers(1, 12), st.integers(1, 4))
def test_live_slices(num_stages: int, m: int, s: int) -> None:
    """min(K / 2, K - k) micro-batches of the direction whose stage k it is, for both directions."""
    peaks = build("chimera", num_stages, m, s).peak_live_slices()
    half = num_stages // 2
    for k, peak in enumerate(peaks):
        assert peak <= s * (min(half, num_stages - k) + min(half, k + 1))
        if m >= num_stages:
            assert peak == s * (min(half, num_stages - k) + min(half, k + 1))
