"""`terapipe doctor`: in a broken world each check says what is wrong, and what to do."""

import importlib.util
import io
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.cli import main
from terapipe_ds.compat import versions
from terapipe_ds.doctor import Check, Line, deepspeed_json, installation, look, machine
from terapipe_ds.files.user_json import CommandError, read_json
from terapipe_ds.messages import colored
from tests.processes import ROOT, run_python


def found(check: Callable[[], Iterable[Line]], name: str = "") -> list[Line]:
    return [line for line in look(Check("the check", check)) if name in line.name]


def one(check: Callable[[], Iterable[Line]], name: str = "") -> tuple[str, str, str]:
    (line,) = found(check, name)
    return line.verdict, line.found, line.fix


# --- lines


def test_a_check_that_raises_is_a_line() -> None:
    def broken() -> list[Line]:
        print("noise that would spoil --json")
        raise OSError("no\nsuch \x1b[31mdevice")

    (line,) = look(Check("fragile", broken))
    assert (line.verdict, line.name) == ("fail", "fragile") and line.fix
    assert line.found.startswith("OSError: ") and "no such" in line.found and "\x1b" not in line.found


def test_a_check_that_fails_midway_keeps_its_lines() -> None:
    def fails_midway() -> Iterator[Line]:
        yield Line("ok", "first", "it is there")
        raise OSError("no such")

    assert [(line.verdict, line.name) for line in found(fails_midway)] == [("ok", "first"), ("fail", "the check")]


@pytest.mark.parametrize("section", ["bf16", "fp16", "torch_autocast"])
@pytest.mark.parametrize("value", [True, "auto"])
def test_a_section_that_is_no_object_does_not_end_the_report(tmp_path: Path, section: str, value: object) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**USUAL, section: value}))
    lines = {line.name: line for line in found(lambda: deepspeed_json.findings(deepspeed_json.read(str(path)), 3, 2))}
    assert (lines["precision"].verdict, lines["precision"].fix) == ("fail", "give an object")
    assert lines["register"].verdict == "ok"


def test_what_is_needed_and_missing_is_said() -> None:
    (line,) = look(Check("devices", lambda: pytest.fail("it must not run"), ("torch", "no_such_package")))
    assert (line.verdict, line.found) == ("note", "not looked at: no_such_package is not installed")


# --- the installation


def with_versions(monkeypatch: pytest.MonkeyPatch, **installed: str | None) -> None:
    known = {name.replace("_", "-"): version for name, version in installed.items()}
    real = versions.version_of
    monkeypatch.setattr(versions, "version_of", lambda name: known[name] if name in known else real(name))


def test_missing_and_untested_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch="1.13.1", deepspeed=None)
    assert one(installation.required, "torch")[0] == "warning"
    assert "1.13.1 is not tested (>=2.11,<2.16)" in one(installation.required, "torch")[1]
    assert one(installation.required, "deepspeed") == ("fail", "not installed", "pip install deepspeed==0.19.8")


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, peft=None, transformers="5.24.0", safetensors="0.8.0", megatron_core="0.9.0")
    verdict, text, fix = one(installation.extras, "hf")
    assert verdict == "note" and "not installed: peft; transformers" in text
    assert re.fullmatch(r"pip install transformers==[\d.]+ safetensors(==[\d.]+)? peft(==[\d.]+)?", fix)
    verdict, text, _ = one(installation.extras, "megatron")
    assert verdict == "warning" and "0.9.0 is not a version that terapipe_ds is tested with" in text


def test_another_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "has", lambda package: False)
    monkeypatch.setattr(versions, "is_there", lambda module: module == "apex")
    assert one(installation.apex) == ("warning", "the package of this name here is not NVIDIA's", "pip uninstall apex")
    monkeypatch.setattr(versions, "is_there", lambda module: False)
    assert one(installation.apex)[0] == "note"
    monkeypatch.setattr(versions, "has", lambda package: True)
    assert one(installation.apex)[0] == "ok"


def test_a_package_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = (each for each in installation.CHECKS if each.name == "flash-attn")
    verdict, text, fix = one(check.look)
    assert verdict == "warning" and "does not import" in text and fix == "python -c 'import flash_attn' says why"


def test_a_deepspeed_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert one(installation.hooks)[0] == "ok"
    monkeypatch.delattr(PipelineEngine, "_exec_reduce_grads")
    verdict, text, fix = one(installation.hooks)
    assert verdict == "fail" and "PipelineEngine._exec_reduce_grads" in text and fix == "pip install deepspeed==0.19.8"


# --- the machine


def test_a_driver_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    verdict, text, _ = one(machine.devices)
    assert verdict == "fail" and "there is an NVIDIA driver" in text
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert one(machine.devices)[0] == "note"


def test_old_and_new_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 0)][index])
    verdict, text, fix = one(machine.devices)
    assert (verdict, text) == ("note", "2 of CUDA") and "train in fp16 on device 1" in fix
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert one(machine.devices)[0] == "ok"


def test_the_kernel_and_why_not_a_better_one() -> None:
    pytest.importorskip("deepspeed")
    lines = found(machine.kernels)
    assert lines[0].verdict == "ok" and lines[0].found.startswith("cpu_flash for float32")
    assert "cuda_flash" in lines[0].found and lines[0].found.count("it cannot run on this machine") == 1


@pytest.mark.parametrize(("ranks", "verdict"), [(None, "ok"), (2, "ok"), (3, "warning")])
def test_cores(ranks: int | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert one(lambda: machine.cores(ranks), "cores")[0] == verdict
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert one(lambda: machine.cores(ranks), "OMP")[0] == "note"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 65536))
    assert one(machine.limits, "open")[::2] == ("warning", "ulimit -n 4096 or more (up to 65536)")
    assert one(machine.limits, "locked")[0] == "note"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert {line.verdict for line in found(machine.limits)} == {"ok"}


def test_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
        for name in ("deepspeed", "torchrun"):
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    told = {}
    for folder in (here, other, tmp_path):
        monkeypatch.setenv("PATH", str(folder))
        told[folder.name] = one(machine.launchers, "torchrun")
    assert told["here"][0] == "ok"
    assert told["other"][0] == "warning" and "is not of this Python" in told["other"][1]
    assert told[tmp_path.name][0] == "warning" and f"export PATH={here}" in told[tmp_path.name][2]


def test_nothing_could_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    verdict, text, fix = one(machine.builds, "DeepSpeed's ops")  # this machine may have a killed build
    assert verdict == "warning" and "needs ninja and c++" in text and "torch_adam" in fix
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert found(machine.builds, "ops") == []


# --- a config

USUAL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
    "terapipe": {"enabled": True, "schedule": "seq1f1b", "slices": 4},
}  # fmt: skip


def of_config(folder: Path, stages: int | None = None, data: int | None = None, **changes: Any) -> dict[str, Line]:
    path = folder / "ds.json"
    path.write_text(json.dumps({**USUAL, **changes}))
    return {line.name: line for line in deepspeed_json.findings(deepspeed_json.read(str(path)), stages, data)}


def test_a_healthy_config(tmp_path: Path) -> None:
    """With K stages, m micro-batches and s slices Seq1F1B waits K - 1 of m s + K - 1 slices."""
    lines = of_config(tmp_path, stages=3, data=2)
    assert {line.verdict for line in lines.values()} == {"ok"}
    assert lines["section"].found == "schedule seq1f1b, 4 slices, fp32"
    assert lines["schedule"].found.startswith(f"bubble {2 / (4 * 4 + 2):.1%} ")
    assert lines["schedule"].found.endswith(f"whole sequences {2 / 6:.1%}")


@pytest.mark.parametrize(("changes", "name", "verdict", "words"), [
    ({"terapipe": {"enabled": True, "slises": 4}}, "refused", "fail", "terapipe.slises = 4"),
    ({"zero_optimization": {"stage": 3}}, "refused", "fail", "zero_optimization.stage = 3"),
    ({"terapipe": {}}, "section", "note", "DeepSpeed's own engine trains"),
    ({"train_batch_size": 5}, "batch", "fail", "1 x 4 x 2 replicas is 8"),
    ({"gradient_accumulation_steps": "auto"}, "auto", "warning", "gradient_accumulation_steps = \"auto\""),
    ({"gradient_accumulation_steps": "auto"}, "batch", "ok", "train_micro_batch_size_per_gpu 1"),
    ({"bf16": {"enabled": "auto"}}, "section", "ok", "4 slices, the precision of Trainer or torch.autocast"),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "section", "ok", "the precision of Trainer or"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "refused", "fail", "float16\" with 3 stages"),
    ({"optimizer": {"type": "Adam", "params": {"a.b": "auto"}}}, "auto", "warning", "optimizer.params.a.b"),
    ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps", "fail", "= 2.5"),
    ({"gradient_accumulation_steps": 2.5}, "register", "ok", "only a TeraPipeEngine"),
    ({"pipeline": {"activation_checkpoint_interval": 2}, "terapipe": {"enabled": True, "recompute": "full"}},
     "recompute", "fail", "terapipe.recompute = 'full'"),
    ({"pipeline": {"activation_checkpoint_interval": 1}, "terapipe": {"enabled": True, "recompute": [0, 2]}},
     "recompute", "fail", "terapipe.recompute = [0, 2]"),
    ({"pipeline": {"activation_checkpoint_interval": 1}, "terapipe": {"enabled": True, "recompute": [0, 2, 1]}},
     "register", "ok", "only a TeraPipeEngine"),
    ({"pipeline": {"use_reentrant": False}, "terapipe": {"enabled": True, "recompute": "full", "keep_attention": True}},
     "refused", "fail", "terapipe.keep_attention = true"),
    ({"terapipe": {"enabled": True, "schedule": "chimera", "slices": 2}}, "schedule", "fail", "chimera on 3 stages"),
    ({"terapipe": {"enabled": True}}, "planner.cache_dir", "note", "measured anew at each start"),
    ({"terapipe": {"enabled": True, "partition": [0, 3, 9]}}, "partition", "fail", "2 parts, and seq1f1b"),
    ({"terapipe": {"enabled": True, "partition": [0, 9]}}, "partition", "fail", "has 1 part, and seq1f1b"),
    ({"terapipe": {"enabled": True, "schedule": "auto", "chunks_per_stage": 2, "partition": [0, 3, 6, 9]}},
     "partition", "fail", "3 parts, and auto on 3 stages 6"),
    ({"terapipe": {"enabled": True, "planner": {"profile": "nothing.json"}}},
     "planner.profile", "fail", "cannot read the profile nothing.json"),
    ({"gradient_accumulation_steps": 10**7}, "schedule", "note", "a step of 120000000 forwards is not simulated"),
    ({"gradient_accumulation_steps": 10**7, "terapipe": {"enabled": True, "schedule": "chimera", "slices": 2}},
     "schedule", "fail", "chimera on 3 stages"),
    ({"gradient_accumulation_steps": 8, "terapipe": {"enabled": True, "schedule": "seq1f1b-interleaved-zb", "slices": 2,
                                                     "schedule_options": {"max_live_slices": 3}}},
     "schedule", "warning", "bubble 27.3% with equal parts and slices; 1F1B of whole sequences 20.0%"),
    ({"pipelin": {"stages": 2}}, "misspelt", "warning", "pipelin"),
    ({"amp": {"enabled": True}}, "DeepSpeed", "fail", "AMP integration has been removed"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket": 9}}, "DeepSpeed", "fail", "reduce_bucket: Extra inputs are"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "DeepSpeed", "fail", "cannot be simultaneously enabled"),
    ({"pipeline": {"stages": 2}}, "pipeline.stages", "fail", "2, and the run has 3"),
    ({"pipeline": {"stages": "2"}}, "pipeline.stages", "fail", "'2'"),
    ({"pipeline": {"stages": 0}}, "register", "ok", "only a TeraPipeEngine reads the section"),
    ({"terapip": {"enabled": {"a": 1}}}, "refused", "fail", "terapip = {'enabled': {'a': 1}}"),
])  # fmt: skip
def test_faults_of_a_config(changes: dict[str, Any], name: str, verdict: str, words: str, tmp_path: Path) -> None:
    line = of_config(tmp_path, stages=3, data=2, **changes)[name]
    assert line.verdict == verdict and words in line.found and (line.fix or verdict == "ok")


def test_the_sizes_of_a_batch_are_judged_as_by_deepspeed() -> None:
    """Without a number of replicas it is enough that DeepSpeed takes the sizes with one; Trainer has the others."""
    from deepspeed.runtime.config import DeepSpeedConfig

    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")

    def is_taken(sizes: tuple[int | None, ...], replicas: int) -> bool:
        config = DeepSpeedConfig.__new__(DeepSpeedConfig)
        vars(config).update(zip(names, sizes, strict=True), world_size=replicas)
        try:
            config._configure_train_batch_size()
        except AssertionError:
            return False
        return True

    for sizes in itertools.product((None, 1, 3), (None, 1, 2, 3), (None, 1, 2, 6, 7, 12)):
        for replicas in (None, 1, 2, 3):
            (line,) = deepspeed_json._batch(dict(zip(names, sizes, strict=True)), replicas)
            taken = any(is_taken(sizes, count) for count in ([replicas] if replicas else range(1, 13)))
            refused = "fail" if sizes[0] or sizes[2] else "warning"
            assert line.verdict == ("ok" if taken else refused) and bool(line.fix) is not taken, (sizes, replicas, line)


def test_a_config_with_comments_is_read_as_by_deepspeed(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    path, text = tmp_path / "ds.json", json.dumps(USUAL, indent=1)
    for encoding in ("utf-8-sig", "utf-8"):  # the first with a byte-order mark
        path.write_text(f"// mine\n{text[:-2]}, # the last\n}}\n", encoding=encoding)
        assert read_json(str(path), "--config") == DeepSpeedConfig(str(path))._param_dict == USUAL
    for option, broken, reason in (
        ("--model", path.read_text(), "expected value at line 1 column 1"),
        ("--config", '// twice\n{"a": 1,\n"a": 2}', "the key 'a' occurs twice"),  # and no word about the comment
        ("--config", '["a", "a"', "EOF while parsing a list"),
        ("--config", "train_batch_size: 4", "expected"),  # YAML
        ("--config", '{"a": 1 /* one', "a comment that begins with /\\* does not end"),
        ("--config", '{"a": 1e999} // many', "cannot convert float infinity"),
    ):
        path.write_text(broken)
        with pytest.raises(CommandError, match=f"is no JSON: {reason}"):
            read_json(str(path), option)


def test_a_schedule_is_checked_without_accumulation_steps(tmp_path: Path) -> None:
    """DeepSpeed then runs one micro-batch per step, or as many as the batch has."""
    section = {"enabled": True, "schedule": "chimera", "slices": 2}
    for batch, data in ((None, None), (8, 2), (8, None)):
        sizes = {"gradient_accumulation_steps": None, "train_batch_size": batch}
        assert of_config(tmp_path, 3, data, terapipe=section, **sizes)["schedule"].verdict == "fail"
    nothing = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    assert "schedule" not in of_config(tmp_path, 3, 2, **nothing)  # Trainer decides how many
    line = of_config(tmp_path, 3, 2, gradient_accumulation_steps=None, train_batch_size=8)["schedule"]
    assert line.found.startswith(f"bubble {2 / (4 * 4 + 2):.1%} ")


def test_a_strategy_has_the_sizes_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be cut short
    words = "--model nano --device cpu-core --devices 2 --stages 2 --global-batch 4 --sequence-length 64"
    assert main(["strategy", *words.split(), "--strategy-out", "mine.json"]) == 0
    for sizes in ({}, {"train_batch_size": "auto"}):
        Path("ds.json").write_text(json.dumps(sizes | {"terapipe": {"enabled": True, "strategy": "mine.json"}}))
        lines = [line for line in deepspeed_json.findings(deepspeed_json.read("ds.json"), 2, 1) if line.name == "batch"]
        assert [line.verdict for line in lines] == ["ok"] and "train_batch_size 4" in lines[0].found


def test_an_order_for_other_stages(tmp_path: Path) -> None:
    order = tmp_path / "two.csv"
    order.write_text("F0.0,B0.0\nF0.0,B0.0\n")
    section = {"enabled": True, "schedule": str(order), "slices": 1}
    assert of_config(tmp_path, stages=3, terapipe=section)["schedule"].verdict == "fail"
    assert "schedule" not in of_config(tmp_path, stages=2, terapipe=section)


def test_stages_that_recompute_beyond_the_last(tmp_path: Path) -> None:
    section = {**USUAL["terapipe"], "recompute": [0, 2]}
    assert of_config(tmp_path, stages=2, terapipe=section)["recompute"].verdict == "fail"
    assert "recompute" not in of_config(tmp_path, stages=3, terapipe=section)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    section = {**USUAL["terapipe"], "slices": "auto", "trace_dir": str(tmp_path / "new/traces")}
    lines = of_config(tmp_path, terapipe={**section, "planner": {"cache_dir": str(tmp_path / "file/plans")}})
    assert lines["planner.cache_dir"].verdict == "fail" and lines["trace_dir"].verdict == "ok"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_a_file_that_is_none(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    (line,) = deepspeed_json.findings(deepspeed_json.read(str(path)), None, None)
    assert (line.verdict, line.name) == ("fail", "file")


# --- the command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "CHECKS", (Check("a", lambda: [Line("ok", "a", "fine")]),))
    monkeypatch.setattr(machine, "checks", lambda ranks: (Check("b", lambda: [Line("note", "b", f"{ranks}", "do")]),))


@pytest.mark.usefixtures("quick")
def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--stages", "2", "--data", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "  ok       a                    fine" in said and "  note     b                    6" in said
    assert said[said.index("  note     b                    6") + 1].strip() == "-> do" and said[-2] == "1 ok, 1 note"
    # tensor-parallel and sequence ranks need cores too
    (tmp_path / "ds.json").write_text('{"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 5}')
    assert main(["doctor", "--stages", "2", "--data", "3", "--config", str(tmp_path / "ds.json")]) == 0
    assert "  note     b                    60" in capsys.readouterr().out
    (tmp_path / "ds.json").write_text('{"terapipe": {"enabled": true, "slices": -1}}')
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "--config", str(tmp_path / "ds.json")])
    assert ended.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == {"ok": 2, "note": 1, "fail": 1}
    assert [check["group"] for check in report["checks"]] == ["installation", "machine", "config", "config"]
    reads, writes = os.pipe()
    os.write(writes, json.dumps(USUAL).encode())
    os.close(writes)
    assert main(["doctor", "--config", f"/dev/fd/{reads}"]) == 0  # a pipe of the shell
    assert f"ok       file                 /dev/fd/{reads}" in capsys.readouterr().out
    assert main(["doctor", "--data", "3"]) == 2 and "--data goes with --stages" in capsys.readouterr().err
    assert main(["doctor", "--quiet", "--json"]) == 2 and "leave one out" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_failures_stand_first_and_quiet_prints_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"terapipe": {"enabled": true, "slices": -1}}')
    words = ["doctor", "--config", str(tmp_path / "ds.json")]
    texts = []
    for more in ([], ["--quiet"]):
        with pytest.raises(SystemExit):
            main([*words, *more])
        texts.append(capsys.readouterr().out)
    first, quiet = texts
    assert first.index("\nfailures\n  fail ") < first.index("\ninstallation\n  ok ")
    assert "slices" in quiet and "  ok " not in quiet and "  note " not in quiet and "\n\n" not in quiet
    assert first.splitlines()[-2] == quiet.splitlines()[-2] == "2 ok, 1 note, 1 fail"


@pytest.mark.parametrize(("slices", "granularity", "length", "verdict", "part"), [
    ([512, 256, 256], 1, 1024, "ok", "[512, 256, 256]"),
    ([512, 256, 256], 1, 2048, "fail", "adds up to 1024 tokens"),
    (8, 64, 256, "fail", "slices"),
    (4, 64, 256, "ok", "[64, 64, 64, 64]"),
    ("auto", 512, 256, "fail", "larger than a sequence of 256 tokens"),
    ("auto", 64, 256, "ok", "planner"),
])  # fmt: skip
def test_slices_and_a_length(
    tmp_path: Path, slices: Any, granularity: int, length: int, verdict: str, part: str
) -> None:
    section = {"enabled": True, "slices": slices, "granularity_tokens": granularity}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 4, "terapipe": section}))
    lines = deepspeed_json.findings(deepspeed_json.read(str(tmp_path / "ds.json")), None, None, length)
    (line,) = [line for line in lines if line.name == "slices"]
    assert line.verdict == verdict and part in f"{line.found}: {line.fix}", line


def test_color_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert colored("fail", "red", Terminal()) == "\x1b[31mfail\x1b[0m"
    assert colored("fail", "red", io.StringIO()) == "fail"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert colored("fail", "red", Terminal()) == "fail"


def test_the_real_command_here() -> None:
    pytest.importorskip("deepspeed")
    done = run_python("-m", "terapipe_ds", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    names = {check["name"]: check["verdict"] for check in report["checks"]}
    assert names["torch"] in ("ok", "warning") and names["overrides"] == "ok"
    assert "fail" not in names.values()


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_a_package_that_cannot_be_imported_is_blamed_alone(name: str, tmp_path: Path) -> None:
    """A library may be missing, say; the other checks would fail only because of that."""
    (tmp_path / f"{name}.py").write_text("raise OSError('libnothing.so: cannot open shared object file')")
    done = run_python("-m", "terapipe_ds", "doctor", "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    checks = json.loads(done.stdout)["checks"]
    lines = {check["name"]: check for check in reversed(checks)}  # `deepspeed` is a launcher, too
    assert [each for each, line in lines.items() if line["verdict"] == "fail"] == [name] and done.returncode == 1
    assert "cannot be imported: OSError: libnothing.so" in lines[name]["found"]
    assert lines["devices"]["found"] == f"not looked at: {name} cannot be imported"


def test_a_bare_python_runs_it(tmp_path: Path) -> None:
    """With pydantic and numpy alone: torch and DeepSpeed are named, and nothing is a traceback."""
    needed = ["terapipe_ds", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"]
    for name in (*needed, "numpy", "packaging"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (tmp_path / source.name).symlink_to(source)
    libraries = Path(importlib.util.find_spec("numpy").origin).parents[1] / "numpy.libs"  # type: ignore[union-attr,arg-type]
    if libraries.exists():
        (tmp_path / "numpy.libs").symlink_to(libraries)
    command = [sys.executable, "-S", "-m", "terapipe_ds", "doctor"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "fail     torch                not installed" in done.stdout
    assert "not looked at: torch and deepspeed are not installed" in done.stdout
