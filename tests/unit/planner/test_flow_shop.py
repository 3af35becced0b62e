"""The makespan is the longest path through machines and jobs, and the sum formula on equal stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import makespan_by_grid

from terapipe_ds.planner.slice_program.flow_shop import fill_drain_s, makespan


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_longest_path(machines: int, jobs: int, repeats: int, with_links: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = rng.random((machines, jobs))
    links = rng.random((machines - 1, jobs)) if with_links else None
    rows = [list(times[0]) * repeats]
    for k in range(1, machines):
        rows += [[]] if links is None else [list(links[k - 1]) * repeats]
        rows.append(list(times[k]) * repeats)
    assert makespan(times, links, repeats) == pytest.approx(makespan_by_grid([row for row in rows if row]))


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
