"""Whose fault it was that ranks ended; the ranks are made up."""

from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.bench import run as module
from terapipe_ds.bench.cases import Case, Job
from terapipe_ds.bench.ranks import Position, RankError
from terapipe_ds.bench.run import cause_of, run_benchmark
from terapipe_ds.files.user_json import CommandError
from tests.unit.bench.test_bench_run import CASES, WORK


def test_the_rank_that_failed_first_says_why(tmp_path: Path) -> None:
    positions = [Position(tmp_path, rank) for rank in range(3)]
    positions[0].at("torch zbv at m = 4")  # ahead of the others
    positions[1].at("deepspeed 1f1b")
    positions[2].at("deepspeed 1f1b")
    positions[2].failed(ValueError("no room\nfor 3 tensors"))
    positions[1].failed(RuntimeError("Connection closed by peer"))
    first = "deepspeed 1f1b failed: ValueError: no room; leave"
    assert cause_of(RankError(1, {1: 1, 2: 1}), tmp_path).startswith(first)
    positions[0].failed(AssertionError())
    assert cause_of(RankError(0, {0: 1}), tmp_path).startswith("torch zbv at m = 4 failed: AssertionError; leave")


@pytest.mark.parametrize(("exit_code", "how"), [
    (-6, "signal SIGABRT"), (70, "exit code 70"), (-200, "signal 200"),
])  # fmt: skip
def test_a_rank_that_ends_without_a_word_came_first(tmp_path: Path, exit_code: int, how: str) -> None:
    positions = [Position(tmp_path, rank) for rank in range(2)]
    positions[0].at("torch zbv")
    positions[0].failed(RuntimeError("Connection closed by peer"))
    positions[1].at("the costs of halves")
    cause = cause_of(RankError(0, {0: 1, 1: exit_code}), tmp_path)
    assert cause.startswith(f"the costs of halves failed: rank 1 ended with {how}; leave")


def test_what_concerns_all_systems_is_nobodys_failure(tmp_path: Path) -> None:
    nobody = "rank 1 ended with exit code 1; what the rank said stands above"
    assert cause_of(RankError(1, {1: 1}), tmp_path) == nobody, "ended before it came to any"
    position = Position(tmp_path, 1)
    position.at("torch zbv")
    position.at()
    position.failed(ValueError("links"))
    assert cause_of(RankError(1, {1: 1}), tmp_path) == "ValueError: links; what the rank said stands above"


def test_a_failure_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(main: Any, num_ranks: int, job: Job, folder: str) -> None:
        position = Position(Path(folder), 1)
        position.at("torch zbv")
        position.failed(RuntimeError("no pair"))
        raise RankError(1, {1: 1})

    monkeypatch.setattr(module, "spawn_ranks", spawn)
    with pytest.raises(CommandError, match="torch zbv failed: RuntimeError: no pair; leave it out with --systems"):
        run_benchmark(Job(WORK, CASES, (1,), 2), "test")


@pytest.mark.parametrize(("version", "runs"), [("2.11.0+cpu", False), ("2.12.1", True), ("2.13.0+cpu", True)])
def test_a_version_of_torch_whose_zbv_cannot_run(monkeypatch: pytest.MonkeyPatch, version: str, runs: bool) -> None:
    monkeypatch.setattr("terapipe_ds.bench.cases.version_of", lambda name: version)
    job = Job(WORK, (Case("torch", "zbv"), Case("torch", "gpipe")), (4,), 1)
    assert (job.problem(0, 4) is None) == runs and job.problem(1, 4) is None
