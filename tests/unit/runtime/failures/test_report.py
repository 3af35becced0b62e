"""Reports of stalls from states that are made up: who is at fault, and what is said of it. No process, no store."""

import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.runtime.failures import report

STACK = '  File "train.py", line 7, in forward\n    time.sleep(9)\n'


def busy(rank: int, doing: str = "running F0.1", for_s: float = 3.0, **more: object) -> report.RankState:
    return replace(report.RankState(rank, rank, doing, for_s=for_s, batch=4), **more)  # type: ignore[arg-type]


def waiting(rank: int, *ranks: int) -> report.RankState:
    return busy(rank, "at B0.0, waiting for the gradients of B0.0", waits_for_ranks=ranks, is_busy=False)


def job(*states: report.RankState) -> dict[int, report.RankState]:
    return {state.rank: state for state in states}


@pytest.mark.parametrize(("states", "ranks"), [
    (job(waiting(0, 1), busy(1)), [1]),
    (job(waiting(0, 1), waiting(1, 2), busy(2), waiting(3, 2)), [2]),
    # the optimizer of rank 1 hangs: the others reduce with it, or are already at the next batch
    (job(waiting(0), busy(1, "running ST"), waiting(2)), [1]),
    # killed: no sign of life, though it was last seen waiting, or while another is at work
    (job(waiting(0, 1), replace(waiting(1, 0), silent=True)), [1]),
    (job(waiting(0, 1), replace(busy(1), silent=True), busy(2), waiting(3, 2)), [1]),
    # makes fewer steps than the others: done with its engine, or outside a batch
    (job(waiting(0), busy(1, "", ended=report.CLOSED, batch=3)), [1]),
    (job(busy(0, for_s=0.1), waiting(2), busy(1, "", ended=report.CLOSED, batch=3)), [1]),
    (job(waiting(0), busy(1, "")), [1]),
    # one has made all its steps, and the other hangs in the last one
    (job(busy(0, "running ST"), busy(1, "", ended=report.CLOSED)), [0]),
    # one hangs, another only works: it has just begun
    (job(waiting(0, 1), busy(1), busy(2, for_s=0.1), waiting(3, 2)), [1]),
    # two hang
    (job(waiting(0, 1), busy(1), busy(2, for_s=2.9), waiting(3, 2)), [1, 2]),
    # it hangs before others wait for it
    (job(busy(0), busy(1, "")), [0]),
    # wait for each other, or all in one collective
    (job(waiting(0, 1), waiting(1, 0)), []),
])  # fmt: skip
def test_who_is_at_fault(states: dict[int, report.RankState], ranks: list[int]) -> None:
    assert report.at_fault(states) == ranks


@pytest.mark.parametrize(("states", "since_s"), [
    # one waits for long, another works through short actions, in a collective or not
    (job(waiting(0, 1), busy(1, for_s=0.1)), 0.1),
    (job(waiting(0, 1), busy(1, for_s=0.1, is_busy=False), busy(2, for_s=0.5)), 0.1),
    (job(waiting(0), busy(1, "", for_s=0.0)), None),  # outside a batch: nothing comes of that
    (job(waiting(0), busy(1, for_s=2.0), busy(2, for_s=0.1)), None),  # one hangs, another has just begun
    (job(waiting(0), busy(1, for_s=0.1, silent=True)), None),
    (job(waiting(0), busy(1, "", ended=report.CLOSED, batch=3), busy(2, for_s=0.1)), None),
    (job(waiting(0, 1), waiting(1, 0)), None),
    (job(), None),  # the store is gone
])  # fmt: skip
def test_a_job_goes_on_if_a_rank_begins_something(states: dict[int, report.RankState], since_s: float | None) -> None:
    assert report.idle_s(states, 2.0) == since_s


class TestReport:
    def test_the_whole_report(self) -> None:
        recent = (
            report.PastAction("F0.0", "", 10.0, 0.0125), report.PastAction("RG0.0<1", "", 10.1, 0.0),
            report.PastAction("B0.0", "the gradients", 10.2, None),
        )  # fmt: skip
        states = job(replace(waiting(0, 1), recent=recent), busy(1, "running F0.2", stack=STACK))
        assert report.stall_report(states, 2.0, asynchronous=False).splitlines() == [
            "no progress for 2 s (terapipe.stall_timeout_s):",
            "  rank 0 (stage 0): at B0.0, waiting for the gradients of B0.0 for 3.0 s",
            "    before: F0.0 12.5 ms",
            "  rank 1 (stage 1): running F0.2 for 3.0 s",
            "Stage 1 (rank 1) holds up the job: running F0.2 for 3.0 s. Ranks that wait for it: 0.",
            "Rank 1 is here:",
            *STACK.splitlines(),
            "If that stage is only slow, raise the limit.",
        ]

    def test_a_dead_rank_is_not_slow(self) -> None:
        states = job(waiting(0, 1), busy(1, silent=True, stack=STACK, for_s=0.0), waiting(2, 1))
        text = report.stall_report(states, 2.0, asynchronous=False)
        what = "does not answer: its process is gone or stopped; last seen running F0.1. Ranks that wait for it: 0, 2."
        assert f"Stage 1 (rank 1) holds up the job: {what}" in text
        assert STACK not in text and "slow" not in text

    def test_all_wait(self) -> None:
        assert "the same calls in the same order" in report.stall_report(job(waiting(0, 1), waiting(1, 0)), 2.0, False)

    def test_on_a_device_that_runs_behind(self) -> None:
        text = report.stall_report(job(busy(0), waiting(1, 0)), 2.0, asynchronous=True)
        assert "The device runs behind the host" in text
        assert "python -m torch.distributed.flight_recorder.fr_trace" in text

    def test_of_a_large_job_those_at_fault_are_shown(self) -> None:
        states = job(*(waiting(rank, rank + 1) for rank in range(999)), busy(999))
        lines = report.stall_report(states, 2.0, asynchronous=False).splitlines()
        assert len(lines) < 2 * report.SHOWN_RANKS
        assert any(line.startswith("  rank 999 (stage 999): running") for line in lines)
        assert f"  and {999 - report.SHOWN_RANKS} more ranks" in lines


# -- what a rank has written down of itself --------------------------------------------------------------------------


def actions(record: report.RankRecord) -> list[tuple[str, str]]:
    return [(past.action, past.waited_for) for past in record.full().recent]


def test_an_action_that_begins_by_waiting_is_one_entry() -> None:
    record = report.RankRecord(0, 0)
    record.now(report.Doing("F0.0"))
    assert record.now_waits(report.Wait("the input", (1,))) == "F0.0"
    assert not record.brief().is_busy
    assert (record.brief().doing, record.brief().waits_for_ranks) == ("at F0.0, waiting for the input", (1,))
    record.now(report.Doing("F0.0"))
    assert record.full().is_busy
    assert actions(record)[1:] == [("F0.0", "the input"), ("F0.0", "")]


COLLECTIVE = compile("def all_reduce(act):\n    return act()\n", "torch/distributed/distributed_c10d.py", "exec")


def test_a_thread_in_a_collective_waits() -> None:
    names: dict[str, Any] = {}
    exec(COLLECTIVE, names)
    assert not names["all_reduce"](report.RankRecord(0, 0).full).is_busy


def test_a_thread_that_waits_for_a_call_begun_earlier_waits() -> None:
    record, started, end = report.RankRecord(0, 0), threading.Event(), queue.SimpleQueue[None]()
    work = SimpleNamespace(wait=end.get)  # in C, as the wait of torch

    def wait() -> None:
        record.enter(report.Doing("F0.0"))
        started.set()
        work.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    started.wait()
    deadline = time.monotonic() + 10.0
    while record.full().is_busy:
        assert time.monotonic() < deadline
    end.put(None)
    thread.join()


def test_a_stack_can_be_written_down_whatever_its_files_are_called() -> None:
    """Names of files are bytes: what is no UTF-8 in one becomes half a character."""
    names: dict[str, Any] = {"record": report.RankRecord(0, 0)}
    exec(compile("state = record.full()", "/home/jos\udce9/train.py", "exec"), names)
    assert "train.py" in names["state"].stack and report.AS_JSON.dump_json(names["state"])
