"""The dynamic programs against all compositions, on bands with holes, limits and counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import compositions

from terapipe_ds.planner.slice_program import dynamic_programs as programs
from terapipe_ds.planner.slice_program.dynamic_programs import Band, least_heads, least_tails, trace


def random_band(rng: np.random.Generator, n: int, shortest: int, width: int) -> Band:
    """Slices of ``shortest`` to ``shortest + width - 1`` granules; one of five is ruled out."""
    total, forward, backward = rng.random((3, n, width))
    row, column = np.indices((n, width))
    outside = (row + column + shortest > n) | (rng.random((n, width)) < 0.2)
    return Band(np.where(outside, np.inf, total), forward, backward, shortest)


def brute(band: Band, limits: np.ndarray, count: int | None, exactly: bool, largest: bool) -> float:
    """The least sum (or largest total) over every composition that keeps the limits."""
    best = np.inf
    for slices in compositions(band.num_granules, 1):
        cells = [(start, length - band.shortest) for length, start in slices]
        if any(not 0 <= column < band.width for _, column in cells):
            continue
        if any(band.forward[cell] > limits[0] or band.backward[cell] > limits[1] for cell in cells):
            continue
        if count is not None and (len(slices) > count or (exactly and len(slices) != count)):
            continue
        totals = [band.total[cell] for cell in cells]
        best = min(best, max(totals) if largest else sum(totals))
    return best


@pytest.mark.parametrize("narrow", [0, programs.NARROW])
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 8),
    st.none() | st.integers(1, 8),
    st.booleans(),
    st.booleans(),
)
def test_least_sums(
    narrow: int, seed: int, n: int, shortest: int, width: int, count: int | None, exactly: bool, largest: bool
) -> None:
    rng = np.random.default_rng(seed)
    band = random_band(rng, n, shortest, width)
    limits = np.array([[np.inf, np.inf], rng.uniform(0.4, 1, 2), rng.uniform(0.7, 1, 2)])
    exactly = exactly and count is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "NARROW", narrow)
        patch.setattr(programs, "BLOCK_ELEMENTS", int(rng.choice([1, 20, 1 << 16])))
        least = least_tails(band, limits, count, exactly, largest)
        assert least.shape == (3, 1 if count is None else count + 1, n + 1)
        for sums, pair in zip(least, limits, strict=True):
            expected = brute(band, pair, count, exactly, largest)
            assert sums[-1, 0] == pytest.approx(expected)
            if count is None and not largest:
                assert least_heads(band, pair[None])[-1] == pytest.approx(expected)
            if np.isfinite(expected) and not largest:
                lengths = trace(band, sums, pair)
                starts = np.cumsum((0, *lengths[:-1]))
                assert sum(lengths) == n and (not exactly or len(lengths) == count)
                cells = starts, np.array(lengths) - shortest
                assert band.total[cells].sum() == pytest.approx(expected)
                assert (band.forward[cells] <= pair[0]).all() and (band.backward[cells] <= pair[1]).all()
