"""Whose fault it was that ranks ended, and what the next attempt leaves out; the ranks are made up."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.bench import run as module
from terapipe_ds.bench.cases import AUTO, PLAN, BenchError, Case, Job, LeftOut
from terapipe_ds.bench.ranks import Position, RankError
from terapipe_ds.bench.run import find_failure, run_benchmark
from terapipe_ds.bench.train_in_turns import PlannedCases
from tests.unit.bench.test_bench_run import CASES, WORK
from tests.unit.bench.test_bench_run import ranks as records


def test_the_rank_that_failed_first_says_why(tmp_path: Path) -> None:
    positions = [Position(tmp_path, rank) for rank in range(3)]
    positions[0].at(case=5, accumulation=4)  # ahead of the others
    positions[1].at(case=2)
    positions[2].at(case=2)
    positions[2].failed(ValueError("no room\nfor 3 tensors"))
    positions[1].failed(RuntimeError("Connection closed by peer"))
    assert find_failure(tmp_path, {1: 1, 2: 1}) == LeftOut("ValueError: no room", case=2)
    positions[0].failed(AssertionError())
    assert find_failure(tmp_path, {0: 1}) == LeftOut("AssertionError", case=5, accumulation=4)


@pytest.mark.parametrize(("exit_code", "how"), [
    (-6, "signal SIGABRT"), (70, "exit code 70"), (-200, "signal 200"),
])  # fmt: skip
def test_a_rank_that_ends_without_a_word_came_first(tmp_path: Path, exit_code: int, how: str) -> None:
    positions = [Position(tmp_path, rank) for rank in range(2)]
    positions[0].at(case=1, accumulation=8)
    positions[0].failed(RuntimeError("Connection closed by peer"))
    positions[1].at(cut="halves")
    assert find_failure(tmp_path, {0: 1, 1: exit_code}) == LeftOut(f"rank 1 ended with {how}", cut="halves")


def test_what_concerns_all_systems_is_nobodys_failure(tmp_path: Path) -> None:
    assert find_failure(tmp_path, {1: 1}) is None, "ended before it came to any"
    position = Position(tmp_path, 1)
    position.at(case=0)
    position.at()
    position.failed(ValueError("links"))
    assert find_failure(tmp_path, {1: 1}) is None


def test_a_failure_leaves_out_its_own_case_or_accumulation() -> None:
    halves = Case("terapipe", "zbv", PLAN)
    cases = (Case("deepspeed", "1f1b"), Case("terapipe", "seq1f1b", PLAN), Case("terapipe", "zbv", 2), halves)
    left_out = (LeftOut("a", case=0, accumulation=4), LeftOut("b", case=1), LeftOut("c", cut="halves"))
    job = Job(WORK, cases, (1, 4), 1, left_out=left_out)
    assert [job.problem(0, m) for m in (1, 4)] == [None, "a"]
    assert [job.problem(1, m) for m in (1, 4)] == ["b", "b"]
    assert job.problem(2, 1) is None, "with a number of slices it needs no costs"
    assert job.problem(3, 1) == "no plan, for its costs could not be measured: c"
    failed = (LeftOut("c", cut="whole stages"),)
    automatic = Job(WORK, (Case("terapipe", AUTO, 2), Case("deepspeed", "1f1b")), (1,), 1, left_out=failed)
    assert automatic.problem(0, 1) == "no plan, for its costs could not be measured: c", "for its schedule"
    assert automatic.problem(1, 1) is None


def attempts_of(monkeypatch: pytest.MonkeyPatch, *ends: Callable[[Position], None] | None) -> list[tuple[LeftOut, ...]]:
    """What each attempt had left out so far; each one ends on rank 1 in its turn, or (None) leaves its records."""
    left_out: list[tuple[LeftOut, ...]] = []

    def spawn(main: Any, num_ranks: int, job: Job, folder: str) -> None:
        end = ends[len(left_out)]
        left_out.append(job.left_out)
        if end is not None:
            end(Position(Path(folder), 1))
            raise RankError(1, {1: 1})
        for rank, record in enumerate(records()):
            (Path(folder) / f"rank{rank}.pickle").write_bytes(pickle.dumps(record))

    monkeypatch.setattr(module, "spawn_ranks", spawn)
    return left_out


def at_zbv(position: Position) -> None:
    position.at(case=2)
    position.failed(RuntimeError("no pair"))


def at_sliced(position: Position) -> None:
    position.at(case=1, accumulation=1)
    position.failed(MemoryError("no room"))


def test_each_attempt_leaves_out_what_failed_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = attempts_of(monkeypatch, at_zbv, at_sliced, None)
    result = run_benchmark(Job(WORK, CASES, (1,), 2), "test")
    zbv, sliced = LeftOut("RuntimeError: no pair", case=2), LeftOut("MemoryError: no room", case=1, accumulation=1)
    assert left_out == [(), (zbv,), (zbv, sliced)] and len(result["runs"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "torch zbv failed: RuntimeError: no pair; the others start again without",
        "terapipe seq1f1b, 2 slices failed: MemoryError: no room; the others start again without",
    ]


@pytest.mark.parametrize("second", [lambda position: position.at(), at_zbv], ids=["of all", "what is left out already"])
def test_a_second_failure_that_leaves_nothing_out_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, second: Callable[[Position], None]
) -> None:
    """Else an attempt that leaves a system out and ends at it all the same would go on for ever."""
    left_out = attempts_of(monkeypatch, at_zbv, second, None)
    with pytest.raises(BenchError, match=r"rank 1 ended with exit code 1; see above; what the rank said stands there"):
        run_benchmark(Job(WORK, CASES, (1,), 2), "test")
    assert len(left_out) == 2


def test_costs_that_could_not_be_measured_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = (Case("terapipe", "seq1f1b", PLAN), Case("terapipe", "zbv", PLAN), Case("deepspeed", "1f1b"))
    measured: list[str] = []
    monkeypatch.setattr(PlannedCases, "_measure", lambda self, cut, case, folder: measured.append(cut))
    position = Position(tmp_path, 0)
    PlannedCases.measure(Job(WORK, cases, (1,), 1), cases, tmp_path, position)
    assert measured == ["whole stages", "halves"]
    failure = find_failure(tmp_path, {0: 1})
    assert failure is not None and failure.cut == "halves", "it was the last that was begun"
    measured.clear()
    PlannedCases.measure(Job(WORK, cases, (1,), 1, left_out=(failure,)), cases, tmp_path, position)
    assert measured == ["whole stages"]
