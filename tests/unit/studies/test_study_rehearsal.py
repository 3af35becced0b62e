"""The rehearsal with layers that sleep: rows, tables, and a run of two ranks."""

import argparse
import json
from pathlib import Path

import pytest

from studies import rehearsal
from studies.rehearsal import finished, runs_of, table

ASKED = {"settings": [9], "micro_batches": [1, 2], "slices": [4, 8], "slice_ms": 30.0, "steps": 1, "trace": None}


def asked(*schedules: str) -> argparse.Namespace:
    return argparse.Namespace(**ASKED, schedules=list(schedules))


def test_the_shortest_slice_lasts_as_long_as_asked() -> None:
    runs = list(runs_of(asked("stock", "seq1f1b", "seq1f1b-interleaved-zb:4", "chimera-seq"), 3))
    names = ("stock", 1), *((name, s) for name in ("seq1f1b", "seq1f1b-interleaved-zb") for s in (4, 8))
    assert [(run.schedule, run.num_micro_batches, run.num_slices) for run in runs] == [
        (name, m, slices) for m in (1, 2) for name, slices in names
    ], "a bidirectional schedule has no odd number of stages"
    costs = runs[2].costs
    plan = runs[2].plan
    both = [costs.forward_s(n, p) + costs.backward_s(n, p) for n, p in zip(plan.lengths, plan.starts, strict=True)]
    assert plan.num_slices == 8 and min(both) == pytest.approx(0.03)
    quarter = runs[-1]
    assert (quarter.num_layers, quarter.costs.share) == (12, 0.25)
    for span in zip(plan.lengths, plan.starts, strict=True):
        assert quarter.costs.backward_s(*span) == pytest.approx(costs.backward_s(*span) / 4)
        assert 0 < costs.weight_s(*span) <= costs.backward_s(*span) / 2


def test_speed_ups_are_over_the_stock_engine_of_the_same_batch() -> None:
    runs = list(runs_of(asked("stock", "seq1f1b"), 4))
    others = {"least_s": 1.0, "processor_s": 0.1, "core_waits_s": 0.2}
    times = [{"step_s": 2.0 * run.simulated_s(), **others} for run in runs]
    rows = finished(list(zip(runs, times, strict=True)))
    for row in rows:
        assert row["ratio"] == pytest.approx(2) and row["speed_up"] == pytest.approx(row["simulated_speed_up"])
        assert (row["speed_up"] == 1) == (row["name"] == "DeepSpeed")
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(rows) and "| seq1f1b, 8 slices |" in lines[4] and "| 2.000 |" in lines[4]
    assert finished([(runs[1], times[1])])[0]["speed_up"] is None


def test_ranks_sleep_at_least_as_long_as_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Split backwards too: with W apart and on the first part, whose inputs need no gradient."""
    path = tmp_path / "rows.json"
    words = "--stages 2 --micro-batches 1 --settings 9 --schedules stock,seq1f1b-interleaved-zb --slices 4 --steps 1"
    rehearsal.main([*words.split(), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["schedule"] for row in rows] == ["stock", "seq1f1b-interleaved-zb"]
    assert all(row["ratio"] > 0.999 for row in rows), "no sleep is left out"
    assert all(row["processor_per_slot_s"] > 1e-4 and row["core_wait_per_slot_s"] > 0 for row in rows)
    assert "| seq1f1b-interleaved-zb, 2 parts, 4 slices |" in capsys.readouterr().out
