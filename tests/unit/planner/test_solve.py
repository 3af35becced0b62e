"""The plan is the best of all compositions: compared with every one of them, on thousands of tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import KINDS, TableCosts, compositions, fill_drain_time, random_costs

from studies.slice_program import solve
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.slice_program import least_sums
from terapipe_ds.planner.slice_program.cost_table import equal_time, tabulate


def pairs(plan: SlicePlan) -> list[tuple[int, int]]:
    return list(zip(plan.lengths, plan.starts, strict=True))


def check_best(
    costs: TableCosts, length: int, granularity: int, num_stages: int, micro_batches: int, most: int | None = None
) -> None:
    solution = solve(costs, length, num_stages, micro_batches, granularity, most)
    times = {
        tuple(tokens for tokens, _ in slices): fill_drain_time(costs, slices, num_stages, micro_batches)
        for slices in compositions(length, granularity, most)
    }
    best = min(times.values())
    assert solution.optimal
    assert solution.predicted_s == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert times[solution.plan.lengths] == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert solution.lower_bound_s == pytest.approx(best, rel=1e-9, abs=1e-15)
    slices = pairs(solution.plan)
    assert solution.sum_s == pytest.approx(sum(costs.forward(*x) + costs.backward(*x) for x in slices))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_brute_force(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(settings().max_examples // 2):
        granules, granularity = int(rng.integers(1, 9)), int(rng.integers(1, 65))
        length = max(granularity, granules * granularity - int(rng.integers(0, granularity)))  # a partial last granule
        costs = random_costs(rng, length, granularity, kind, links=bool(rng.integers(2)))
        num_stages, micro_batches = int(rng.choice([1, 2, 3, 4, 8, 16, 48, 96])), int(rng.integers(1, 9))
        most = int(rng.integers(1, granules + 2)) if rng.integers(2) else None
        check_best(costs, length, granularity, num_stages, micro_batches, most)


@pytest.mark.parametrize("num_stages", [2, 96])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1 << 16, 1, 20])
def test_equals_brute_force_in_blocks(kind: str, num_stages: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the programs go through a band: row by row, or in blocks of a few numbers."""
    monkeypatch.setattr(least_sums, "BLOCK_ELEMENTS", block)
    rng = np.random.default_rng(100 + KINDS.index(kind))
    check_best(random_costs(rng, 11, 1, kind), 11, 1, num_stages, 1)
    check_best(random_costs(rng, 11, 1, kind), 11, 1, num_stages, 2, most=4)


@given(st.integers(0, 10**6), st.integers(1, 7), st.sampled_from([1, 2, 8]), st.none() | st.integers(1, 7))
def test_the_fewest_slices_of_equally_good_plans(seed: int, n: int, num_stages: int, most: int | None) -> None:
    """Of all plans with the best time and the same maxima, none has fewer slices (whole numbers: ties are exact)."""
    costs = random_costs(np.random.default_rng(seed), n, 1, "zeros_and_ties")
    solution = solve(costs, n, num_stages, 1, 1, most)
    counts = [
        len(slices)
        for slices in compositions(n, 1, most)
        if fill_drain_time(costs, slices, num_stages, 1) == solution.predicted_s
        and max(costs.forward(*x) for x in slices) == solution.max_forward_s
        and max(costs.backward(*x) for x in slices) == solution.max_backward_s
    ]
    assert solution.plan.num_slices == min(counts)


@pytest.mark.parametrize("kind", ["random", "measured"])
@pytest.mark.parametrize("most", [None, 3])
def test_out_of_work_the_bound_holds(kind: str, most: int | None) -> None:
    proven = 0
    for seed in range(5):
        costs = random_costs(np.random.default_rng(seed), 30, 1, kind)
        best = solve(costs, 30, 24, 1, 1, most).predicted_s
        for work in (1, 20_000, 60_000, 10**9):
            solution = solve(costs, 30, 24, 1, 1, most, max_work=work)
            assert solution.lower_bound_s <= best * (1 + 1e-12) and best <= solution.predicted_s * (1 + 1e-12)
            assert solution.plan.num_slices <= (most or 30)
            assert solution.optimal == (solution.lower_bound_s == solution.predicted_s)
            proven += solution.optimal
        assert solution.optimal
    assert proven < 5 * 4


def test_equal_time_equals_brute_force() -> None:
    rng = np.random.default_rng(7)
    for round_ in range(settings().max_examples // 2):
        granules, granularity = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        length = max(granularity, granules * granularity - int(rng.integers(0, granularity)))
        costs = random_costs(rng, length, granularity, KINDS[round_ % len(KINDS)])
        table = tabulate(costs, length, granularity)
        for count in range(1, granules + 1):
            lengths = equal_time(table, count)
            assert len(lengths) == count

            def largest(slices: list[tuple[int, int]]) -> float:
                return max(costs.forward(*x) + costs.backward(*x) for x in slices)  # noqa: B023

            of_count = [slices for slices in compositions(length, granularity) if len(slices) == count]
            least = min(map(largest, of_count))
            plan = SlicePlan.of_granules(lengths, length, granularity)
            assert largest(pairs(plan)) == pytest.approx(least, rel=1e-12, abs=1e-15)
