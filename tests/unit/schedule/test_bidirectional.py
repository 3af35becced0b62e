"""Chimera: two pipelines in opposite directions over the same stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import GOLDEN, bidirectional

from terapipe_ds.schedule import build, validate
from terapipe_ds.schedule.bidirectional import directions
from terapipe_ds.schedule.show import count_slots
from terapipe_ds.schedule.validate import replay

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


def test_micro_batches_go_down_first_within_each_basic_unit() -> None:
    assert directions(4, 8) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert directions(4, 7) == [0, 0, 1, 1, 0, 0, 1]
    assert directions(8, 3) == [0, 0, 1]


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_idle_slots_at_f_equal_to_b(num_stages: int, units: int) -> None:
    """K - 2 of each device (Li and Hoefler, table 2), however many basic units follow one another."""
    count = count_slots(build("chimera", num_stages, units * num_stages, 1))
    assert count.num_idle == num_stages * (num_stages - 2)
    assert count.num_slots == 2 * units * num_stages + num_stages - 2


@given(even_stages, slice_counts)
def test_every_shape_is_valid(num_stages: int, num_slices: list[int]) -> None:
    schedule = build("chimera", num_stages, len(num_slices), num_slices)
    validate(schedule)
    assert sum(map(len, schedule.orders)) == 2 * num_stages * sum(num_slices)


@given(even_stages, st.integers(1, 12), st.integers(1, 4))
def test_live_slices(num_stages: int, m: int, s: int) -> None:
    """min(K / 2, K - k) micro-batches of the direction whose stage k it is, for both directions."""
    peaks = build("chimera", num_stages, m, s).peak_live_slices()
    half = num_stages // 2
    for k, peak in enumerate(peaks):
        assert peak <= s * (min(half, num_stages - k) + min(half, k + 1))
        if m >= num_stages:
            assert peak == s * (min(half, num_stages - k) + min(half, k + 1))
