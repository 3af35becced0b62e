from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import paper
from terapipe_ds.plan import SlicePlan

GOLDEN = Path(__file__).parents[2] / "golden" / "terapipe_published.json"


def test_the_shipped_numbers_are_the_published_ones() -> None:
    shipped, golden = json.loads(paper.FILE.read_text()), json.loads(GOLDEN.read_text())
    assert shipped["paper"] == golden["paper"]
    for name in ("table1_settings", "main_results", "ablation_uniform_vs_dp", "longer_sequences"):
        assert shipped[name] == [row for row in golden[name] if row["setting"] in (5, 8, 9)]
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
