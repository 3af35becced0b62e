"""The makespan is the longest path through machines and jobs, and the sum formula on equal stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import longest_path, makespan_by_grid

from terapipe_ds.planner.slice_program.flow_shop import fill_drain_s, makespan


def interleaved(times: np.ndarray, links: np.ndarray | None, repeats: int) -> list[list[float]]:
    """Machines and links in order, jobs repeated."""
    rows = []
    for k, row in enumerate(times):
        rows.append(list(row) * repeats)
        if links is not None and k < len(times) - 1:
            rows.append(list(links[k]) * repeats)
    return rows


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.integers(0, 10**6))
def test_longest_path(machines: int, jobs: int, repeats: int, with_links: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = rng.random((machines, jobs))
    links = rng.random((machines - 1, jobs)) if with_links else None
    rows = interleaved(times, links, repeats)
    assert makespan(times, links, repeats) == pytest.approx(longest_path(rows))
    assert makespan_by_grid(rows) == pytest.approx(longest_path(rows))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_equal_stages_with_links_that_are_not_slower(stages: int, slices: int, micro_batches: int, seed: int) -> None:
    """m * sum(f + b) + (K - 1) * (max(f + send) + max(b + send)) where no transfer outlasts its slice's computation."""
    rng = np.random.default_rng(seed)
    forward, backward = rng.random(slices), rng.random(slices)
    send = np.minimum(forward, backward) * rng.random(slices)
    expected = micro_batches * (forward + backward).sum()
    expected += (stages - 1) * ((forward + send).max() + (backward + send).max())
    every = [np.tile(x, (stages, 1)) for x in (forward, backward, send)]
    assert fill_drain_s(*every, micro_batches) == pytest.approx(expected)


def test_a_transfer_takes_the_senders_time() -> None:
    one = np.ones((2, 1))
    assert fill_drain_s(one, one, np.array([[0.25], [0.0]]), 1) == 4.25  # forward: stage 0 sends
    assert fill_drain_s(one, one, np.array([[0.0], [0.5]]), 1) == 4.5  # backward: stage 1 sends
