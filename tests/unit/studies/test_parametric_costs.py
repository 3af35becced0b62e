from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from studies.parametric_costs import ParametricCostError, ParametricCosts, StepTotal
from terapipe_ds.plan import SlicePlan

GOLDEN = Path(__file__).parents[2] / "golden" / "terapipe_published.json"
STAGES, MICRO_BATCHES, LENGTH = 96, 2, 2048  # setting 9
# Attention without a fused kernel on a V100, forward and backward: 24 heads of 128 per rank, 4 FLOPs each at 55 % of
# 125 TFLOP/s and 16 bytes at 75 % of 900 GB/s.
PAIR_S = 3 * 24 * (4 * 128 / (0.55 * 125e12) + 16 / (0.75 * 900e9))
PUBLISHED_PLAN = SlicePlan([120] * 4 + [112] * 6 + [104] * 8 + [64])


def figure_6b() -> tuple[list[StepTotal], float]:
    """The uniform points of figure 6b, and the step time of the published plan."""
    rows = [row for row in json.loads(GOLDEN.read_text())["ablation_uniform_vs_dp"] if row["fig"] == "6b"]
    latencies = {row["slices_per_sequence"]: row["latency_s"] for row in rows}
    best = latencies.pop("DP")
    points = [StepTotal(SlicePlan.equal(LENGTH, s), STAGES, MICRO_BATCHES, t) for s, t in latencies.items()]
    return points, best


def test_figure_6b_from_its_uniform_points_alone() -> None:
    points, published_s = figure_6b()
    assert [t.plan.num_slices for t in points] == [1, 4, 8, 16, 32, 64, 128]
    costs = ParametricCosts.fit(points, per_pair_s=PAIR_S)
    assert max(map(abs, costs.errors(points))) < 0.04
    predicted_s = costs.total_s(PUBLISHED_PLAN, STAGES, MICRO_BATCHES)
    assert published_s == 1.481
    assert predicted_s == pytest.approx(published_s, rel=0.04)
    assert costs.per_pair_s == PAIR_S


@pytest.mark.parametrize("left_out", range(7))
def test_figure_6b_with_a_point_left_out(left_out: int) -> None:
    """The prediction does not hang on one of the seven points."""
    points, published_s = figure_6b()
    missing = points.pop(left_out)
    costs = ParametricCosts.fit(points, per_pair_s=PAIR_S)
    assert costs.total_s(PUBLISHED_PLAN, STAGES, MICRO_BATCHES) == pytest.approx(published_s, rel=0.05)
    assert abs(costs.errors([missing])[0]) < 0.08


def test_totals_by_hand() -> None:
    """No floor: work = 1 + 2 i + 3 i (i + j) + 4 j. Slices of 2 and 1 tokens: 17 and 1 + 2 + 9 + 8 = 20."""
    costs = ParametricCosts(0.0, 1.0, 2.0, 3.0, 4.0, backward_ratio=3.0)
    assert costs.both_s(2, 0) == pytest.approx(17) and costs.both_s(1, 2) == pytest.approx(20)
    assert costs.forward_s(1, 2) == pytest.approx(5) and costs.backward_s(1, 2) == pytest.approx(15)
    assert costs.total_s(SlicePlan([2, 1]), 4, 5) == pytest.approx(5 * 37 + 3 * 20)
    assert costs.errors([StepTotal(SlicePlan([2, 1]), 4, 5, 245 / 1.1)]) == pytest.approx([0.1])


def test_the_floor_hides_small_work() -> None:
    costs = ParametricCosts(1.0, per_token_s=0.01)
    assert costs.both_s(1, 0) == pytest.approx(1.0, rel=1e-6)
    assert costs.both_s(100, 0) == pytest.approx(2**0.25)
    assert costs.both_s(10_000, 0) == pytest.approx(100.0, rel=1e-6)


def test_bad_input() -> None:
    with pytest.raises(ParametricCostError, match="0 totals.*give at least one total"):
        ParametricCosts.fit([])
    with pytest.raises(ParametricCostError, match="per_pair_s = -1.0"):
        ParametricCosts.fit([StepTotal(SlicePlan([8]), 2, 1, 1.0)], per_pair_s=-1.0)
    for changes, told in (
        ((2, 1, 0.0), "positive, finite"),
        ((2, 1, math.nan), "finite seconds"),
        ((0, 1, 1.0), "counts"),
    ):
        with pytest.raises(ParametricCostError, match=told):
            StepTotal(SlicePlan([8]), *changes)
    one = ParametricCosts.fit([StepTotal(SlicePlan([8]), 2, 1, 1.0)])
    assert one.total_s(SlicePlan([8]), 2, 1) == pytest.approx(1.0)
