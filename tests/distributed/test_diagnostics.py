"""What only observes a training does not end it: every change of the disk that traces and the cache make fails once."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.planning import auto_planner
from terapipe_ds.runtime.profiling import rounds
from terapipe_ds.timeline import Timeline
from tests.distributed.engines import batches, engine_of, gpt_layers, logged, section, train
from tests.distributed.harness import rank_pool

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)
STEPS = 2


class _Broken(io.FileIO):
    """A file that can be opened and not be written."""

    error = 0

    def write(self, data: Any) -> int:
        raise OSError(self.error, os.strerror(self.error))


@contextmanager
def failing_disk(folder: Path, number: int | None, error: int) -> Iterator[list[str]]:
    """Let the change `number`, from 0, of what is in `folder` fail. Yields the changes so far, by their names."""
    done: list[str] = []

    def is_due(name: str, path: Any) -> bool:
        if not Path(os.fsdecode(path)).is_relative_to(folder):
            return False
        done.append(f"{name} {Path(os.fsdecode(path)).name.split('-')[0].lstrip('.')}")
        return number == len(done) - 1

    def counted(name: str, function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and when(*args, **kwargs) and is_due(name, path):
                raise OSError(error, os.strerror(error), os.fspath(path))
            return function(path, *args, **kwargs)

        return call

    opened = io.open

    def open_or_break(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode and isinstance(path, str | os.PathLike) and is_due("write", path):
            broken = _Broken(path, "w")
            broken.error = error
            return io.TextIOWrapper(io.BufferedWriter(broken), encoding="utf-8")
        return opened(path, mode, *args, **kwargs)

    with (
        mock.patch.object(os, "mkdir", counted("mkdir", os.mkdir, lambda *a, **k: True)),
        mock.patch.object(os, "open", counted("create", os.open, lambda flags, *a, **k: bool(flags & os.O_CREAT))),
        mock.patch.object(os, "replace", counted("rename", os.replace, lambda *a, **k: True)),
        mock.patch.object(os, "fsync", mock.Mock(side_effect=AssertionError("a diagnostic that waits for the disk"))),
        mock.patch.object(io, "open", open_or_break),
    ):
        yield done


def _trained(folder: Path, number: int | None, error: int) -> dict[str, Any]:
    """What a training came to whose traces and profiles are in `folder`."""
    traces, cache = folder / "traces", folder / "cache"
    terapipe = section(
        schedule="auto", slices="auto", granularity_tokens=4, trace_dir=str(traces), planner={"cache_dir": str(cache)}
    )
    outcome: dict[str, Any] = {"error": None}
    with (
        failing_disk(folder, number, error) as done,
        logged() as said,
        engine_of(gpt_layers(), terapipe) as engine,
    ):
        try:
            run = train(engine, batches(STEPS))
            outcome["losses"] = [run.returned, [float(p.sum()) for p in run.parameters.values()]]
        except Exception as raised:
            outcome["error"] = raised
        rank = engine.global_rank
    written = list(traces.glob(f"timeline-*-rank{rank:04d}.json"))
    for file in written:
        Timeline.load(file)  # whole
    left = [path.name for path in folder.rglob("*.tmp")]
    warned = [line for line in said if "The training goes on without" in line]
    return {**outcome, "done": done, "warned": warned, "files": len(written), "left": left}


def _every_change_fails(folder: str, step: int) -> list[tuple[int, int, dict[str, Any]]]:
    """Train once as it should be, then once for each change of the disk (each `step`-th) and error."""
    measure, first, asked = auto_planner.measure_parts, list[Any](), list[bool]()
    results: list[tuple[int, int, dict[str, Any]]] = []

    def measured_once(*arguments: Any) -> Any:
        """All trainings have the same costs, so that their plans are the same."""
        asked.append(True)
        if not first:
            first.append(measure(*arguments))
        return first[0]

    with (
        mock.patch.object(rounds, "MAX_ROUNDS", rounds.MIN_ROUNDS),
        mock.patch.object(auto_planner, "measure_parts", measured_once),
    ):
        results.append((-1, 0, _trained(Path(folder, "healthy"), None, 0)))
        cases = [(number, error) for error in ERRORS for number in range(MOST_CHANGES)]
        for number, error in cases[::step]:
            asked.clear()
            case = _trained(Path(folder, f"{number}-{error}"), number, error)
            results.append((number, error, {**case, "measured": len(asked)}))
    return results


MOST_CHANGES = 24  # of rank 0, which has the most


@pytest.mark.parametrize("step", [pytest.param(9, id="sample"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_no_failure_of_the_disk_ends_a_training(tmp_path: Path, step: int) -> None:
    jobs = rank_pool(2).run(_every_change_fails, folder=str(tmp_path), step=step)
    ends: Counter[str] = Counter()
    for rank, results in enumerate(jobs):
        (_, _, healthy), *cases = results
        assert healthy["error"] is None and not healthy["warned"] and healthy["files"] == STEPS
        assert {name.split()[0] for name in healthy["done"]} == {"mkdir", "create", "write", "rename"}
        assert len(healthy["done"]) <= MOST_CHANGES
        for (number, error, case), (_, _, on_rank_0) in zip(cases, jobs[0][1:], strict=True):
            name = case["done"][number] if number < len(case["done"]) else "no change"
            place = (rank, number, errno.errorcode[error], name, case)
            assert not case["left"], place
            if isinstance(case["error"], TeraPipeConfigError):  # on every rank, before anything is measured
                assert error == errno.EACCES and not case["measured"] and "cache_dir" in str(case["error"]), place
                assert isinstance(on_rank_0["error"], TeraPipeConfigError)
                ends[f"rank {rank}: refused before anything is measured"] += 1
                continue
            assert case["error"] is None and case["losses"] == healthy["losses"], place
            assert len(case["warned"]) == 1 if case["files"] < STEPS else len(case["warned"]) <= 1, place
            ends[f"rank {rank}: {'no failure' if name == 'no change' else 'trained on'}"] += 1
    print(dict(ends))
    assert ends["rank 0: refused before anything is measured"] >= 1
    assert ends["rank 0: trained on"] > (3 if step > 1 else 50) and ends["rank 1: trained on"] > 2
