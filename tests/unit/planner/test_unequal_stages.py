"""Unequal stages: the time is exact, the bound holds, and the plan is close to the best of all compositions."""

from collections import Counter

import numpy as np
import pytest
from planner_cases import KINDS, TableCosts, compositions, random_costs, unequal_time

from terapipe_ds.planner import PlannerError, PlanResult, plan_slices
from terapipe_ds.planner.search import pipeline as pipeline_module
from terapipe_ds.planner.search import problem
from terapipe_ds.planner.search.bounds import searches
from terapipe_ds.planner.search.pipeline import cache_parts
from terapipe_ds.planner.slice_program.branch_and_bound import weigh


@pytest.fixture
def climbing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few plans there are, the answer is climbed to."""
    monkeypatch.setattr(problem, "_ALL_PLANS", 0)


def planned(stages: list[TableCosts], length: int, m: int, granularity: int, most: int | None = None) -> PlanResult:
    return plan_slices(stages, length, len(stages), m, granularity, "terapipe", most)


def time_of(stages: list[TableCosts], result: PlanResult, m: int) -> float:
    return unequal_time(stages, list(zip(result.plan.lengths, result.plan.starts, strict=True)), m)


def pipeline(rng: np.random.Generator, length: int, granularity: int, num_stages: int, links: bool) -> list[TableCosts]:
    """A pipeline whose first, last, both or all stages differ from the rest."""
    kind = str(rng.choice([kind for kind in KINDS if kind != "zeros_and_ties"]))
    costs = [random_costs(rng, length, granularity, kind, links) for _ in range(num_stages)]
    if rng.integers(4) == 0:
        return costs
    differs_at_the_end = rng.integers(3) > 0
    return [costs[(k == 0) + 2 * (k == num_stages - 1 and differs_at_the_end)] for k in range(num_stages)]


@pytest.mark.usefixtures("climbing")
def test_against_brute_force() -> None:
    rng = np.random.default_rng(0)
    ratios, bounds = [], []
    for _ in range(120):
        granules, granularity = int(rng.integers(2, 8)), int(rng.integers(1, 9))
        length = max(granularity, granules * granularity - int(rng.integers(0, granularity)))
        num_stages, micro_batches = int(rng.integers(3, 6)), int(rng.integers(1, 4))
        stages = pipeline(rng, length, granularity, num_stages, links=bool(rng.integers(2)))
        most = int(rng.integers(1, 5)) if rng.integers(2) else None
        result = planned(stages, length, micro_batches, granularity, most)
        best = min(unequal_time(stages, x, micro_batches) for x in compositions(length, granularity, most))
        assert result.predicted_s == pytest.approx(time_of(stages, result, micro_batches))
        assert result.lower_bound_s <= best * (1 + 1e-9) and best <= result.predicted_s * (1 + 1e-9)
        assert result.plan.num_slices <= (most or granules)
        if result.optimal:
            assert result.predicted_s == pytest.approx(best, rel=1e-8)
        ratios.append(result.predicted_s / best)
        bounds.append(result.lower_bound_s / best)
    assert np.quantile(ratios, 0.9) < 1.0001 and max(ratios) < 1.05
    assert np.median(bounds) > 0.95


@pytest.mark.parametrize("tables_fit", [True, False])
def test_every_bound_holds_for_every_plan(tables_fit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at their minimum: the bounds' proof is about each plan, and tight where stages are equal."""
    if not tables_fit:
        monkeypatch.setattr(pipeline_module, "MAX_TABLE_ELEMENTS", 0)
    rng = np.random.default_rng(1)
    largest = 0.0
    for _ in range(60):
        granules, granularity = int(rng.integers(1, 7)), int(rng.integers(1, 5))
        length = max(granularity, granules * granularity - int(rng.integers(0, granularity)))
        num_stages, micro_batches = int(rng.integers(3, 6)), int(rng.integers(1, 4))
        costs = pipeline(rng, length, granularity, num_stages, links=bool(rng.integers(2)))
        parts = cache_parts(costs, num_stages, length, granularity)
        for bound in searches(parts, micro_batches, None)[0]:
            for slices in compositions(length, granularity):
                weighed = weigh(bound.every, [-(-tokens // granularity) for tokens, _ in slices])
                ratio = bound.objective(weighed) / unequal_time(costs, slices, micro_batches)
                assert ratio <= 1 + 1e-9
                largest = max(largest, ratio)
    assert largest > (1 - 1e-9 if tables_fit else 0.8)


@pytest.mark.usefixtures("climbing")
def test_tables_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the slowest stage is tabulated; time and bound stay right, and no pair is asked twice."""
    monkeypatch.setattr(pipeline_module, "MAX_TABLE_ELEMENTS", 0)
    rng = np.random.default_rng(3)
    for links in (False, True):
        light, heavy = (random_costs(rng, 30, 4, "measured", links) for _ in range(2))
        heavy.forward = lambda t, p, of=heavy.forward: 2 * of(t, p)  # type: ignore[misc]
        stages = [light, heavy, heavy, heavy]
        result = planned(stages, 30, 2, 4)
        best = min(unequal_time(stages, x, 2) for x in compositions(30, 4))
        assert result.predicted_s == pytest.approx(time_of(stages, result, 2))
        assert 0.7 * best <= result.lower_bound_s <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= result.predicted_s <= 1.02 * best
        for stage in (light, heavy):
            assert max(Counter(stage.asked).values()) == 1
        assert len(light.asked) < len(heavy.asked)


def test_a_bad_time_of_a_stage_that_is_not_tabulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "MAX_TABLE_ELEMENTS", 0)
    light, heavy = (random_costs(np.random.default_rng(3), 32, 4, "measured") for _ in range(2))
    light.backward = lambda t, p: float("nan")
    with pytest.raises(PlannerError, match=r"backward_s\(tokens=\d+, prefix=\d+\) = nan: times are finite"):
        planned([light, heavy], 32, 1, 4)
