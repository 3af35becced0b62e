"""`terapipe strategy`: what it prints, writes and draws, what fixes a choice, and what is refused in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.cli import main
from terapipe_ds.commands.options import Progress
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.planner.strategy import Cluster, Strategy, rank_strategies
from tests.unit.planner.layers.test_measured import profile
from tests.unit.test_cli import refused as refused_command
from tests.unit.test_cli import shown

SMALL = ("--model", "mini", "--device", "v100", "--devices", "4", "--devices-per-node", "2", "--global-batch", "8")
QUESTION: Any = {"global_batch_size": 8, "sequence_length": 1024}
LENGTH = ("--sequence-length", "1024")


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shown(capsys, "strategy", *arguments, "--json"))
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused_command(capsys, "strategy", *arguments)


def test_the_answer_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, *SMALL, *LENGTH)
    strategies = rank_strategies("mini", Cluster("v100", 2, 2), **QUESTION)
    assert [entry["predicted_s"] for entry in document["ranking"]] == [s.predicted_s for s in strategies[:10]]
    best = strategies[0]
    assert document["deepspeed"] == json.loads(json.dumps(best.to_deepspeed()))
    assert document["launch_command"] == best.launch_command("hostfile")
    assert {tuple(row[:3]): tuple(row[3:]) for row in document["placement"]} == best.placement


def test_links_that_are_given_count(capsys: pytest.CaptureFixture[str]) -> None:
    links = ("--within-gb-per-s", "2", "--between-gb-per-s", "0.5")
    cluster = Cluster("v100", 2, 2, within_bytes_per_s=2e9, between_bytes_per_s=0.5e9)
    expected = rank_strategies("mini", cluster, **QUESTION)[0].predicted_s
    assert as_json(capsys, *SMALL, *LENGTH, *links)["strategy"]["predicted_s"] == expected


def test_what_a_person_reads(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = rank_strategies("mini", Cluster("v100", 2, 2), **QUESTION)
    text, best = shown(capsys, "strategy", *SMALL, *LENGTH), strategies[0]
    lines = text.splitlines()
    assert lines[0] == "mini in float16 on 2 x 2 x NVIDIA V100 SXM2 16 GB"
    assert f"  step        {best.predicted_s:.4g} s predicted, {8 * 1024 / best.predicted_s:,.0f} tokens/s" in lines
    assert best.launch_command("hostfile") in text
    assert sum(line[:4].strip().isdigit() for line in lines[2:]) == min(10, len(strategies))


def test_the_table_says_what_differs_from_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = rank_strategies("mini", Cluster("v100", 2, 2), **QUESTION)[:10]
    text, best = shown(capsys, "strategy", *SMALL, *LENGTH), strategies[0]
    header = next(i for i, line in enumerate(text.splitlines()) if "what differs" in line)
    for row, strategy in zip(text.splitlines()[header + 1 :], strategies, strict=False):
        for name, axis in (("stages", "pipe"), ("replicas", "data"), ("tensor ranks", "model")):
            size = strategy.grid[axis]
            assert (f" {name} {size}" in row) == (size != best.grid[axis])
        is_other_batch = (strategy.accumulation, strategy.micro_batch_size) != (
            best.accumulation,
            best.micro_batch_size,
        )
        assert (f"micro-batches {strategy.accumulation} of {strategy.micro_batch_size}" in row) == is_other_batch


def test_files_run_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, strategy_out = tmp_path / "ds.json", tmp_path / "strategy.json"
    text = shown(capsys, "strategy", *SMALL, *LENGTH, "--out", str(out), "--strategy-out", str(strategy_out))
    strategy = Strategy.from_json(strategy_out.read_text())
    assert json.loads(out.read_text()) == json.loads(json.dumps(strategy.to_deepspeed()))
    section = TeraPipeConfig.from_deepspeed(json.loads(out.read_text()))
    assert list(section.plan_for(1024).lengths) == strategy.slices
    named = {"terapipe": json.loads(text[text.index('"terapipe": ') :].splitlines()[0].removeprefix('"terapipe": '))}
    config = strategy.to_deepspeed() | named
    assert TeraPipeConfig.from_deepspeed(config).plan_for(1024) == section.plan_for(1024)
    assert "--deepspeed_config ds.json" in text


@pytest.mark.parametrize(
    ("option", "value", "axis"),
    [("--stages", 2, "pipe"), ("--tensor-parallel", 2, "model"), ("--data-parallel", 1, "data")],
)
def test_degrees_can_be_fixed(capsys: pytest.CaptureFixture[str], option: str, value: int, axis: str) -> None:
    document = as_json(capsys, *SMALL, *LENGTH, option, str(value))
    assert {entry["grid"][axis] for entry in document["ranking"]} == {value}


def test_a_schedule_can_be_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, *SMALL, *LENGTH, "--schedule", "gpipe")
    assert {entry["schedule"] for entry in document["ranking"]} == {"gpipe"}


def test_a_deepspeed_json_says_batch_precision_and_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, cluster = tmp_path / "ds.json", SMALL[:-2]
    section = {"enabled": True, "planner": {"memory_limit_gb": 9.0}}
    path.write_text(json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}, "terapipe": section}))
    of_file = as_json(capsys, *cluster, *LENGTH, "--config", str(path))
    assert of_file == as_json(capsys, *SMALL, *LENGTH, "--dtype", "fp16", "--memory-limit-gb", "9")
    assert as_json(capsys, *SMALL[:-1], "4", *LENGTH, "--config", str(path))["deepspeed"]["train_batch_size"] == 4


def test_measured_profiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    profile().save(one)
    length = profile().key.sequence_length
    cluster = ("--device", "v100", "--devices", "2", "--devices-per-node", "2", "--global-batch", "4")
    document = as_json(capsys, "--profile", str(one), *cluster)
    assert sum(document["strategy"]["slices"]) == length
    assert "--device is missing" in refused(capsys, "--profile", str(one), *cluster[2:])
    assert "give one of them" in refused(capsys, "--profile", str(one), "--model", "mini", *cluster)
    profile().save(two)
    assert "give one" in refused(capsys, "--profile", str(one), "--profile", str(two), *cluster)
    twice = refused_command(capsys, "plan", "--profile", str(one), "--profile", str(two), "--stages", "2")
    assert "--profile is given twice" in twice


def test_a_config_json_has_its_own_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 512}))
    document = as_json(capsys, "--model", str(tmp_path), *SMALL[2:])
    assert sum(document["strategy"]["slices"]) == 512
    assert "No such file or directory; give" in refused(capsys, "--model", str(tmp_path / "none.json"), *SMALL[2:])


def test_the_picture_has_devices_layers_and_the_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "strategy.svg"
    words = ("--stages", "2", "--data-parallel", "2", "--schedule", "seq1f1b", "--picture", str(path))
    document = as_json(capsys, *SMALL, *LENGTH, *words)
    text = path.read_text()
    start, middle, stop = document["strategy"]["partition"]
    for label in ("node 0", "node 1", f"stage 0: {middle - start}", f"stage 1: {stop - middle}", "replica 1"):
        assert f"<!-- {label} -->" in text or label in text
    assert document["strategy"]["schedule"] in text


def test_a_search_that_is_stopped_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while candidates are replayed: there is a best one, and the rest is not known."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    calls = []

    def interrupted(self: object, what: str, done: int, of: int) -> None:
        calls.append(what)
        if what == "finalists":
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "_show", interrupted)
    assert main(["strategy", *SMALL, *LENGTH, "--json"]) == 0
    output = capsys.readouterr()
    assert "stopped; this is the best until then" in output.err
    assert json.loads(output.out)["strategy"]["is_complete"] is False
    assert "finalists" in calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--micro-batches", "2"), "unrecognized arguments: --micro-batches 2"),
        (("--devices-per-node", "3"), "give a multiple of 3, such as 3, or --devices-per-node 2"),
        (("--stages", "3"), "give 2, the nearest that works"),
        (("--tensor-parallel", "3"), "the nearest that works here"),
        (("--memory-limit-gb", "0.001"), "give memory_limit_gb >="),
        (("--schedule", "chimera"), "strategies have"),
    ],
)
def test_refusals_name_what_works(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert message in refused(capsys, *SMALL, *LENGTH, *words)


def test_all_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--model", "mini", "--device", "v100", "--stages", "2")
    assert "unrecognized arguments: --global-batch 8" in refused_command(capsys, "plan", *rest, "--global-batch", "8")
    assert "--global-batch is missing" in refused(capsys, *SMALL[:-2])
    text = refused(capsys, "--model", "mini", "--devices", "2")
    assert "--device is missing" in text and "--global-batch is missing" in text
    assert "arguments are required: --devices" in refused(capsys, *SMALL[:4])


def test_plan_with_devices_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *LENGTH, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == as_json(capsys, *SMALL, *LENGTH)
    assert output.err == "terapipe: note: `terapipe plan --devices` is now `terapipe strategy`, which runs\n"
