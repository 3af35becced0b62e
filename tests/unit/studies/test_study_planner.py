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


def test_the_shapes_are_what_they_say() -> None:
    forward, backward = ([], [])
    for shape in study.SHAPES:
        costs = study.Noisy(1000, shape)
        pairs = [(tokens, prefix) for prefix in range(0, 1000, 50) for tokens in range(50, 1001 - prefix, 50)]
        forward.append([costs.forward_s(*pair) for pair in pairs])
        backward.append([costs.backward_s(*pair) for pair in pairs])
    assert backward[0] == pytest.approx([2 * f for f in forward[0]])
    assert backward[1] == pytest.approx([2 * f for f in forward[1]], rel=0.01) and backward[1] != backward[0]
    assert backward[2] == pytest.approx([1.5 * f + 5e-4 for f in forward[2]])
    assert forward[3] == pytest.approx(forward[0], rel=0.1) and forward[3] != forward[0]
