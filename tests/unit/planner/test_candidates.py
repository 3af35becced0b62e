"""Plans as lengths in granules: each with the right sum, and the neighbours that the search counts on."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.plan import SlicePlan, split_evenly
from terapipe_ds.planner.search.candidates import compositions, merged_or_split, moved, slice_counts


def test_slice_counts() -> None:
    assert slice_counts(1) == [1]
    assert slice_counts(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert slice_counts(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


@given(st.integers(1, 200), st.integers(1, 9), st.data())
def test_an_even_split_is_the_equal_plan(length: int, granularity: int, data: st.DataObject) -> None:
    granules = -(-length // granularity)
    count = data.draw(st.integers(1, granules))
    if granularity <= length:
        plan = SlicePlan.equal(length, count, granularity)
        assert SlicePlan.of_granules(split_evenly(granules, count), length, granularity) == plan


def test_compositions() -> None:
    assert list(compositions(3, 3)) == [(3,), (1, 2), (2, 1), (1, 1, 1)]
    for most in range(1, 8):
        found = list(compositions(7, most))
        assert len(found) == len(set(found)) == sum(comb(6, count - 1) for count in range(1, most + 1))
        assert {sum(lengths) for lengths in found} == {7}


@pytest.mark.parametrize("lengths", [(4,), (3, 1), (2, 3, 4), (1, 1, 1, 1)])
def test_neighbours(lengths: tuple[int, ...]) -> None:
    for step in (1, 2):
        for changed in moved(lengths, step):
            assert (len(changed), sum(changed), min(changed) > 0) == (len(lengths), sum(lengths), True)
            assert sorted(b - a for a, b in zip(lengths, changed, strict=True) if a != b) == [-step, step]
    for changed in merged_or_split(lengths, max_slices=4):
        assert abs(len(changed) - len(lengths)) == 1 and len(changed) <= 4
        assert (sum(changed), min(changed) > 0) == (sum(lengths), True)


def test_the_search_can_reach_every_plan() -> None:
    """Merging and splitting connect all compositions."""
    seen, front = {(6,)}, [(6,)]
    while front:
        front = [new for old in front for new in merged_or_split(old, 6) if new not in seen]
        seen.update(front)
    assert seen == set(compositions(6, 6))
