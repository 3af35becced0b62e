"""The watch-dog: who ends, with what text, and who is left alone. Several of them in one process, over a real store."""

import code
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.distributed import get_free_port

from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.failures import last_words, process_end
from terapipe_ds.runtime.failures import watchdog as module
from terapipe_ds.runtime.failures.last_words import PipelineAborted
from terapipe_ds.runtime.failures.process_end import disarm_timer
from terapipe_ds.runtime.failures.report import AS_JSON, DRAWING, Doing
from terapipe_ds.runtime.failures.store import Failure
from terapipe_ds.runtime.failures.watchdog import Watchdog, is_lost_connection

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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.patch, self._capfd = monkeypatch.setattr, capfd
        self.world_size = 2
        self.server: Any = store(0, is_master=True)
        self.port = self.server.port
        self.exits: list[int] = []
        self.ended = threading.Event()
        self._watchdogs: list[Watchdog] = []
        self.leave = os._exit
        monkeypatch.setattr(distributed, "get_world_size", lambda: self.world_size)
        monkeypatch.setattr(process_end.os, "_exit", self._exit)
        monkeypatch.setattr(last_words, "ACKNOWLEDGE_S", 0.1)
        monkeypatch.setattr(module, "LINGER_S", 0.0)
        monkeypatch.setattr(module, "ANSWER_S", 1.0)
        monkeypatch.setattr(module, "HURRIED_ANSWER_S", 0.3)

    def rank(self, rank: int, stall_timeout_s: float = LONG_S, asynchronous: bool = False, **more: Any) -> Watchdog:
        """The watch-dog of a rank; its stage is as high as its rank."""
        client = store(self.port, is_master=False)
        self._watchdogs.append(Watchdog(rank, rank, stall_timeout_s, client, asynchronous, **more))
        return self._watchdogs[-1]

    def kill(self, watchdog: Watchdog) -> None:
        """Stop its thread, as if its process had been killed."""
        watchdog._stop.set()
        assert watchdog._thread is not None
        watchdog._thread.join()

    def wait_for_end(self) -> None:
        assert self.ended.wait(DEADLINE_S), "no watch-dog has ended its process"

    def close(self) -> None:
        for watchdog in self._watchdogs:
            watchdog.close()

    def said(self) -> str:
        """What was printed since the last call."""
        return self._capfd.readouterr().err

    def _exit(self, code: int) -> None:
        disarm_timer()  # of the end, which this is instead
        self.exits.append(code)
        self.ended.set()
        raise SystemExit(code)  # ends the thread


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Job]:
    """Of two ranks, the usual case."""
    job = Job(monkeypatch, capfd)
    yield job
    job.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "this never comes true"
        time.sleep(0.01)


def fail(watchdog: Watchdog, error: BaseException, at: str = "F0.1") -> None:
    """A batch of this rank raises."""
    with pytest.raises(type(error)) as raised, watchdog.batch():
        watchdog.note(at)
        raise error
    assert raised.value is error


class TestFailures:
    def test_a_failure_ends_the_other_rank(self, job: Job) -> None:
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.batch():
            waiting.note("F1.0")
            with waiting.waiting("the input of F1.0"):
                fail(failing, ValueError("the layer is broken"))
                job.wait_for_end()
        text = job.said()
        assert "rank 0 (stage 0) ends: it failed at F0.1: ValueError: the layer is broken\n" in text
        assert "rank 1 (stage 1) ends: rank 0 (stage 0) failed at F0.1: ValueError: the layer is broken\n" in text
        assert "This rank was at F1.0, waiting for the input of F1.0." in text
        assert text.count("start the job again from its last checkpoint") == 2
        assert job.exits == [1]

    def test_an_error_whose_text_raises_is_told_by_its_class(self, job: Job) -> None:
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.batch():
            waiting.note("F1.0")
            fail(failing, Unprintable())
            job.wait_for_end()
        assert "rank 0 (stage 0) failed at F0.1: Unprintable: (its str() raises LookupError)\n" in job.said()

    def test_an_error_as_the_batch_begins_is_published_and_leaves_no_batch_open(self, job: Job) -> None:
        failing, waiting = job.rank(0), job.rank(1)
        enter = failing._record.enter
        job.patch(failing._record, "enter", lambda doing: (enter(doing), {}["gone"]))
        with waiting.batch():
            with pytest.raises(KeyError), failing.batch():
                pass
            job.wait_for_end()
        assert "rank 0 (stage 0) failed at the start of a batch" in job.said() and failing.busy == ""

    def test_the_failing_rank_raises_after_the_others_have_read_why(self, job: Job) -> None:
        job.patch(last_words, "ACKNOWLEDGE_S", DEADLINE_S)
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.batch():
            fail(failing, ValueError("broken"))
            assert job.server.add("read", 0) == 2

    def test_torchrun_finds_why_a_rank_failed(self, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        begin_s = int(time.time())
        fail(job.rank(0), ValueError("the layer is broken"))
        read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
        assert read.message["message"] == "PipelineAborted: it failed at F0.1: ValueError: the layer is broken"
        assert read.message["extraInfo"]["py_callstack"] and begin_s <= read.timestamp <= time.time()

    def test_ranks_outside_a_batch_are_left_alone_until_the_next_one(self, job: Job) -> None:
        failing, outside = job.rank(0), job.rank(1)
        fail(failing, ValueError("broken"))
        until(lambda: outside._others.failure is not None)
        for watchdog in (outside, failing):
            with pytest.raises(PipelineAborted, match="failed at F0.1: ValueError: broken"), watchdog.batch():
                pytest.fail("the batch has begun")
        assert job.exits == []

    def test_on_a_device_that_runs_behind(self, job: Job) -> None:
        """The main thread may wait for the device after it has left the batch."""
        job.rank(1, asynchronous=True)
        fail(job.rank(0), ValueError("spam"))
        job.wait_for_end()
        assert "This rank was outside a batch" in job.said()

    def test_alone_the_caller_may_go_on(self, job: Job) -> None:
        job.world_size = 1
        watchdog = Watchdog(0, 0, LONG_S)
        fail(watchdog, ValueError("broken"))
        with watchdog.batch():
            pass
        watchdog.close()
        assert job.said() == ""


class TestLostConnections:
    def test_the_failure_of_another_rank_is_the_cause(self, job: Job) -> None:
        fail(job.rank(0), ValueError("broken"))
        watchdog = job.rank(1)
        with pytest.raises(PipelineAborted, match=r"rank 0 \(stage 0\) failed at F0.1: ValueError: broken"):
            with watchdog.batch():
                raise RuntimeError(GLOO_ERROR)

    @pytest.mark.parametrize("text", ["mat1 and mat2 shapes cannot be multiplied", "backend gloo: [not] for a layer"])
    def test_a_runtime_error_of_a_layer_stays_what_it_is(self, job: Job, text: str) -> None:
        fail(job.rank(0), RuntimeError(text))

    def test_torch_says_where_in_gloo_it_has_lost_a_connection(self) -> None:
        """By an error that torch itself raises: nobody serves that store."""
        with pytest.raises(RuntimeError) as refused:
            distributed.TCPStore("127.0.0.1", get_free_port(), is_master=False, timeout=timedelta(milliseconds=10))
        assert is_lost_connection(refused.value) and is_lost_connection(RuntimeError(GLOO_ERROR))

    def test_without_the_store_a_rank_that_waits_is_ended(self, job: Job) -> None:
        job.patch(module, "LOST_STORE_S", 0.1)
        watchdog = job.rank(1)
        with watchdog.batch(), watchdog.waiting("the input of F0.0"):
            job.server = None
            job.wait_for_end()
        text = job.said()
        assert "rank 1 (stage 1) ends: rank 0, or the launcher that serves the store of the job, is gone" in text

    def test_without_the_store_a_rank_that_works_is_left_alone(self, job: Job) -> None:
        job.patch(module, "LOST_STORE_S", 0.0)
        watchdog = job.rank(1)
        rounds: list[None] = []
        waits = watchdog._waits_without_store
        job.patch(watchdog, "_waits_without_store", lambda doing: rounds.append(None) or waits(doing))
        with watchdog.batch():
            watchdog.note("ST")
            job.server = None
            until(lambda: watchdog._others.lost_at is not None)
            seen = len(rounds)
            until(lambda: len(rounds) > seen + 1)
        assert job.exits == []


class TestStalls:
    @pytest.mark.parametrize("saves", [False, True])
    def test_what_is_done_outside_a_batch_may_take_longer(self, saves: bool, job: Job) -> None:
        """A rank saves a checkpoint, or waits for one that does."""
        job.patch(module, "LONG_CALL", 5)
        watchdog = job.rank(0, stall_timeout_s=0.4)
        job.rank(1)
        start = time.monotonic()
        with watchdog.long_call("save_checkpoint") if saves else watchdog.batch():
            job.wait_for_end()
        assert time.monotonic() - start > 5 * 0.4
        text = job.said()
        assert "no progress for 0.4 s" in text
        outside = "  rank 1 (stage 1): outside a batch (it has begun 0 batches) for "
        assert ("holds up the job: running save_checkpoint for" if saves else outside) in text

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

    def test_a_rank_may_wait_while_another_goes_on(self, job: Job) -> None:
        """As while the stage before it checks layer after layer. Then that one hangs, and it alone is named."""
        limit_s = 2.0
        waiting, working = job.rank(0, limit_s), job.rank(1, LONG_S)
        with waiting.batch(), waiting.waiting("the check of part 0"), working.batch():
            for layer in range(9):
                working.note(f"verifying layer {layer}")
                time.sleep(0.3)
            assert job.exits == []
            job.wait_for_end()
        assert "no progress for 2 s" in (text := job.said())
        assert "Stage 1 (rank 1) holds up the job: running verifying layer 8" in text

    @pytest.mark.parametrize("is_held", [False, True])
    def test_time_for_which_the_processes_were_stopped_is_no_stall(self, is_held: bool, job: Job) -> None:
        """As in a suspended job. A main thread that holds the interpreter's lock does not stop the process."""
        wall, wait, stopped_s = time.monotonic, process_end.Sigterm.wait, [0.0]
        begin, end = threading.Barrier(2), threading.Barrier(2, lambda: stopped_s.append(LONG_S + 10.0))
        waited: set[Any] = set()

        def stopped(sigterm: Any) -> bool:
            if sigterm in waited:
                return wait(sigterm)
            waited.add(sigterm)
            begin.wait(DEADLINE_S)
            end.wait(DEADLINE_S)
            return False

        first, second = job.rank(0), job.rank(1)
        with first.batch(), second.batch(), first.waiting("F0.0"):
            second.note("F0.0")
            job.patch(time, "monotonic", lambda: wall() + stopped_s[-1])
            job.patch(module, "_switches", lambda: int(is_held * 200 * stopped_s[-1]))
            job.patch(process_end.Sigterm, "wait", stopped)
            assert job.ended.wait(DEADLINE_S if is_held else 2.0) == is_held
        assert len(waited) == 2

    def test_an_action_that_begins_after_the_stop_has_the_usual_limit(self, job: Job) -> None:
        """The main thread may go on before the watching one."""
        wall, stopped_s, is_noted = time.monotonic, [0.0], threading.Event()

        def stopped(sigterm: Any) -> bool:
            if not is_noted.is_set():
                stopped_s.append(1000 * DEADLINE_S)
                first._record.now(Doing("F0.1", since_s=time.monotonic()))
                is_noted.set()
            time.sleep(process_end.POLL_S)
            return False

        first = job.rank(0, stall_timeout_s=1.0)
        with first.batch(), first.waiting("F0.0"):
            job.patch(module, "_switches", lambda: 0)
            job.patch(time, "monotonic", lambda: wall() + stopped_s[-1])
            job.patch(process_end.Sigterm, "wait", stopped)
            job.wait_for_end()
        assert is_noted.is_set() and "F0.1" in job.said()

    def test_a_stop_moves_the_end_of_an_excused_wait_too(self, job: Job) -> None:
        """The action itself began longer ago than the limit."""
        watchdog, wall, stopped_s = job.rank(0), time.monotonic, [0.0]
        job.kill(watchdog)
        with watchdog.batch():
            doing = Doing("F0.0", since_s=time.monotonic() - 2 * LONG_S)
            watchdog._record.now(doing)
            watchdog._excused_at = time.monotonic()
            job.patch(module, "_switches", lambda: 0)
            job.patch(time, "monotonic", lambda: wall() + stopped_s[-1])
            job.patch(process_end.Sigterm, "wait", lambda _: stopped_s.append(10 * LONG_S))
            watchdog._listen()
            assert not watchdog._has_stalled(doing)

    def test_two_ranks_that_see_one_stall_tell_one_cause(self, job: Job) -> None:
        """Each has asked all ranks at a moment of its own; what the first found is the cause for both."""
        second, first = job.rank(0, stall_timeout_s=0.3), job.rank(1)
        ask = second._others.live_states

        def asked(wait_s: float) -> Any:
            states = ask(wait_s)
            first._others.publish_failure(Failure(1, 1, "F0.1", "no progress: the first report", stalled=True))
            return states

        second._others.live_states = asked  # type: ignore[method-assign]
        with second.batch(), first.batch():
            second.note("F0.0")
            job.wait_for_end()
        text = job.said()
        assert "rank 0 (stage 0) ends: rank 1 (stage 1) reports no progress: the first report\n" in text
        assert "This rank was running F0.0." in text and "holds up the job" not in text

    @pytest.mark.parametrize("outside", [True, False])
    def test_a_rank_that_is_lost_while_a_batch_begins_is_not_waited_for(self, outside: bool, job: Job) -> None:
        """Though it was outside a batch or drew data, where ranks may be for long; another rank still is."""
        job.patch(module, "LONG_CALL", 1000)
        job.world_size = 3
        busy, lost, waiting = job.rank(1), job.rank(2), job.rank(0, stall_timeout_s=1.0)
        with waiting.batch(), busy.batch(), busy.drawing(), nullcontext() if outside else lost.batch():
            with nullcontext() if outside else lost.drawing():
                until(lambda: waiting._others.is_one(DRAWING))
                job.kill(lost)
                start = time.monotonic()
                until(lambda: len(job.exits) > 0)
                assert time.monotonic() - start < 1.0 + 5.0
        assert "Stage 2 (rank 2) holds up the job: does not answer" in (text := job.said())
        assert "s ago." in text and "rank 1 (stage 1): running drawing data" in text

    def test_a_rank_that_is_lost_while_all_others_draw_data(self, job: Job) -> None:
        drawing, lost = job.rank(0, stall_timeout_s=1.0, data_timeout_s=LONG_S), job.rank(1)
        with drawing.batch(), drawing.drawing(), lost.batch():
            until(lambda: 1 in drawing._others._beats_of)
            job.kill(lost)
            job.wait_for_end()
        text = job.said()
        assert "no progress for 1 s (terapipe.stall_timeout_s)" in text and "rank 1 (stage 1): does not answer" in text

    def test_data_may_take_longer_than_other_things(self, job: Job) -> None:
        drawing, waiting = job.rank(1, 1.0, data_timeout_s=3.0), job.rank(0, 1.0)
        with waiting.batch(), drawing.batch():
            start = time.monotonic()
            with drawing.drawing():
                until(lambda: len(job.exits) == 2)
        assert 3.0 < time.monotonic() - start < 3.0 + 5.0
        text = job.said()
        warned = r"rank 1 \(stage 1\) has waited \d s for the data iterator, and ends the job after 3 s \(terapipe.data"
        assert len(re.findall(warned, text)) == 1 and "in test_data_may_take" in text[: text.index("ends: ")]
        assert "rank 1 (stage 1) ends: no progress for 3 s (terapipe.data_timeout_s):" in text
        assert "Stage 1 (rank 1) holds up the job: running drawing data from the iterator for" in text

    def test_after_slow_data_a_rank_waits_as_long_as_ever(self, job: Job) -> None:
        drawing, waiting = job.rank(1, 1.0, data_timeout_s=60.0), job.rank(0, 1.0)
        with waiting.batch(), drawing.batch():
            with drawing.drawing():
                time.sleep(2.0)
            end = time.monotonic()
            until(lambda: len(job.exits) == 2)
        assert 1.0 < time.monotonic() - end < module.LONG_CALL * 1.0

    def test_an_error_of_all_ranks_in_a_long_call_is_the_callers(self, job: Job) -> None:
        saving = job.rank(0)
        job.server.add("raised/1", 1)  # the other rank
        with pytest.raises(OSError, match="no space"), saving.long_call("save_checkpoint"):
            raise OSError("no space")
        assert not job.server.check(["abort"])

    def test_an_error_of_one_rank_in_a_long_call_ends_the_others(self, job: Job) -> None:
        job.patch(module, "AGREE_S", 0.3)
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.long_call("save_checkpoint"):
            with pytest.raises(OSError, match="no space"), failing.long_call("save_checkpoint"):
                raise OSError("no space")
            job.wait_for_end()
        assert "rank 1 (stage 1) ends: rank 0 (stage 0) failed at save_checkpoint: OSError: no space" in job.said()

    @pytest.mark.parametrize("call", ["batch", "load_checkpoint", "done"])
    def test_a_call_that_one_rank_makes_alone_ends_the_job_soon(self, job: Job, call: str) -> None:
        saving, other = job.rank(0), job.rank(1)
        if call == "done":
            other.close()
        with saving.long_call("save_checkpoint"):
            with nullcontext() if call == "done" else other.batch() if call == "batch" else other.long_call(call):
                job.wait_for_end()
        place = "in a batch" if call == "batch" else "done" if call == "done" else f"in {call}"
        said = f"rank 0 is in save_checkpoint, and ranks [1] are {place}: this call waits for all ranks. Make the same"
        twin = f"rank 1 is in {call}, and ranks [0] are in save_checkpoint: "
        text = job.said()
        assert said in text or twin in text, text

    def test_a_rank_that_leaves_a_call_last_is_left_alone(self, job: Job) -> None:
        last, first = job.rank(0), job.rank(1)
        with first.long_call("save_checkpoint"):
            pass
        looks, elsewhere = list[bool](), last._others.elsewhere  # each tells whether the batch of the other was known

        def look(doing: Any) -> Any:
            looks.append(last._others._beats_of[1].batches == 1)
            return elsewhere(doing)

        job.patch(last._others, "elsewhere", look)
        with last.long_call("save_checkpoint"), first.batch():
            until(lambda: looks.count(True) > 1)
        assert job.exits == [] and job.said() == ""

    def test_an_error_outside_the_engine_is_published_when_it_ends_the_program(self, job: Job) -> None:
        failing, waiting = job.rank(0), job.rank(1)
        with waiting.batch():
            job.patch(sys, "last_value", _uncaught(KeyError("the user's own")), raising=False)
            failing._at_exit()
            job.wait_for_end()
        assert 'rank 0 (stage 0) failed at work outside the engine: KeyError: "the user\'s own"' in job.said()

    def test_a_rank_that_loses_the_failed_one_outside_the_engine_says_why_that_one_failed(self, job: Job) -> None:
        failing, losing = job.rank(0), job.rank(1)
        job.patch(sys, "last_value", _uncaught(KeyError("the user's own")), raising=False)
        failing._at_exit()
        job.said()
        job.patch(sys, "last_value", _uncaught(RuntimeError(GLOO_ERROR)))
        losing._at_exit()
        said = job.said()
        assert "rank 1 (stage 1) ends: rank 0 (stage 0) failed at work outside the engine: KeyError:" in said, said

    def test_an_error_on_all_ranks_is_not_published_again_at_the_end(self, job: Job) -> None:
        watchdog, error = job.rank(0), ValueError("on all")
        with pytest.raises(RaisedEverywhere), watchdog.batch():
            raise RaisedEverywhere(error)
        wrapped = _uncaught(RuntimeError("the user's own of it"))
        wrapped.__cause__ = error
        for one in (_uncaught(error), wrapped):
            job.patch(sys, "last_value", one, raising=False)
            assert not module._ends_program_of_this_rank(one)
        watchdog._at_exit()
        assert not job.server.check(["abort"]) and not job.said()

    def test_an_error_that_a_console_or_code_in_c_has_caught_is_not_published_at_the_end(self, job: Job) -> None:
        code.InteractiveInterpreter().runcode(compile("1 / 0", "<console>", "exec"))
        assert isinstance(sys.last_value, ZeroDivisionError)
        job.rank(0)._at_exit()
        assert not job.server.check(["abort"]) and "terapipe_ds" not in job.said()

    def test_no_batch_no_stall(self, job: Job) -> None:
        watchdog = job.rank(0, stall_timeout_s=1e-6)
        rounds: list[None] = []
        beat = watchdog._others.beat
        job.patch(watchdog._others, "beat", lambda **ended: (rounds.append(None), beat(**ended)))
        until(lambda: len(rounds) > 1)
        assert job.exits == []


def _uncaught(error: Exception) -> Exception:
    """Return `error` as it leaves the main program: its traceback begins in the outermost frame."""
    outermost = inspect.currentframe()
    while outermost is not None and outermost.f_back is not None:
        outermost = outermost.f_back
    assert outermost is not None
    return error.with_traceback(types.TracebackType(None, outermost, 0, 1))


class TestSigterm:
    def test_it_is_taken_and_given_back(self, job: Job) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        watchdog, second = job.rank(0), job.rank(1)
        for one in (watchdog, second, watchdog):  # the engine that runs has it
            with one.batch():
                assert signal.getsignal(signal.SIGTERM) == one._sigterm._handle
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
            assert _wakeup_descriptor() == -1
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if later else before)
        assert job.exits == []

    def test_it_is_not_lost_while_the_engine_closes(self, job: Job) -> None:
        watchdog, beats, go_on = job.rank(0), threading.Event(), threading.Event()
        job.patch(watchdog._others, "beat", lambda **_: (beats.set(), go_on.wait()))
        assert beats.wait(DEADLINE_S)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.1, go_on.set).start()
        watchdog.close()
        assert job.exits == [143]

    def test_other_signals_do_not_end_the_wait_for_it(self, job: Job) -> None:
        """A profiler may send hundreds a second; each end of the wait is followed by questions to the store."""
        sigterm, received = process_end.Sigterm(lambda: None), iter([bytes([signal.SIGALRM]), bytes([signal.SIGTERM])])
        job.patch(sigterm, "_receiver", SimpleNamespace(settimeout=float, recv=lambda _: next(received)))
        assert sigterm.wait()
        sigterm.remove()

    def test_a_forked_child_dies_of_its_own_signals(self, job: Job) -> None:
        """Even of one that comes before the child has given up what it shares with this process."""
        job.rank(0)
        remove, parent = process_end.Sigterm.remove, os.getpid()

        def struck(sigterm: process_end.Sigterm) -> None:
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
            remove(sigterm)

        job.patch(process_end.Sigterm, "remove", struck)
        pid = os.fork()
        if pid == 0:
            job.leave(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        job.close()
        assert job.exits == []

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

    def test_a_forked_child_does_not_hold_the_connections_of_the_store(self, job: Job) -> None:
        """It may outlive a killed rank, whose end nobody would see then."""
        process_end.keep_from_children(job.port)
        job.rank(0)
        pid = os.fork()
        if pid == 0:
            job.leave(sum(job.port in _ports_of(name) for name in os.listdir("/dev/fd")))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert sum(job.port in _ports_of(name) for name in os.listdir("/dev/fd")) >= 3  # listens; both ends
        assert job.server.check(["beat/0"])

    def test_the_rank_that_died_before_is_named(self, job: Job) -> None:
        """There is no rank 0; then there is no rank 1, but that one has been terminated."""
        for rank, said in ((1, "Rank 0 (stage -1): does not answer"), (0, "All ranks are alive.")):
            with pytest.raises(SystemExit):
                job.rank(rank)._terminated()
            assert said in job.said()


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise LookupError("no text")


class TestTimer:
    """What ends a process whose watching thread does not run any more."""

    SCRIPT = """
import os, sys, threading, time
from torch import distributed
from terapipe_ds.runtime.failures import watchdog
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
distributed.get_world_size = lambda group=None: 2
watchdog._TIMER_S = {timer_s}
store = distributed.TCPStore("127.0.0.1", int(sys.argv[1]), wait_for_workers=False) if sys.argv[1:] else None
dog = watchdog.Watchdog(0, 0, 0.1, store or distributed.HashStore(), data_timeout_s=1.0)
{act}
time.sleep(30)
"""

    def run(
        self, act: str, *arguments: str, stderr: int = subprocess.PIPE, timer_s: float = 1.0, limit_s: int = 25
    ) -> tuple[int, str]:
        command = [sys.executable, "-c", self.SCRIPT.format(act=act, timer_s=timer_s), *arguments]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True, timeout=limit_s)
        return ended.returncode, ended.stderr

    def test_a_thread_that_blocks(self) -> None:
        """Python's lock is held by native code, or the thread hangs: the timer needs neither."""
        code, text = self.run("import ctypes; ctypes.PyDLL(None).sleep(30)")
        assert code == 1 and "Timeout (0:00:01)!" in text and "most recent call first" in text

    def test_a_thread_that_dies(self) -> None:
        """A forked child has no copy of the timer, which would wait for a thread that it has not: it just ends."""
        act = "dog._judge = sys.exit; dog._thread.join()\npid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)"
        code, text = self.run(act)
        assert code == 1 and "Timeout (0:00:01)!" in text

    def test_a_forked_child_ends_at_once_whatever_its_parent_did(self) -> None:
        """Its copies of the watch-dog and of gloo's group have no threads; the parent's may have had any lock then."""
        act = """
def child(*locks, end=sys.exit):
    for lock in locks: lock.acquire()
    began, pid = time.monotonic(), os.fork()
    if pid == 0: end(7)
    for lock in locks: lock.release()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - began
def of_python(code):
    import atexit
    atexit._clear(); sys.exit(code)
def of_group(code):
    distributed.destroy_process_group(); sys.exit(code)
plain_s = child(end=of_python)[1]  # of the interpreter alone
codes, seconds = zip(child(), child(dog._others._turn), child(dog._stop._cond), child(end=of_group))
tries = [seconds[0]]
while min(tries) - plain_s >= 0.5 and len(tries) < 5: tries.append(child()[1])  # other programs may delay some
print(codes, min(tries) - plain_s < 0.5, tries, file=sys.stderr); dog.close(); os._exit(0)"""
        # a child that hangs does so for ever, and six interpreters end one after the other
        code, text = self.run(act, timer_s=200.0, limit_s=100)
        assert code == 0 and "(7, 7, 7, 7) True" in text, text

    def test_a_thread_that_fails_goes_on_and_ends_what_hangs(self) -> None:
        code, text = self.run("dog._judge = None; time.sleep(2)\nwith dog.batch(): time.sleep(30)", timer_s=60.0)
        assert code == 1 and text.count("TypeError: 'NoneType' object is not callable") == 1
        assert "rank 0 (stage 0) ends: it has been running the start of a batch" in text and "Timeout" not in text

    def test_a_socket_whose_reader_stands_still(self) -> None:
        reader, writer = socket.socketpair()
        with reader, writer:
            act = self.FULL_PIPE + "os.set_blocking(2, True); dog._judge = sys.exit"
            assert self.run(act, stderr=writer.fileno())[0] == 1

    FULL_PIPE = "os.set_blocking(2, False)\ntry:\n while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: pass\n"

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        "stderr", ["closed", "full", "blocked", "no descriptors", "no threads", "replaced", "a last word that fails"]
    )
    def test_what_is_printed_does_not_delay_the_end(self, stderr: str, job: Job) -> None:
        """The others learn why, and the process ends, though nothing of it can be read."""
        acts = {
            "blocked": self.FULL_PIPE + "os.set_blocking(2, True); sys.stdout = open(2, 'w'); sys.stdout.write('x')",
            "no descriptors": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
            "no threads": 'def no(*_, **__): raise RuntimeError("can\'t start new thread")\n'
            "watchdog.arm_timer = threading.Thread.start = no",
            "a last word that fails": "dog._data_timeout_s = 1e9; dog._others.wait_until_read = None",
            "replaced": "sys.stderr = sys.stdout = type('Log', (), {'write': print})()",
        }
        reader, writer = os.pipe()
        if stderr == "closed":
            os.close(reader)
        to = {"full": os.open("/dev/full", os.O_RDWR), "closed": writer, "blocked": writer}.get(stderr, subprocess.PIPE)
        act = acts.get(stderr, "") + "\nwith dog.batch(), dog.waiting('the input'): time.sleep(30)"
        start = time.monotonic()
        code, text = self.run(act, str(job.port), stderr=to, timer_s=60.0)
        assert code == 1 and time.monotonic() - start < 20.0, text  # ten of them to start
        assert job.server.check(["abort"]), text
        assert b"no progress for 0.1 s" in job.server.get("abort")
        assert text is None or "rank 0 (stage 0) ends: no progress for 0.1 s" in text


class TestEnd:
    def test_a_closed_watchdog_that_is_still_referred_to_keeps_no_file_open(self, job: Job) -> None:
        job.rank(0).close()  # opens what every process opens once
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(5):
            job.rank(1).close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= len(before))  # the server drops its ends a moment later

    def test_what_is_printed_and_what_others_print_share_a_file(self, tmp_path: Path) -> None:
        """Launchers give a rank a file that is not opened to append."""
        script = "import sys; from terapipe_ds.runtime.failures.process_end import Stderr; stderr = Stderr()\n"
        script += "for name in 'abc': stderr.write(name); print(name, end='', file=sys.stderr, flush=True)"
        with open(tmp_path / "log", "w") as log:
            subprocess.run([sys.executable, "-c", script], stderr=log, check=True)
        assert (tmp_path / "log").read_text().endswith("aabbcc")

    def test_closed_again_while_the_interpreter_ends(self, job: Job) -> None:
        """DeepSpeed's ``__del__`` destroys an engine that a script still holds when no thread can run any more."""
        watchdog = job.rank(0)
        thread = watchdog._thread
        watchdog.close()
        assert thread is not None and not thread.is_alive()
        started: list[threading.Thread] = []
        job.patch(threading.Thread, "start", started.append)
        watchdog.close()
        assert not started

    def test_nothing_is_asked_while_the_interpreter_ends(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        watchdog = job.rank(0)
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
        assert watchdog._others._read("state", AS_JSON) == {}
        monkeypatch.undo()
        assert set(watchdog._others._read("state", AS_JSON)) == {0}


def _wakeup_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


def _ports_of(name: str) -> set[int]:
    try:
        return process_end._ports(int(name))
    except OSError:  # it is no socket
        return set()
