"""The study of the paper: its published numbers, and the costs that are fitted to them."""

import json
import math
from pathlib import Path

import pytest

from studies import paper
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("left_out", range(7))
def test_figure_6b_with_a_point_left_out(left_out: int) -> None:
    """The prediction does not hang on one of the seven points."""
    points, published_s = figure_6b()
    missing = points.pop(left_out)
    costs = ParametricCosts.fit(points, per_pair_s=PAIR_S)
    assert costs.total_s(PUBLISHED_PLAN, STAGES, MICRO_BATCHES) == pytest.approx(published_s, rel=0.05)
    assert abs(costs.errors([missing])[0]) < 0.08


@pytest.mark.parametrize("numbers", [(2, 1, 0.0), (2, 1, math.nan), (0, 1, 1.0)])
def test_totals_that_cannot_be(numbers: tuple[int, int, float]) -> None:
    with pytest.raises(ParametricCostError, match="give positive, finite seconds and counts"):
        StepTotal(SlicePlan([8]), *numbers)
    with pytest.raises(ParametricCostError, match="0 totals.*give at least one total"):
        ParametricCosts.fit([])


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


# --- the study


def test_the_shipped_numbers_are_the_published_ones() -> None:
    shipped, golden = json.loads(paper.FILE.read_text()), json.loads(GOLDEN.read_text())
    assert shipped["paper"] == golden["paper"]
    for name in ("table1_settings", "main_results", "ablation_uniform_vs_dp", "longer_sequences"):
        assert shipped[name] == golden[name]
        assert all(row.get("source") or row.get("source_table1") for row in shipped[name])


def test_schemes() -> None:
    text = "[(1, [120] * 4 + [112] * 6 + [104] * 8 + [64])] * 2"
    assert paper.parse_scheme(text) == (SlicePlan([120] * 4 + [112] * 6 + [104] * 8 + [64]), 2)
    assert paper.parse_scheme("[(1, [704, 688, 656])] * 32") == (SlicePlan([704, 688, 656]), 32)
    with pytest.raises(ValueError, match="expected"):
        paper.parse_scheme("[(2, [704, 688, 656])] * 32")


def test_settings_by_hand() -> None:
    nine, five = paper.read_setting(9), paper.read_setting(5)
    assert (nine.num_stages, nine.scheme.num_micro_batches, nine.scheme.latency_s) == (96, 2, 1.481)
    assert [t.latency_s for t in nine.uniform] == [9.99, 2.902, 1.892, 1.547, 1.593, 2.227, 3.252]
    assert (nine.heads, five.heads) == (24, 5)
    assert five.longer[-1] == (8192, 2, 4.978, 0.636)
    # 7.4 ps of FLOPs and 23.7 ps of bytes forward
    assert paper.unfused_pair_s(1, 128) == pytest.approx(3 * 31.15e-12, rel=1e-3)


# Largest errors: of times in the fit, of the published plan where it is not, of our plan's time against the published.
LIMITS = {9: (0.04, 0.04, 0.05), 8: (0.08, 0.05, 0.05), 5: (0.02, 0.0, 0.16)}


@pytest.mark.parametrize("setting", LIMITS)
def test_published_against_simulated(setting: int) -> None:
    _, rows = paper.reproduce(setting)
    for kind, limit in zip(("fitted", "predicted", "planned"), LIMITS[setting], strict=True):
        assert all(abs(row.error) <= limit for row in rows if row.kind == kind), paper.table(rows)
    published = next(row for row in rows if row.plan.startswith("published plan"))
    ours = next(row for row in rows if row.kind == "planned")
    assert ours.sequence_length == sum(ours.lengths) == 2048
    assert ours.simulated_s <= published.simulated_s
    assert all(length % 8 == 0 for row in rows if row.kind == "planned" for length in row.lengths)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert paper.main(["--setting", "9", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "| 9 | 2048 | published plan, 19 slices | 1.481 | " in text and "| predicted |" in text
    rows = json.loads(out.read_text())
    assert len(rows) == 9 and rows[0]["lengths"] == [2048] and abs(rows[0]["error"]) < 0.01
