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


def test_by_hand() -> None:
    """Two machines, two jobs. Machine 0 ends at 1 and 4; machine 1 runs 1..3 and 4..5."""
    times = np.array([[1.0, 3.0], [2.0, 1.0]])
    assert makespan(times, None) == 5.0
    assert makespan(times, np.array([[0.5, 2.0]])) == 7.0  # the second job arrives at 6
    assert makespan(times, None, repeats=2) == 9.0  # machine 0 ends at 8, and the last job follows


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


def test_slower_links_take_longer_than_the_formula() -> None:
    forward, send = np.ones((2, 3)), np.full((2, 3), 4.0)
    formula = 2 * 3 * 1.0 + 2 * (1.0 + 4.0)
    assert fill_drain_s(forward, forward, send, 1) == 2 * (1 + 3 * 4 + 1) > formula


def test_a_transfer_takes_the_senders_time() -> None:
    one = np.ones((2, 1))
    assert fill_drain_s(one, one, np.array([[0.25], [0.0]]), 1) == 4.25  # forward: stage 0 sends
    assert fill_drain_s(one, one, np.array([[0.0], [0.5]]), 1) == 4.5  # backward: stage 1 sends


def test_agrees_with_a_schedule_played_event_by_event() -> None:
    """Three unequal stages, two slices, two micro-batches, from the orders that the engine runs."""
    from terapipe_ds import schedule

    rng = np.random.default_rng(4)
    forward, backward = rng.random((3, 2)), rng.random((3, 2))
    orders = [list(schedule.build("terapipe", 3, 2, 2).compute_order(stage)) for stage in range(3)]
    ends: dict[tuple[int, str], float] = {}
    clocks = [0.0] * 3
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, slice_id = order[0][0], int(order[0].split(".")[1])
                before = stage + (-1 if kind == "F" else 1)
                if 0 <= before < 3 and (before, order[0]) not in ends:
                    break
                start = max(clocks[stage], ends.get((before, order[0]), 0.0))
                seconds = (forward if kind == "F" else backward)[stage, slice_id]
                clocks[stage] = ends[stage, order.pop(0)] = start + seconds
    assert fill_drain_s(forward, backward, None, 2) == pytest.approx(max(clocks))
