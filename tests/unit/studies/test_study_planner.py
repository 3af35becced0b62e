"""The benchmark runs, says what it solved, and its output can be read by programs."""

from __future__ import annotations

import json

import pytest

from studies import planner as study
from terapipe_ds.planner.slice_program.solve import solve


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    study.main(["--granules", "64", "--shapes", "b = 2f", "measured", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["granules"], row["num_stages"], row["shape"]) for row in rows] == [
        (64, 8, "b = 2f"),
        (64, 8, "measured"),
    ]
    for row in rows:
        found = solve(study.Noisy(2048, row["shape"]), 2048, 8, 1, 32)
        assert row["optimal"] is True and row["num_slices"] == found.plan.num_slices
        assert row["seconds"] > 0 and row["calls_s"] > 0 and row["num_programs"] == found.num_programs


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    study.main(["--granules", "16", "--shapes", "b ~ 2f", "b = 1.5f + c"])
    lines = capsys.readouterr().out.splitlines()
    assert "numpy" in lines[0] and "optimal" in lines[1]
    assert [line.split()[:2] for line in lines[2:]] == [["16", k] for k in ("8", "8", "48", "48", "96", "96")]
