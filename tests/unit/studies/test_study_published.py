"""Published runs: errors of the predictions, and the page that shows them."""

import json
import re
from pathlib import Path

import pytest

from studies import published
from studies.published import cuts, reported_s, size_of_run

PAGE = (Path(__file__).parents[3] / "docs" / "strategy.md").read_text(encoding="utf-8")
BOUND = 0.25


def test_predictions_are_near_the_reports_and_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    published.main([])
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|") and "---" not in line]
    assert len(table) == 3 + 26 + 5 + 5
    for line in table:
        assert line in PAGE
    (median, largest), *_ = (re.findall(r"[\d.]+%", line) for line in lines if line.startswith("median"))
    assert f"The median of the errors is {median}, the largest {largest}." in PAGE
    errors = [float(error) / 100 for error in re.findall(r"([+-][\d.]+)% \|", "\n".join(table))]
    assert len(errors) == 36 and max(map(abs, errors)) < BOUND


def test_the_json_has_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    published.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert [len(found[name]) for name in ("runs", "networks", "schedules")] == [26, 5, 5]
    for row in [row for rows in found.values() for row in rows]:
        assert row["error"] == pytest.approx(row["predicted"] / row["reported"] - 1)
    # more delay and less bandwidth never help
    times = [row["predicted"] for row in found["networks"]]
    assert times == sorted(times)


def test_the_runs_agree_with_their_own_reports() -> None:
    """Seconds and rates that a paper prints side by side follow from one another."""
    runs = {run["name"]: run for run in published.published()["runs"]}
    for run in runs.values():
        devices = int(re.search(r"([\d,]+) [AH]100", run["name"])[1].replace(",", ""))  # type: ignore[index]
        assert run.get("context", 1) * run["grid"][0] * run["grid"][1] * run["grid"][2] == devices
        assert run["source"].startswith(("Narayanan", "Korthikanti", "Smith", "Grattafiori"))
    # Smith et al. print 126 TFLOP/s beside 60.1 s, with recomputation
    nlg = runs["MT-NLG 530B, 2,240 A100"]
    size = size_of_run(nlg["model"], 2048)
    assert reported_s(nlg | {"reported": {"tflops_with_recomputation": 126}}, size, 2240) == pytest.approx(60.1, 0.01)
    # Korthikanti et al. print an MFU of 54.2% beside 39.15 s: three quarters of those FLOPs
    scaled = runs["GPT 530B, 2,240 A100, selective recomputation"]
    rate = {"tflops_with_recomputation": 312 * 0.542 * 4 / 3}
    found_s = reported_s(scaled | {"reported": rate}, size_of_run(scaled["model"], 2048), 2240)
    assert found_s == pytest.approx(39.15, 0.01)
    # a training of 300 billion tokens at 140 TFLOP/s takes 34 days (arXiv 2104.04473)
    gpt = runs["GPT-3 175B, 1,024 A100"]
    steps = 300e9 / (1536 * 2048)
    assert steps * reported_s(gpt, size_of_run(gpt["model"], 2048), 1024) / 86400 == pytest.approx(34, rel=0.03)


def test_cuts() -> None:
    assert cuts(6, 3) == [0, 3, 5, 8]
    assert cuts(4, 6) == [0, 1, 2, 3, 4, 5, 6]  # embedding and head alone, as Llama 3 has them
