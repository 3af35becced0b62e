"""Links below fp32: the study runs for a few steps, counts the bytes of the formats, and judges by the losses."""

import dataclasses
import json
from pathlib import Path

import pytest

from studies import links
from studies.links import WORK, Run


@pytest.mark.full
def test_steps_count_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    work = dataclasses.replace(WORK, sequence_length=32, micro_batch=1, layers=2)
    monkeypatch.setattr(links, "WORK", work)
    report, picture = tmp_path / "links.json", tmp_path / "links.svg"
    with pytest.raises(SystemExit) as ended:
        links.main(["--steps", "3", "--json", str(report), "--picture", str(picture)])
    assert ended.value.code == 0
    runs = {run["name"]: run for run in json.loads(report.read_text())["runs"]}
    tokens, hidden = work.micro_batch * work.sequence_length, work.hidden
    scaled = tokens * (hidden + 4 * hidden // 128)
    assert {name: run["sent_bytes"] for name, run in runs.items()} == {
        "exact": [tokens * hidden * 4] * 2,
        "again": [tokens * hidden * 4] * 2,
        "bf16": [tokens * hidden * 2] * 2,
        "int8": [scaled, tokens * hidden * 2],
        "fp8": [scaled, tokens * hidden * 2],
    }
    first = [run["losses"][0] for run in runs.values()]
    assert first == pytest.approx([first[0]] * 5, rel=1e-3) and len(set(first)) >= 4
    assert picture.read_text().count("<path") > 8
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.parametrize(("held_back", "code"), [(2.019, 0), (2.021, 1)])
def test_one_percent_decides(held_back: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run("exact", (3.0, 2.0), 2.0, (4, 4)), Run("fp8", (3.0, 2.0), held_back, (1, 2))]
    monkeypatch.setattr(links, "measure", lambda work, steps: runs)
    with pytest.raises(SystemExit) as ended:
        links.main([])
    assert ended.value.code == code
