"""Test `make gpu-checks`: its judgements, the merge of parts, and a dry run of every part."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.attention.backends.fused import CpuFlash
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from tests.distributed.cases import Case, default_cases
from tests.gpu_checks import __main__ as command
from tests.gpu_checks import actions, attention, checks, ranks, speed
from tests.gpu_checks.checks import Check, PartResult, Settings, merged, table
from tests.processes import run_python

PARTS = tuple(command.PARTS)


def _result(part: str, *found: Check, dry_run: bool = False, device: str = "a device") -> PartResult:
    versions = {"torch": "2.13.0"}
    result = PartResult(part, dry_run, {"device": device, "cpu": "a cpu", "versions": versions, "date": "2026-01-01"})
    for check in found:
        result.add(check, 1.25)
    return result


# -- a check, and parts that are merged ---------------------------------------------------------------------------


def test_the_end_of_a_batch_can_still_be_timed_apart() -> None:
    with actions.closing_apart():
        assert TeraPipeEngine._exec_action.__name__ == "apart"


def test_times_are_judged_on_a_device_and_not_in_a_dry_run(tmp_path: Path) -> None:
    real, dry = (Settings("cpu", dry_run, tmp_path) for dry_run in (False, True))
    assert not real.timed("x", 1.2, 1.05).ok and dry.timed("x", 1.2, 1.05).ok
    assert not dry.timed("x", float("nan"), 1.05).ok


def test_parts_are_merged_from_the_folder(tmp_path: Path) -> None:
    _result("attention", Check("a", 1.0), Check("b", float("inf"), "<= 1", False)).save(tmp_path)
    assert not merged(tmp_path, PARTS)["ok"]
    _result("speed", Check("c", "cuda_flash")).save(tmp_path)
    result = merged(tmp_path, PARTS)
    assert list(result["parts"]) == ["attention", "speed"] and result["failed"] == 1
    assert result == json.loads((tmp_path / checks.RESULT).read_text())
    failed = result["parts"]["attention"]["checks"][1]
    assert failed == {"name": "b", "value": "inf", "wanted": "<= 1", "ok": False, "seconds": 1.25}
    shown = table(result, ["attention"]).splitlines()
    assert shown[0] == "attention: a device, a cpu, torch 2.13.0, 2026-01-01"
    assert shown[2].split() == ["NOT", "OK", "b", "inf", "<=", "1", "1.2", "s"]
    assert shown[-1] == "1 of these checks failed" and "cuda_flash" not in "".join(shown)
    assert table(result, ["speed"]).endswith("all of these checks passed")


@pytest.mark.parametrize(("other", "what"), [({"dry_run": True}, "dry runs"), ({"device": "another"}, "devices")])
def test_what_makes_no_one_result_is_refused(tmp_path: Path, other: dict[str, Any], what: str) -> None:
    _result("attention").save(tmp_path)
    _result("speed", **other).save(tmp_path)
    with pytest.raises(ValueError, match=f"several {what}.*give another --out"):
        merged(tmp_path, PARTS)


def test_a_part_that_raises_is_a_check_that_failed(tmp_path: Path) -> None:
    def fails(settings: Settings) -> Iterator[Check]:
        yield Check("first", 1.0)
        raise RuntimeError("the device fell over")

    with mock.patch.object(command, "checks_of", lambda part: fails):
        result = command.run_part("attention", Settings("cpu", True, tmp_path))
    assert [check["ok"] for check in result.checks] == [True, False]
    assert "attention, after 1 checks" in result.checks[1]["name"] and "fell over" in result.checks[1]["value"]
    assert json.loads((tmp_path / "attention.json").read_text())["checks"] == result.checks


@pytest.mark.parametrize(("problem", "code", "said"), [
    (None, 0, "all of these checks passed"), ("it was ended", 1, "not run: it was ended"),
])  # fmt: skip
def test_the_exit_code_of_parts_that_do_not_end_well(
    problem: str | None, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their process has written one good check by then."""

    def run(words: list[str], limit_s: float) -> str | None:
        assert limit_s < 600.0 and words[-5:] == ["--inside", "attention", "--dry-run", "--limit-s", "570.0"]
        _result("attention", Check("first", 1.0), dry_run=True, device="cpu").save(tmp_path)
        return problem

    with mock.patch.object(command, "problem_of", run), mock.patch.dict("os.environ"):
        assert command.main(["--dry-run", "--out", str(tmp_path), "attention"]) == code
    assert said in capsys.readouterr().out


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    assert command.problem_of(["true"], 60.0) is None
    assert command.problem_of(["sh", "-c", "exit 3"], 60.0) == "it ended with exit code 3"
    path = tmp_path / "pid"
    starts = f"sleep 600 & echo $! > {path}.new; mv {path}.new {path}; wait"
    assert command.problem_of(["sh", "-c", starts], 2.0) == "it took longer than 2 s and was ended"
    try:
        descriptor = os.pidfd_open(int(path.read_text()))
    except ProcessLookupError:
        return
    with open(descriptor) as ended:  # can be read from once the process is dead
        assert select.select([ended], [], [], 60.0)[0]


def test_without_a_device_there_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock.patch.object(torch.cuda, "is_available", lambda: False), mock.patch.dict("os.environ"):
        assert command.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no CUDA device" in said and "DRY_RUN=1" in said
    with pytest.raises(SystemExit):
        command.parse_arguments(["atention"])
    assert "'atention': known are attention, options" in capsys.readouterr().err


def test_dry_runs_have_a_folder_of_their_own() -> None:
    dry, real = (command.parse_arguments(words).out for words in (["--dry-run"], []))
    assert dry != real
    for words, folder in ((["DRY_RUN=1"], dry), ([], real)):
        said = subprocess.run(["make", "-n", "-o", "venv", "gpu-checks", *words], capture_output=True, text=True)
        assert f"--out {folder} " in f"{said.stdout} "


# -- what the parts see -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_kernel_that_is_wrong_is_seen(tmp_path: Path) -> None:
    real = CpuFlash.run_backward

    def wrong(self: CpuFlash, *args: Any) -> Any:
        dq, dk, dv = real(self, *args)
        return dq, dk * 1.05, dv

    settings = Settings("cpu", True, tmp_path)
    assert all(check.ok for check in attention.checks(settings))
    with mock.patch.object(CpuFlash, "run_backward", wrong):
        failed = [check.name for check in attention.checks(settings) if not check.ok]
    by_the_kernel = [check.name for check in attention.checks(settings) if "softcap" not in check.name]
    assert failed == by_the_kernel  # caps are computed by plain torch on CPU


def test_slices_that_are_slow_are_seen(tmp_path: Path) -> None:
    settings = Settings("cpu", False, tmp_path)
    row = mock.Mock(ratio=1.06)
    with (
        mock.patch.object(speed, "measure", lambda *args: row),
        mock.patch.object(speed.gpu, "ATTENTION_LENGTHS", (8192,)),
    ):
        found = [check for check in speed.checks(settings) if "in slices of" in check.name]
    assert {check.ok for check in found if any(f"of {n}," in check.name for n in (256, 512))} == {True}
    assert {check.ok for check in found if any(f"of {n}," in check.name for n in (1024, 8192))} == {False}


@pytest.mark.full
def test_a_case_that_all_ranks_refuse_is_one_failed_check(tmp_path: Path) -> None:
    good = Case(stages=2, micro_batches=2, precision="fp32")
    refused = Case(stages=2, micro_batches=2, schedule="zbv", precision="fp32", decoder_layers=0)  # 3 layers, 4 parts
    settings = Settings("cpu", True, tmp_path)
    first, second, ran = ranks.run_world(ranks.world_of(settings, 2, [refused, good], {}, 200.0))
    assert not first.ok and str(first.value).startswith("not run: ")
    assert second.ok and str(good) in second.name
    assert ran.ok and ran.value == "2 of 2"
    with pytest.raises(RuntimeError, match="1 of 2 ranks raised: ValueError: no"):
        ranks.all_alike(["ValueError: no", object()])


def test_cases_that_were_not_reached_are_counted(tmp_path: Path) -> None:
    cases = ranks.telling_cases(2, dry_run=False)
    world = ranks.world_of(Settings("cpu", False, tmp_path), 2, cases, {}, 1.0, default_cases())
    assert world.telling == len(cases) < len(world.cases)
    for reached in (len(cases) - 1, len(cases)):
        lines = "".join(json.dumps({"name": str(case), "value": 0.5}) + "\n" for case in world.cases[:reached])

        def spawn(main: Any, size: int, world: Any, folder: str, lines: str = lines) -> None:
            Path(folder, "found.jsonl").write_text(lines)

        with mock.patch("terapipe_ds.bench.ranks.spawn_ranks", spawn):
            *_, last = ranks.run_world(world)
        assert (last.value, last.ok) == (f"{reached} of {len(world.cases)}", reached == len(cases))


# -- dry runs -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_a_dry_run(part: str, tmp_path: Path) -> None:
    ended = run_python("-m", "tests.gpu_checks", "--dry-run", "--out", tmp_path, part)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / checks.RESULT).read_text())
    (found,) = result["parts"].values()
    assert result["ok"] and found["part"] == part and found["dry_run"] and len(found["checks"]) >= 2
    assert {"torch", "deepspeed"} <= set(found["machine"]["versions"]) and found["machine"]["device"]
    assert "all of these checks passed" in ended.stdout
