"""`terapipe strategy`: what it prints, writes and draws, what fixes a choice, and what is refused in one line."""

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.cli import main
from terapipe_ds.commands.options import Progress
from terapipe_ds.commands.verify import VerifyOptions
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.devices import FILE
from terapipe_ds.planner.strategy import Cluster, Strategy, rank_strategies
from tests.unit.planner.layers.test_measured import profile
from tests.unit.test_cli import refused as refused_command
from tests.unit.test_cli import shown

SMALL = ("--model", "mini", "--device", "v100", "--devices", "4", "--devices-per-node", "2", "--global-batch", "4")
LENGTH = ("--sequence-length", "256")
FEW = (*SMALL, *LENGTH, "--stages", "2", "--data-parallel", "2", "--schedule", "seq1f1b")
CLUSTER = Cluster("v100", 2, 2)
FIXED: Any = {"global_batch_size": 4, "sequence_length": 256, "stages": 2, "data_parallel": 2, "schedule": "seq1f1b"}


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shown(capsys, "strategy", *arguments, "--json"))
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused_command(capsys, "strategy", *arguments)


def test_one_node_needs_no_hostfile(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [as_json(capsys, *FEW, "--devices-per-node", count)["launch_command"].split() for count in ("4", "2")]
    assert ["--hostfile" in command for command in commands] == [False, True]
    assert [command[command.index("--num_gpus") + 1] for command in commands] == ["4", "2"]


def test_the_answer_is_that_of_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    text = shown(capsys, "strategy", *SMALL[:-1], "2", *LENGTH, "--json", str(path))
    document = json.loads(path.read_text())
    strategies = rank_strategies("mini", CLUSTER, global_batch_size=2, sequence_length=256)
    assert [entry["predicted_s"] for entry in document["ranking"]] == [s.predicted_s for s in strategies[:10]]
    best = strategies[0]
    assert document["deepspeed"] == json.loads(json.dumps(best.to_deepspeed()))
    assert document["launch_command"] == best.launch_command("hostfile")
    assert {tuple(row[:3]): tuple(row[3:]) for row in document["placement"]} == best.placement
    # a person reads the same
    lines = text.splitlines()
    assert lines[0] == "mini in float16 on 2 x 2 x NVIDIA V100 SXM2 16 GB"
    assert f"  step        {best.predicted_s:.4g} s predicted, {2 * 256 / best.predicted_s:,.0f} tokens/s" in lines
    assert f"lower bound {best.lower_bound_s:.4g} s, gap {best.gap:.1%}" in text
    assert f"MFU {best.mfu:.1%}, {2 * 256 / best.predicted_s / 4:,.0f} tokens/s per device" in text
    assert "limit 14.4 GiB, 0.9 of the card's 16" in text
    assert best.launch_command("hostfile") in text
    assert sum(line[:4].strip().isdigit() for line in lines[2:]) == min(10, len(strategies))
    # in a table with a column for each choice that differs
    header = next(i for i, line in enumerate(lines) if "ratio" in line)
    names = lines[header].replace("first axis", "first_axis").split()
    sizes = {"PP": "pipe", "DP": "data", "TP": "model", "SP": "sequence"}
    for name, axis in sizes.items():
        assert (name in names) == (len({strategy.grid.get(axis, 1) for strategy in strategies[:10]}) > 1)
    for row, strategy in zip(lines[header + 1 :], strategies[:10], strict=False):
        cells = row.split()
        assert cells[1:3] == [f"{strategy.predicted_s:.4g}", "s"]
        for name, axis in sizes.items():  # the header has no place number, and a time has its unit
            assert name not in names or cells[names.index(name) + 2] == str(strategy.grid.get(axis, 1))


def test_links_that_are_given_count(capsys: pytest.CaptureFixture[str]) -> None:
    links = ("--within-gb-per-s", "2", "--between-gb-per-s", "0.5")
    cluster = Cluster("v100", 2, 2, within_bytes_per_s=2e9, between_bytes_per_s=0.5e9)
    expected = rank_strategies("mini", cluster, **FIXED)[0].predicted_s
    assert as_json(capsys, *FEW, *links)["strategy"]["predicted_s"] == expected
    slow = ("--model", "nano", "--sequence-length", "4096", "--between-gb-per-s", "0.01")  # a pipeline stays in a node
    assert "  module: build it on terapipe_ds.topology_of(" in shown(capsys, "strategy", *FEW, *slow)


@pytest.mark.parametrize(("per_node", "name", "where"), [
    ("4", "between", "all devices are on one node"), ("4", "node", "all devices are on one node"),
    ("1", "within", "each node has one device"),
])  # fmt: skip
def test_links_that_nothing_takes_are_named(
    capsys: pytest.CaptureFixture[str], per_node: str, name: str, where: str
) -> None:
    assert main(("strategy", *FEW, "--devices-per-node", per_node, f"--{name}-gb-per-s", "9")) == 0
    assert f"note: --{name}-gb-per-s has no effect: {where}\n" in capsys.readouterr().err


def test_files_run_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, strategy_out = tmp_path / "ds.json", tmp_path / "strategy.json"
    text = shown(capsys, "strategy", *FEW, "--out", str(out), "--strategy-out", str(strategy_out))
    strategy = Strategy.from_json(strategy_out.read_text())
    assert json.loads(out.read_text()) == json.loads(json.dumps(strategy.to_deepspeed()))
    section = TeraPipeConfig.from_deepspeed(json.loads(out.read_text()))
    assert list(section.plan_for(256).lengths) == strategy.slices
    named = {"terapipe": json.loads(text[text.index('"terapipe": ') :].splitlines()[0].removeprefix('"terapipe": '))}
    config = strategy.to_deepspeed() | named
    assert TeraPipeConfig.from_deepspeed(config).plan_for(256) == section.plan_for(256)
    (tmp_path / "own.json").write_text(json.dumps({k: v for k, v in config.items() if "batch" not in k}))
    keys = VerifyOptions(config=str(tmp_path / "own.json"), model="mini").settings()[1]
    assert keys.number("train_micro_batch_size_per_gpu") == strategy.micro_batch_size > 1  # of the strategy's file
    assert f"--deepspeed_config {out}" in text


@pytest.mark.parametrize("words", [["512,1024,512"], ["512", "1024", "512"]])
def test_verify_takes_lengths_with_commas_as_the_other_commands(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    VerifyOptions.add_to(parser)
    arguments = parser.parse_args(["--config", "ds.json", "--model", "mini", "--slices", *words])
    assert VerifyOptions.read(arguments).slices == (512, 1024, 512)


@pytest.mark.parametrize(
    ("option", "value", "axis"),
    [("--stages", 2, "pipe"), ("--tensor-parallel", 2, "model"), ("--data-parallel", 1, "data")],
)
def test_degrees_and_schedules_are_fixed(
    capsys: pytest.CaptureFixture[str], option: str, value: int, axis: str
) -> None:
    document = as_json(capsys, *SMALL, *LENGTH, "--schedule", "gpipe", option, str(value))
    assert {(entry["grid"][axis], entry["schedule"]) for entry in document["ranking"]} == {(value, "gpipe")}


def test_a_deepspeed_json_says_batch_precision_and_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, cluster = tmp_path / "ds.json", SMALL[:-2]
    section = {"enabled": True, "planner": {"memory_limit_gb": 2.9}}
    path.write_text(json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}, "terapipe": section}))
    of_file = as_json(capsys, *cluster, *FEW[len(SMALL) :], "--config", str(path))
    assert of_file == as_json(capsys, *FEW, "--global-batch", "8", "--dtype", "fp16", "--memory-limit-gb", "2.9")
    assert as_json(capsys, *FEW, "--config", str(path))["deepspeed"]["train_batch_size"] == 4
    assert "(2.9 GB)" in shown(capsys, "strategy", *FEW, "--config", str(path))
    path.write_text('{"train_batch_size": 8, "torch_autocast": {"enabled": true}}')
    assert "give --dtype, or take it out" in refused(capsys, *FEW, "--config", str(path))
    assert main(["strategy", *FEW, "--config", str(path), "--dtype", "fp16"]) == 0
    captured = capsys.readouterr()
    assert "mini in float16" in captured.out
    assert "torch_autocast.enabled = True" in captured.err
    path.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}')
    assert "bfloat16 has zero_optimization.stage = 0; give 1" in refused(
        capsys, *FEW, "--config", str(path), "--device", "a100"
    )


@pytest.mark.parametrize(
    ("keys", "has"),
    [
        ({"zero_optimization": {"stage": 1}}, {"zero_stage": 1}),
        ({"zero_optimization": {"stage": 0}}, {"zero_stage": 0}),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {"offload_optimizer": True}),
        ({"train_micro_batch_size_per_gpu": 2}, {"micro_batch_size": 2}),
        ({"gradient_accumulation_steps": 4}, {"accumulation": 4}),
        ({"pipeline": {"stages": 4}}, {"pipe": 4}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"model": 2}),
        ({"sequence_parallel_size": 1}, {"sequence": 1}),
        ({"terapipe": {"offload_activations": True}}, {"offload_activations": True}),
        ({"terapipe": {"schedule": "gpipe", "chunks_per_stage": 1}}, {"schedule": "gpipe"}),
    ],
)
def test_a_deepspeed_json_fixes_what_the_search_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: dict[str, Any], has: dict[str, Any]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}} | keys))
    document = as_json(capsys, *SMALL, *LENGTH, "--config", str(tmp_path / "ds.json"))
    assert len(document["ranking"]) > 1
    ranking = [one | {"sequence": 1} | one["grid"] for one in document["ranking"]]
    assert [{name: one[name] for name in has} for one in ranking] == [has] * len(ranking)


def test_a_deepspeed_json_with_sequence_ranks_has_them_in_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text('{"sequence_parallel_size": 2}')
    answer = as_json(capsys, *SMALL, *LENGTH, "--config", str(tmp_path / "ds.json"))["deepspeed"]
    assert (answer["sequence_parallel_size"], answer["train_batch_size"]) == (2, 4)


def test_keys_of_a_deepspeed_json_that_the_answer_lacks_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    zero = {"load_from_fp32_weights": True, "reduce_scatter": False, "round_robin_gradients": False}
    off = {"adam_w_mode": False, "bias_correction": False, "amsgrad": False}
    keys = {"gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": off}, "steps_per_print": "auto"}
    keys |= {"zero_optimization": zero, "bfloat16": {"enabled": False}}
    section = {"enabled": True, "recompute": "full", "partition": [0, 1, 3], "verify": None}
    (tmp_path / "ds.json").write_text(json.dumps(keys | {"terapipe": section}))
    assert main(["strategy", *FEW, "--config", str(tmp_path / "ds.json")]) == 0
    named = (
        "gradient_clipping = 0.0, optimizer.type = 'SGD', optimizer.params.adam_w_mode = False, "
        "optimizer.params.bias_correction = False, zero_optimization.reduce_scatter = False, "
        "terapipe.recompute = 'full', terapipe.partition = [0, 1, 3]"
    )
    assert f"neither keeps nor counts of --config: {named}\n" in capsys.readouterr().err
    absent = {"zero_optimization": {"offload_optimizer": {"device": "none"}}, "sequence_parallel_size": 1}
    absent |= {"gradient_clipping": 1.0, "optimizer": {"params": {"adam_w_mode": True}}}  # DeepSpeed's own
    absent |= {"tensor_parallel": {"autotp_size": 0}, "pipeline": None, "train_micro_batch_size_per_gpu": None}
    (tmp_path / "ds.json").write_text(json.dumps(absent | {"terapipe": {"planner": {"memory_limit_gb": 10}}}))
    assert main(["strategy", *FEW, "--config", str(tmp_path / "ds.json")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, "no strategy has train_micro_batch_size_per_gpu = 3; give 2,"),
        ({"gradient_accumulation_steps": 3}, "no strategy has gradient_accumulation_steps = 3; give 2,"),
        ({"zero_optimization": {"stage": 2}}, "stage = 2: DeepSpeed's pipelines take 0 and 1; give one"),
        (
            {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3},
            "goes with train_micro_batch_size_per_gpu = 3 and gradient_accumulation_steps = 3; give --global-batch 9,",
        ),
    ],
)
def test_a_deepspeed_json_that_no_strategy_obeys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    assert told in refused(capsys, *SMALL, *LENGTH, "--config", str(tmp_path / "ds.json"))


def test_measured_profiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    profile().save(one)
    length = profile().key.sequence_length
    cluster = ("--device", "v100", "--devices", "2", "--devices-per-node", "2", "--global-batch", "4")
    document = as_json(capsys, "--profile", str(one), *cluster)
    assert document["strategy"]["sequence_length"] == length
    assert "--device is missing" in refused(capsys, "--profile", str(one), *cluster[2:])
    assert "give one of them" in refused(capsys, "--profile", str(one), "--model", "mini", *cluster)
    # with one stage there is no link to measure
    profile(links=False, micro_batch=2).save(two)
    other = as_json(capsys, "--profile", str(two), "--profile", str(one), *cluster, "--stages", "2")
    assert other == as_json(capsys, "--profile", str(one), "--profile", str(two), *cluster, "--stages", "2")
    profile().save(two)
    assert "give one" in refused(capsys, "--profile", str(one), "--profile", str(two), *cluster)
    twice = refused_command(capsys, "plan", "--profile", str(one), "--profile", str(two), "--stages", "2")
    assert "--profile is given twice" in twice


def test_a_config_json_has_its_own_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 512}))
    document = as_json(capsys, "--model", str(tmp_path), *SMALL[2:])
    assert document["strategy"]["sequence_length"] == 512
    assert "No such file or directory; give" in refused(capsys, "--model", str(tmp_path / "none.json"), *SMALL[2:])


def test_the_picture_has_devices_layers_and_the_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "strategy.svg"
    document = as_json(capsys, *FEW, "--picture", str(path))
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

    monkeypatch.setattr(Progress, "callback", interrupted)
    assert main(["strategy", *FEW, "--json"]) == 0
    output = capsys.readouterr()
    assert "stopped; this is the best until then" in output.err
    assert json.loads(output.out)["strategy"]["is_complete"] is False
    assert "finalists" in calls


def rows_on_a_terminal(text: str, columns: int) -> list[str]:
    """Return the rows that a terminal of that width shows."""
    rows, column, wraps = [""], 0, True
    for code in re.findall(r"\x1b\[[?0-9]*[A-Za-z]|.", text, re.DOTALL):
        if code == "\r":
            column = 0
        elif code == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif code in ("\x1b[?7l", "\x1b[?7h"):
            wraps = code.endswith("h")
        elif column < columns or wraps:
            if column == columns:
                rows.append("")
                column = 0
            rows[-1] = rows[-1][:column] + code + rows[-1][column + 1 :]
            column += 1
    return rows


def test_a_bar_leaves_nothing_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["strategy", *FEW, "--json"]) == 0
    text = capsys.readouterr().err
    assert "(Ctrl-C: the best so far)" in text
    for columns in (20, 40, 120):
        assert rows_on_a_terminal(text, columns) == [""]


def test_a_time_limit_and_sigterm_end_a_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["strategy", *FEW, "--time-limit", "0.000001", "--json"]) == 2
    assert "give it more time" in capsys.readouterr().err
    before = signal.getsignal(signal.SIGTERM)

    def terminated(self: object, what: str, done: int, of: int) -> None:
        if what == "finalists":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "callback", terminated)
    assert main(["strategy", *FEW, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"]["is_complete"] is False
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_time_limit_ends_a_long_replay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never_asks(self: object, what: str, done: int, of: int) -> None:
        if what == "finalists":
            time.sleep(60)
            pytest.fail("the limit waited for the replay")

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(Progress, "callback", never_asks)
    assert main(["strategy", *FEW, "--time-limit", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"]["is_complete"] is False
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_interrupt_leaves_out_kinds_of_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object, score: object) -> dict[str, list[int]]:
        raise KeyboardInterrupt

    whole = as_json(capsys, *FEW)["strategy"]
    monkeypatch.setattr("terapipe_ds.planner.strategy.priced.Priced.peak_by_kind", interrupted)
    assert as_json(capsys, *FEW)["strategy"] == whole | {"memory_by_kind": {}}
    assert "GiB by stage" in shown(capsys, "strategy", *FEW)


def test_progress_on_a_pipe_is_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe_ds.commands.options._LINE_EVERY_S", 0.0)
    with Progress() as progress:
        progress.callback("cuts", 1, 4)
    assert capsys.readouterr().err == "terapipe: cuts, 25% of this phase\n"


def test_a_strategy_is_compared_with_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    best, other, *_ = rank_strategies("mini", CLUSTER, **FIXED)
    path.write_text(other.model_copy(update={"predicted_s": 1.0}).to_json())
    answer = tmp_path / "answer.json"
    lines = shown(capsys, "strategy", *FEW, "--against", str(path), "--json", str(answer)).splitlines()
    assert f"{other.predicted_s / best.predicted_s:.3f}x" in lines[-1] and f"{other.predicted_s:.4g} s" in lines[-1]
    assert json.loads(answer.read_text())["against"]["predicted_s"] == other.predicted_s
    against = (*FEW, "--against", str(path))
    path.write_text(best.to_json())
    less = str(max(best.memory_bytes) * 0.99 / 1e9)
    assert shown(capsys, "strategy", *against, "--memory-limit-gb", less).endswith("2 does not fit in the limit\n")
    path.write_text(other.model_copy(update={"schedule": "chimera"}).to_json())
    assert "has each layer on two stages" in refused(capsys, *against)
    path.write_text(other.to_json())
    assert "its step has 4 sequences" in refused(capsys, *against, "--global-batch", "16")
    assert "is for 4 devices, the cluster has 2" in refused(capsys, *against, "--devices", "2")
    # a list of slices for each micro-batch, all the same, is one plan
    plain, same = rank_strategies("mini", CLUSTER, **FIXED | {"schedule": "seq1f1b"})[0], []
    quarter = plain.plans[0].sequence_length // 4
    for slices in ([quarter] * 4, [[quarter] * 4] * plain.accumulation):
        path.write_text(plain.model_copy(update={"slices": slices}).to_json())
        same.append(shown(capsys, "strategy", *against))
    assert same[0] == same[1] and plain.accumulation != 4


def test_many_stages_have_a_range_of_peaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe_ds.commands.strategy._STAGES_SHOWN", 1)
    words = (*SMALL, *LENGTH, "--stages", "4", "--schedule", "1f1b", "--time-limit", "60")
    peaks = as_json(capsys, *words)["strategy"]["memory_bytes"]
    least, most = (f"{of(peaks) / 2**30:.2f}" for of in (min, max))
    assert f"memory      {least} to {most} GiB by stage;" in shown(capsys, "strategy", *words)


def test_a_device_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, known = tmp_path / "card.json", json.loads(FILE.read_text())["devices"][0]
    path.write_text(json.dumps(known | {"name": "mine", "aliases": [], "memory_bytes": 2**34}))
    words = (*FEW, "--device", str(path))
    of_file, shipped = as_json(capsys, *words), as_json(capsys, *FEW)
    assert of_file["strategy"]["predicted_s"] == shipped["strategy"]["predicted_s"]
    path.write_text(json.dumps(known | {"memory_bytes": -1}))
    assert "memory_bytes" in refused(capsys, *words)
    path.write_text(json.dumps({"name": "mine"}))
    assert "the card lacks title, peak_flops, memory_bandwidth" in refused(capsys, *words)
    assert "No such file" in refused(capsys, *FEW, "--device", "none.json")


@pytest.mark.parametrize(("words", "message"), [
    (("--offload-activations", "maybe"), "yes or no"),
    (("--sequence-parallel", "3"), "give 2, the nearest that works"),
    (("--micro-batches", "2"), "unrecognized arguments: --micro-batches 2"),
    (("--devices-per-node", "3"), "give a multiple of 3, such as 3, or --devices-per-node 2"),
    (("--memory-limit-gb", "0.001"), "give --memory-limit-gb above"),
    (("--schedule", "chimera"), "--schedule 'chimera': strategies have"),
])  # fmt: skip
def test_refusals_name_what_works(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert message in refused(capsys, *SMALL, *LENGTH, *words)


def test_all_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("--model", "mini", "--device", "v100", "--stages", "2")
    assert "unrecognized arguments: --global-batch 8" in refused_command(capsys, "plan", *rest, "--global-batch", "8")
    assert "--global-batch is missing" in refused(capsys, *SMALL[:-2])
    text = refused(capsys, "--model", "mini", "--devices", "2")
    assert "--device is missing" in text and "--global-batch is missing" in text
    text = refused(capsys)
    assert all(f"{name} is missing" in text for name in ("--devices", "--global-batch")) and "--model" in text


def test_plan_with_devices_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *FEW, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == as_json(capsys, *FEW)
    assert output.err == "terapipe: note: `terapipe plan --devices` is now `terapipe strategy`, which runs\n"


def test_a_model_with_experts_says_what_is_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--model", "qwen3-30b-a3b", "--device", "h200", "--devices", "16", "--global-batch", "16", "--stages", "2")
    text = shown(capsys, "strategy", *few, *LENGTH, "--tensor-parallel", "8", "--schedule", "1f1b")
    (line,) = [line for line in text.splitlines() if line.startswith("  experts")]
    assert "128 per layer, 8 per token; 30.53 B parameters, 3.35 B per token" in line
    assert line.endswith("expert parallelism is not searched")


def test_more_devices_that_do_not_help_are_not_advised(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of 256 experts does not fit on a node of four small devices, and there are only 61."""
    few = ("--model", "deepseek-v3", "--device", "t4", "--devices", "1024", "--global-batch", "1024")
    text = refused(capsys, *few, "--sequence-length", "4096")
    assert "more of these devices do not help: a stage has a layer at least" in text and "or more devices" not in text
