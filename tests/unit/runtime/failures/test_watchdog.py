"""The watch-dog: who ends, with what text, and who is left alone. Several of them in one process, over a real store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from terapipe_ds.runtime.failures import watchdog as module
from terapipe_ds.runtime.failures.report import Wait
from terapipe_ds.runtime.failures.watchdog import PipelineAborted, Watchdog

DEADLINE_S = 20.0
LONG_S = 300.0  # a stall timeout that no test reaches
GLOO_ERROR = "[pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"


# How a thread ends here that would end its process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def store(port: int, is_master: bool) -> Any:
    timeout = timedelta(seconds=60)
    return distributed.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timeout)


class Job:
    """The watch-dogs of a job's ranks. Where a process would end, its exit code is in `exits` instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world_size = 2
        self.server: Any = store(0, is_master=True)
        self.port = self.server.port
        self.exits: list[int] = []
        self.ended = threading.Event()
        self._watchdogs: list[Watchdog] = []
        self.leave = os._exit
        monkeypatch.setattr(distributed, "get_world_size", lambda: self.world_size)
        monkeypatch.setattr(module.os, "_exit", self._exit)
        monkeypatch.setattr(module, "ACKNOWLEDGE_S", 0.1)
        monkeypatch.setattr(module, "LINGER_S", 0.0)
        monkeypatch.setattr(module, "ANSWER_S", 1.0)
        monkeypatch.setattr(module, "HURRIED_ANSWER_S", 0.3)

    def rank(self, rank: int, stall_timeout_s: float = LONG_S, asynchronous: bool = False) -> Watchdog:
        """The watch-dog of a rank; its stage is as high as its rank."""
        client = store(self.port, is_master=False)
        self._watchdogs.append(Watchdog(rank, rank, stall_timeout_s, client, asynchronous))
        return self._watchdogs[-1]

    def wait_for_end(self) -> None:
        assert self.ended.wait(DEADLINE_S), "no watch-dog has ended its process"

    def close(self) -> None:
        for watchdog in self._watchdogs:
            watchdog.close()

    def _exit(self, code: int) -> None:
        self.exits.append(code)
        self.ended.set()
        raise SystemExit(code)  # ends the thread


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Of two ranks, the usual case."""
    job = Job(monkeypatch)
    yield job
    job.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "this never comes true"
        time.sleep(0.01)


def fail(watchdog: Watchdog, error: BaseException, at: str = "F0.1") -> None:
    """A batch of this rank raises."""
    with pytest.raises(type(error)), watchdog.batch():
        watchdog.note(at)
        raise error


class TestFailures:
    def test_a_failure_ends_the_other_rank(self, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.batch():
            waiting.note("F1.0")
            with waiting.waiting("the input of F1.0"):
                fail(failing, ValueError("the layer is broken"))
                job.wait_for_end()
        text = capfd.readouterr().err
        assert "rank 0 (stage 0) ends: it failed at F0.1: ValueError: the layer is broken\n" in text
        assert "rank 1 (stage 1) ends: rank 0 (stage 0) failed at F0.1: ValueError: the layer is broken\n" in text
        assert "This rank was at F1.0, waiting for the input of F1.0." in text
        assert text.count("start the job again from its last checkpoint") == 2
        assert job.exits == [1]

    def test_the_failing_rank_raises_after_the_others_have_read_why(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "ACKNOWLEDGE_S", DEADLINE_S)
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.batch():
            fail(failing, ValueError("broken"))
            assert job.server.add("read", 0) == 2

    def test_ranks_outside_a_batch_are_left_alone_until_the_next_one(self, job: Job) -> None:
        failing, outside = job.rank(0), job.rank(1)
        fail(failing, ValueError("broken"))
        until(lambda: outside._others.failure is not None)
        for watchdog in (outside, failing):
            with pytest.raises(PipelineAborted, match="failed at F0.1: ValueError: broken"), watchdog.batch():
                pytest.fail("the batch has begun")
        assert job.exits == []

    def test_on_a_device_that_runs_behind(self, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
        """The main thread may wait for the device after it has left the batch."""
        job.rank(1, asynchronous=True)
        fail(job.rank(0), ValueError("spam"))
        job.wait_for_end()
        assert "This rank was outside a batch" in capfd.readouterr().err

    def test_alone_the_caller_may_go_on(self, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
        job.world_size = 1
        watchdog = Watchdog(0, 0, LONG_S)
        fail(watchdog, ValueError("broken"))
        with watchdog.batch():
            pass
        watchdog.close()
        assert capfd.readouterr().err == ""


class TestLostConnections:
    def test_the_failure_of_another_rank_is_the_cause(self, job: Job) -> None:
        fail(job.rank(0), ValueError("broken"))
        watchdog = job.rank(1)
        with pytest.raises(PipelineAborted, match=r"rank 0 \(stage 0\) failed at F0.1: ValueError: broken"):
            with watchdog.batch():
                raise RuntimeError(GLOO_ERROR)

    def test_a_runtime_error_of_a_layer_stays_what_it_is(self, job: Job) -> None:
        fail(job.rank(0), RuntimeError("mat1 and mat2 shapes cannot be multiplied"))

    def test_without_the_store_a_rank_that_waits_is_ended(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(module, "LOST_STORE_S", 0.1)
        watchdog = job.rank(1)
        with watchdog.batch(), watchdog.waiting("the input of F0.0"):
            job.server = None
            job.wait_for_end()
        text = capfd.readouterr().err
        assert "rank 1 (stage 1) ends: rank 0, or the launcher that serves the store of the job, is gone" in text

    def test_without_the_store_a_rank_that_works_is_left_alone(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LOST_STORE_S", 0.0)
        watchdog = job.rank(1)
        rounds: list[None] = []
        waits = watchdog._waits_without_store
        monkeypatch.setattr(watchdog, "_waits_without_store", lambda doing: rounds.append(None) or waits(doing))
        with watchdog.batch():
            watchdog.note("ST")
            job.server = None
            until(lambda: watchdog._others.lost_at is not None)
            seen = len(rounds)
            until(lambda: len(rounds) > seen + 1)
        assert job.exits == []


class TestStalls:
    def test_a_rank_that_is_busy_outside_a_batch_is_waited_for(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """It may save a checkpoint. The others give up much later."""
        monkeypatch.setattr(module, "LONG_CALL", 5)
        waiting = job.rank(0, stall_timeout_s=0.4)
        job.rank(1)
        start = time.monotonic()
        with waiting.batch():
            until(lambda: len(job.exits) == 1)
        assert time.monotonic() - start > 5 * 0.4
        text = capfd.readouterr().err
        assert "  rank 1 (stage 1): outside a batch (it has begun 0 batches) for " in text
        assert "no progress for 0.4 s" in text

    def test_a_rank_that_hangs_while_it_draws_data_is_not(self, job: Job) -> None:
        waiting, hanging = job.rank(0, stall_timeout_s=0.6), job.rank(1)
        with waiting.batch(), hanging.batch():
            until(lambda: job.server.check(["state/1"]) and b"the start" in job.server.get("state/1"))
            start = time.monotonic()
            until(lambda: len(job.exits) == 2)
        assert time.monotonic() - start < module.LONG_CALL * 0.6

    def test_a_rank_that_does_not_answer_is_named(self, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
        killed = job.rank(1)
        with killed.batch():
            killed.note("F0.3")
            until(lambda: b"F0.3" in job.server.get("state/1"))
            killed._stop.set()  # its thread is gone, as if it had been killed
            assert killed._thread is not None
            killed._thread.join()
            waiting = job.rank(0, stall_timeout_s=0.3)
            with waiting.batch(), waiting.waiting(Wait("the gradients", (1,))):
                job.wait_for_end()
        text = capfd.readouterr().err
        assert "Stage 1 (rank 1) holds up the job: does not answer" in text
        assert "last seen running F0.3. Ranks that wait for it: 0." in text

    def test_a_rank_that_goes_on_while_the_others_answer_is_left_alone(self, job: Job) -> None:
        slow = job.rank(0, stall_timeout_s=0.3)  # rank 1 is not there: to wait for its sign of life takes a while
        looks: list[None] = []
        look = slow._others.live_states
        slow._others.live_states = lambda wait_s: (looks.append(None), look(wait_s))[1]  # type: ignore[method-assign]
        with slow.batch():
            slow.note("F0.0")
            until(lambda: bool(looks))
            slow.note("F0.1")
        slow.close()
        assert job.exits == []

    def test_a_long_call_outside_a_batch(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(module, "LONG_CALL", 4)
        saving = job.rank(0, stall_timeout_s=0.3)
        job.rank(1)
        start = time.monotonic()
        with saving.long_call("save_checkpoint"):
            job.wait_for_end()
        assert time.monotonic() - start > 4 * 0.3
        text = capfd.readouterr().err
        assert "holds up the job: running save_checkpoint for" in text

    def test_an_error_in_a_long_call_is_the_callers(self, job: Job) -> None:
        saving = job.rank(0)
        with pytest.raises(OSError, match="no space"), saving.long_call("save_checkpoint"):
            raise OSError("no space")
        assert not job.server.check(["abort"])

    def test_no_batch_no_stall(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        watchdog = job.rank(0, stall_timeout_s=1e-6)
        rounds: list[None] = []
        beat = watchdog._others.beat
        monkeypatch.setattr(watchdog._others, "beat", lambda **ended: (rounds.append(None), beat(**ended)))
        until(lambda: len(rounds) > 1)
        assert job.exits == []


class TestSigterm:
    def test_it_is_taken_and_given_back(self, job: Job) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        watchdog, second = job.rank(0), job.rank(1)
        assert signal.getsignal(signal.SIGTERM) == watchdog._sigterm._handle
        second.close()
        assert signal.getsignal(signal.SIGTERM) == watchdog._sigterm._handle
        watchdog.close()
        watchdog.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert _wakeup_descriptor() == -1

    @pytest.mark.parametrize("later", [False, True])
    def test_a_handler_of_the_user_wins(self, later: bool, job: Job) -> None:
        received: list[int] = []
        if later:
            job.rank(0)
        before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        try:
            if not later:
                job.rank(0)
                assert _wakeup_descriptor() == -1
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: received == [signal.SIGTERM])
            job.close()  # after this the thread has read all that there was
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if later else before)
            signal.set_wakeup_fd(-1)
        assert job.exits == []

    def test_a_forked_child_dies_of_its_own_signals(self, job: Job) -> None:
        job.rank(0)
        pid = os.fork()
        if pid == 0:
            untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and _wakeup_descriptor() == -1
            job.leave(0 if untouched else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_a_main_thread_that_asks_the_store_does_not_stand_in_the_way(self, job: Job) -> None:
        """The handler runs in it, in the middle of a question that only one thread may ask at a time."""
        watchdog = job.rank(1)

        def answer(store: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

        before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the main thread waits for itself"))
        signal.alarm(15)
        try:
            watchdog._others._ask(answer)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        job.wait_for_end()
        assert job.exits == [143]

    def test_the_rank_that_died_before_is_named(self, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
        watchdog = job.rank(1)  # there is no rank 0
        with pytest.raises(SystemExit):
            watchdog._terminated()
        assert "Rank 0 (stage -1): does not answer" in capfd.readouterr().err

    def test_a_rank_that_was_terminated_too_has_not_died(self, job: Job, capfd: pytest.CaptureFixture[str]) -> None:
        for rank in (0, 1):
            with pytest.raises(SystemExit):
                job.rank(rank)._terminated()
        text = capfd.readouterr().err
        assert "All ranks are alive." in text[text.index("rank 1 (stage 1) ends") :]


class TestTimer:
    """What ends a process whose watching thread does not run any more."""

    SCRIPT = """
import os, sys, threading, time
from torch import distributed
from terapipe_ds.runtime.failures import watchdog
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
distributed.get_world_size = lambda group=None: 2
watchdog._TIMER_S = 1.0
dog = watchdog.Watchdog(0, 0, 0.1, distributed.HashStore())
{act}
time.sleep(30)
"""

    def run(self, act: str) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-c", self.SCRIPT.format(act=act)], capture_output=True, text=True, timeout=60
        )
        return ended.returncode, ended.stderr

    def test_a_thread_that_blocks(self) -> None:
        """Python's lock is held by native code, or the thread hangs: the timer needs neither."""
        code, text = self.run("import ctypes; ctypes.PyDLL(None).sleep(30)")
        assert code == 1 and "Timeout (0:00:01)!" in text and "most recent call first" in text

    def test_a_thread_that_dies(self) -> None:
        """A forked child has no copy of the timer, which would wait for a thread that it has not: it just ends."""
        code, text = self.run("pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\ndog._judge = None")
        assert code == 1 and "TypeError" in text


class TestEnd:
    def test_closed_again_while_the_interpreter_ends(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """DeepSpeed's ``__del__`` destroys an engine that a script still holds when no thread can run any more."""
        watchdog = job.rank(0)
        thread = watchdog._thread
        watchdog.close()
        assert thread is not None and not thread.is_alive()
        started: list[threading.Thread] = []
        monkeypatch.setattr(threading.Thread, "start", started.append)
        watchdog.close()
        assert not started

    def test_nothing_is_asked_while_the_interpreter_ends(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        watchdog = job.rank(0)
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
        assert watchdog._others._read("state") == {}
        monkeypatch.undo()
        assert set(watchdog._others._read("state")) == {0}


def _wakeup_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor
