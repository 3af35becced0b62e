"""Test that observers never end a training: every disk write of traces and the cache fails once."""

import errno
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.profiling import profiles
from terapipe_ds.timeline import Timeline
from tests.distributed.engines import batches, engine_of, few_rounds, gpt_layers, logged, train, unchecked
from tests.distributed.harness import rank_pool

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)
STEPS, MOST_CHANGES = 2, 24  # rank 0 makes the most changes


@contextmanager
def failing_disk(folder: Path, number: int, error: int) -> Iterator[list[str]]:
    """Let the change `number`, from 0, to files in `folder` fail. Yields the kinds of the changes so far."""
    done: list[str] = []

    def counted(kind: str, function: Callable[..., Any], is_change: Callable[..., bool] = lambda *_: True) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(folder) and is_change(*args[:1]):
                done.append(kind)
                if len(done) - 1 == number:
                    if kind != "write":
                        raise OSError(error, os.strerror(error), os.fspath(path))
                    return io.TextIOWrapper(io.BufferedWriter(Broken(path, "w")), encoding="utf-8")
            return function(path, *args, **kwargs)

        return call

    class Broken(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(error, os.strerror(error))

    fails = {(os, "mkdir"): counted("mkdir", os.mkdir), (os, "replace"): counted("rename", os.replace)}
    fails[os, "open"] = counted("create", os.open, lambda flags: bool(flags & os.O_CREAT))
    fails[io, "open"] = counted("write", io.open, lambda mode="r": "w" in mode)
    with mock.patch.multiple(os, **{name: f for (owner, name), f in fails.items() if owner is os}):
        with mock.patch.object(io, "open", fails[io, "open"]):
            yield done


class Outcome(NamedTuple):
    """Hold the outcome of a training: its bits or its error, its disk changes, its warnings, its whole traces."""

    bits: Any
    error: Exception | None
    done: list[str]
    warned: list[str]
    traces: int
    measured: bool = False


def _trained(folder: Path, number: int, error: int) -> Outcome:
    kept = {"trace_dir": str(folder / "traces"), "planner": {"cache_dir": str(folder / "cache")}}
    terapipe = unchecked(**kept, schedule="auto", slices="auto", granularity_tokens=4)
    bits = raised = None
    with failing_disk(folder, number, error) as done, logged() as said, engine_of(gpt_layers(), terapipe) as engine:
        try:
            run = train(engine, batches(STEPS))
            bits = [run.returned, [p.sum().item() for p in run.parameters.values()]]
        except Exception as caught:
            raised = caught
        traces = list(Path(folder, "traces").glob(f"timeline-*-rank{engine.global_rank:04d}.json"))
    for trace in traces:
        Timeline.load(trace)
    return Outcome(bits, raised, done, [line for line in said if "The training goes on" in line], len(traces))


def _every_change_fails(folder: str, step: int) -> list[Outcome]:
    """Train once as it should be, then once for each change of the disk and error (for each `step`-th of them)."""
    measure, first, asked = profiles.measure_parts, list[Any](), list[bool]()

    def measured_once(*arguments: Any) -> Any:  # so that all have the same plans
        asked.append(True)
        first[:] = first or [measure(*arguments)]
        return first[0]

    with few_rounds(), mock.patch.object(profiles, "measure_parts", measured_once):
        outcomes = [_trained(Path(folder, "healthy"), -1, 0)]
        for number, error in CASES[::step]:
            asked.clear()
            outcome = _trained(Path(folder, f"{number}-{error}"), number, error)
            outcomes.append(outcome._replace(measured=bool(asked)))
    return outcomes


CASES = [(number, error) for error in ERRORS for number in range(MOST_CHANGES)]


@pytest.mark.parametrize("step", [pytest.param(9, id="sample"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_no_failure_of_the_disk_ends_a_training(tmp_path: Path, step: int) -> None:
    of_ranks = rank_pool(2).run(_every_change_fails, folder=str(tmp_path), step=step)
    assert not list(tmp_path.rglob("*.tmp"))
    ends: Counter[str] = Counter()
    for rank, (healthy, *outcomes) in enumerate(of_ranks):
        assert healthy.error is None and not healthy.warned and healthy.traces == STEPS
        assert {*healthy.done} == {"mkdir", "create", "write", "rename"} and len(healthy.done) <= MOST_CHANGES
        for (number, error), outcome, on_rank_0 in zip(CASES[::step], outcomes, of_ranks[0][1:], strict=True):
            case = (rank, number, errno.errorcode[error], outcome)
            if isinstance(outcome.error, TeraPipeConfigError):  # on every rank, before anything is measured
                assert error == errno.EACCES and not outcome.measured and "cache_dir" in str(outcome.error), case
                assert isinstance(on_rank_0.error, TeraPipeConfigError)
                ends[f"rank {rank} refused"] += 1
                continue
            assert outcome.error is None and outcome.bits == healthy.bits, case
            assert len(outcome.warned) == 1 if outcome.traces < STEPS else len(outcome.warned) <= 1, case
            ends[f"rank {rank} {'trained on' if number < len(outcome.done) else 'had no failure'}"] += 1
    print(dict(ends))
    assert ends["rank 0 refused"] and ends["rank 0 trained on"] > 36 // step and ends["rank 1 trained on"] > 18 // step
