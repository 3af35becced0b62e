"""Run a thread per rank that ends the job instead of letting it hang.

A rank that raises in the middle of a batch leaves its neighbours waiting for messages that never come; gloo cannot give
up such a wait without closing the connection. So each rank runs one daemon thread, which publishes the rank's actions:

- a rank that fails publishes the reason and waits a moment until the others have read it, before it raises;
- the thread of every other rank that is inside a batch prints it, and ends the process with exit code 1;
- a rank whose batch makes no progress for `stall_timeout_s` ends the job with a report of the present and last actions
  of every rank; the user's iterator may take `data_timeout_s`, and other calls outside a batch more, while all ranks
  give signs of life;
- a rank that loses a connection, or that the launcher ends (SIGTERM) because another rank died silently, names the
  ranks that give no sign of life.

The thread prints its own errors and goes on. If it stops running, a timer in C ends the process.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import resource
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.messages import describe, text_of
from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.failures.last_words import ACKNOWLEDGE_S, LastWords, PipelineAborted
from terapipe_ds.runtime.failures.process_end import POLL_S, Sigterm, disarm_timer
from terapipe_ds.runtime.failures.report import CLOSED, DRAWING, OUTSIDE, Doing, RankRecord, Wait, idle_s, stall_report
from terapipe_ds.runtime.failures.store import Failure, WatchStore, make_store

LINGER_S = 2.0  # time for it to print its traceback: launchers end it soon after the others
AGREE_S = 10.0  # time for all ranks to raise from a long call
ANSWER_S = 3.0  # after this time a rank without a sign of life counts as gone
HURRIED_ANSWER_S = 1.0  # the same if the launcher is about to end this rank, too
LONG_CALL = 6  # limit for a call outside a batch, in stall timeouts (half an hour by default)
LOST_STORE_S = 5.0  # even at the end of a good run, rank 0 may be gone a little before the others
_SLOW = 0.25  # of the stall timeout: a longer action is published with its stack
_STOPPED_S, _SWITCHES_PER_S = 1.0, 50.0  # at least and at most; a thread that waits for the interpreter makes 200
_TIMER_S = 60.0  # at least
_MAX_COMPLAINTS = 20
_OPENING = "the start of a batch (drawing data, hearing from the other stages)"
_OUTSIDE = "work outside the engine"
_AGREED = "_terapipe_agreed"  # attribute of an error that every rank raises
_GLOO_ERROR = re.compile(r"\[[^\]\n]*gloo/(?:transport|rendezvous)/[^\]\n]*:\d+\]")  # it begins with its place in gloo


class Watchdog:
    """Watch the main thread of this rank and the other ranks. One per engine; a collective to build."""

    def __init__(
        self,
        rank: int,
        stage_id: int,
        stall_timeout_s: float,
        store: Any | None = None,  # for tests; a clone of the default store otherwise
        asynchronous: bool = False,  # the device runs behind the host, which may wait for it outside a batch, too
        trace_dir: str | None = None,  # each rank leaves its last actions there when the job fails
        data_timeout_s: float = 1800.0,  # of the user's iterator
    ) -> None:
        self._rank = rank
        self._stall_timeout_s, self._data_timeout_s = stall_timeout_s, data_timeout_s
        self._asynchronous = asynchronous
        self._record = RankRecord(rank, stage_id)
        self.note = self._record.note  # notes an action of this rank; cheap, since it is called for each
        self.waits = self._record.now_waits  # remembers that the action waits, until it is noted again; cheap, too
        self.claim = self._record.claim
        self._words = LastWords(self._record, trace_dir)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._excused_at = -math.inf  # when another rank last had a reason to let this one wait
        self._warned_of: Doing | None = None
        self._complaints: set[str] = set()
        self._world_size, self._pid = torch_dist.get_world_size(), os.getpid()
        # One rank alone waits for no other: no thread, no store, no timer
        if store is None and self._world_size > 1:
            store = make_store()
        self._others = WatchStore(store, self._record, self._world_size, _SLOW * stall_timeout_s, self._words.remark)
        if self._world_size > 1:
            self._arm()
            self._others.beat()
            self._sigterm = Sigterm(self._words.hurry)
            self._thread = threading.Thread(target=self._watch, name="terapipe-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit)  # a thread inside the store's client must not meet the interpreter's end

    # -- called by the engine, in the main thread ----------------------------------------------------------------

    @property
    def busy(self) -> str:
        """Return this rank's action in a call of the engine; "" outside."""
        return self._record.busy

    def _failure_of_others(self) -> Failure | None:
        """Return the failure that ended the job, if another rank was the first to publish one."""
        failure = self._others.failure
        return None if failure is None or failure.rank == self._rank else failure

    def batch(self) -> AbstractContextManager[None]:
        """Watch a batch, in which this rank waits for others. Publish an exception in it, except `RaisedEverywhere`."""
        failure = self._others.failure
        if failure is not None:
            if self._words.are_mine():
                self._words.tell(self._others, str(failure))
            raise PipelineAborted(str(failure))
        return self._watched(Doing(_OPENING, opening=True))

    def long_call(self, what: str) -> AbstractContextManager[None]:
        """Watch a call outside a batch in which ranks wait for one another, for `LONG_CALL` times `stall_timeout_s`.

        All ranks raise an `Exception` on which they have agreed, and may go on. Any other error ends the job: one that
        not all ranks raise soon, and anything that is no `Exception` (Ctrl-C).
        """
        self.claim(f"{what}()", moves=False)
        return self._watched(Doing(what, is_long=True))

    def drawing(self) -> AbstractContextManager[None]:
        """Watch a wait in the user's iterator, within a batch, for `data_timeout_s`."""
        return self._record.aside(Doing(DRAWING, draws=True))

    @contextmanager
    def _watched(self, doing: Doing) -> Iterator[None]:
        if self._thread is not None:  # of several engines this one can tell what the rank is doing
            self._sigterm.take()
        try:
            self._record.enter(doing)
            yield
        except RaisedEverywhere as agreed:
            vars(agreed.error)[_AGREED] = True
            raise
        except BaseException as error:
            if isinstance(error, MemoryError):  # the frames that it holds may hold all memory, and a report needs some
                traceback.clear_frames(error.__traceback__)
            # A lost connection is the consequence of another rank's end: report this cause
            aborted = self._caused_by_others(error)
            if aborted is not None:
                self._fail(aborted)
                raise aborted from error
            # Ranks agree on most exceptions of long calls; after another one they wait in the call that this rank left
            if doing.is_long and isinstance(error, Exception) and self._is_on_all_ranks():
                vars(error)[_AGREED] = True
            else:
                self._fail(error)
            raise
        finally:
            self._record.now(Doing(""))

    @contextmanager
    def waiting(self, what: Wait | str) -> Iterator[None]:
        """Watch a blocking wait; `what` names the message and its senders. After an exception it stays noted."""
        action = self._record.now_waits(what if isinstance(what, Wait) else Wait(what))
        yield
        self.note(action)

    def close(self) -> None:
        """Stop the thread: the engine is done. Another call, as late as the interpreter's end, does nothing."""
        if self._thread is None or self._pid != os.getpid():  # a forked child has no thread to stop, and ends at once
            return
        self._sigterm.remove()  # only the main thread can do this, perhaps in a second call
        if self._stop.is_set():
            return
        atexit.unregister(self._at_exit)
        self._stop.set()
        self._sigterm.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        disarm_timer()
        if not self._thread.is_alive():
            self._others.beat(ended=CLOSED)
            self._others.close()
            self._words.close()
            self._sigterm.close()

    def _at_exit(self) -> None:
        """Publish an exception that ends the program outside the engine's calls, such as the user's own, and close."""
        try:
            error = getattr(sys, "last_value", None)
            is_told = self._stop.is_set() or self._pid != os.getpid() or self._words.are_said
            if isinstance(error, BaseException) and not is_told and _ends_program_of_this_rank(error):
                # in a collective of the program's own it may have lost the rank that failed
                aborted = self._caused_by_others(error)
                if aborted is not None or self._others.failure is None:
                    self._fail(aborted or error)
        finally:  # even after Ctrl-C
            self.close()

    # -- a failure of this rank, in the main thread -----------------------------------------------------------------

    def _is_on_all_ranks(self) -> bool:
        """Return whether all ranks raise from the present long call, soon after one another."""
        wait_s = min(AGREE_S, self._stall_timeout_s)
        name = f"raised/{self._record.long_call[0]}"
        return self._thread is None or self._others.have_come(name, self._world_size, wait_s)

    def _caused_by_others(self, error: BaseException) -> PipelineAborted | None:
        """Return `error` as the consequence of another rank's end; None if it is this rank's own."""
        if not isinstance(error, RuntimeError):  # backends raise nothing else
            return None
        self._others.beat()
        # The rank that ended may have said why
        if (failure := self._failure_of_others()) is not None:
            return PipelineAborted(str(failure))
        if not is_lost_connection(error):
            return None
        # Otherwise ask which ranks still give signs of life
        doing = self._record.doing
        whose = f" while waiting for {doing.wait.text}" if doing.wait else f" at {doing.action or _OUTSIDE}"
        return PipelineAborted(
            f"lost the connection to another rank{whose}: it has ended without a report, or destroyed its engine. "
            f"{self._lost_ranks(ANSWER_S, or_ended=True)}Its own output and exit code tell more: it was killed (out "
            "of memory?), or makes fewer steps than this rank"
        )

    def _lost_ranks(self, wait_s: float, or_ended: bool = False) -> str:
        """Return sentences that name the ranks that give no sign of life or are done; "" without any.

        With `or_ended` and none of these, name those that SIGTERM has ended: launchers send it to all if one has died.
        """
        if self._world_size == 1:
            return ""
        # A failure that arrives during the wait tells more
        states = self._others.live_states(wait_s).values()
        if self._others.failure is not None:
            return f"{self._others.failure}. "
        if not states:
            return "Rank 0, or the launcher that serves the store of the job, is gone. "
        named = [state for state in states if state.silent or state.ended == CLOSED]
        if or_ended and not named:
            named = [state for state in states if state.ended]
        return "".join(f"Rank {state.rank} (stage {state.stage_id}): {state.describe()}. " for state in named)

    def _fail(self, error: BaseException) -> None:
        if self._thread is None:  # alone: the caller may go on
            return
        text = str(error) if isinstance(error, PipelineAborted) else describe(error)
        action = self._record.doing.action or _OUTSIDE
        said = text if isinstance(error, PipelineAborted) else f"it failed at {action}: {text}"
        if self._words.are_mine():
            self._words.tell(self._others, said, Failure(self._rank, self._record.stage_id, action, text))
        else:  # the thread ends this process; one more traceback would hide the one that tells more
            self._stop.wait(ACKNOWLEDGE_S + LINGER_S)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.is_set():
            for part in (self._arm, self._others.beat, self._judge, self._listen):
                try:
                    part()
                except Exception:
                    self._go_on(is_blind=part == self._judge)
        disarm_timer()

    def _arm(self) -> None:
        self._words.arm(max(_TIMER_S, LONG_CALL * self._stall_timeout_s))

    def _listen(self) -> None:
        begin_s, switches = time.monotonic(), _switches()
        is_ended = self._sigterm.wait()
        # The time for which the process was stopped (Ctrl-Z, a suspended job) is no stall. A thread that waits for the
        # interpreter, which another one does not let go, looks for it all the time
        stopped_s = time.monotonic() - begin_s - POLL_S
        if stopped_s > _STOPPED_S and _switches() - switches < _SWITCHES_PER_S * stopped_s:
            doing = self._record.doing  # may have begun since then
            doing.since_s = min(doing.since_s + stopped_s, time.monotonic())
            self._excused_at += stopped_s
        if is_ended:
            self._terminated()

    def _go_on(self, is_blind: bool) -> None:
        """Print an error of the thread once, and go on; with `is_blind`, end the process if one action never ends."""
        text = traceback.format_exc()
        if text not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.add(text)
            self._words.remark(f"goes on, but its watch-dog has failed in part:\n{text}")
        doing, longest_s = self._record.doing, max(LONG_CALL * self._stall_timeout_s, self._data_timeout_s)
        if is_blind and doing.action and time.monotonic() - doing.since_s > longest_s:
            text = f"it has been {doing} for more than {longest_s:g} s, and its watch-dog cannot tell why."
            with self._words.leaving(1):
                if self._words.are_mine():
                    self._words.tell(self._others, text, Failure(self._rank, self._record.stage_id, doing.action, text))
        self._stop.wait(POLL_S)

    def _judge(self) -> None:
        doing = self._record.doing
        if not doing.action and not self._asynchronous:
            return
        if (failure := self._failure_of_others()) is not None:
            self._end(str(failure), doing)
        elif doing.action and self._has_stalled(doing):
            self._end_stalled(doing)
        elif doing.is_long and (places := self._others.elsewhere(doing)):
            where = "; ".join(f"ranks {ranks} are {place}" for place, ranks in places.items())
            told = f"rank {self._rank} is in {doing.action}, and {where}: this call waits for all ranks"
            self._end(f"{told}. Make the same calls on every rank, between the same batches", doing, stalled=True)
        elif doing.action and self._waits_without_store(doing):
            self._end("rank 0, or the launcher that serves the store of the job, is gone", doing)

    def _has_stalled(self, doing: Doing) -> bool:
        """Return whether `doing` takes too long.

        A batch cannot begin while a rank draws data, which has its own limit, or saves, uploads or validates. After
        that, the usual limit begins anew. A rank that gives no sign of life gets no extra time.
        """
        now = time.monotonic()
        waited_s = now - doing.since_s
        # Waits that may be long for a good reason, as long as every rank gives signs of life
        if doing.opening or doing.draws or doing.is_long:
            self._others.look()
            if self._others.is_one_silent(self._stall_timeout_s):
                return True
            if doing.draws:
                self._warn_of_data(doing, waited_s)
                return waited_s > self._data_timeout_s
            if doing.is_long:
                return waited_s > LONG_CALL * self._stall_timeout_s
            # Another rank that draws data or is outside a batch excuses this one until it goes on
            if self._others.is_one(DRAWING):
                self._excused_at = now
            elif self._others.is_one(OUTSIDE):
                if waited_s > LONG_CALL * self._stall_timeout_s:
                    return True
                self._excused_at = now
        return now - max(doing.since_s, self._excused_at) > self._stall_timeout_s

    def _warn_of_data(self, doing: Doing, waited_s: float) -> None:
        if waited_s > self._stall_timeout_s and self._warned_of is not doing:
            self._warned_of = doing
            self._words.remark(
                f"has waited {waited_s:.0f} s for the data iterator, and ends the job after {self._data_timeout_s:g} s "
                f"(terapipe.data_timeout_s). It is here:\n{self._record.full().stack.rstrip()}"
            )

    def _waits_without_store(self, doing: Doing) -> bool:
        if self._others.lost_at is None or self._record.full().is_busy:
            return False
        return time.monotonic() - max(doing.since_s, self._others.lost_at) > LOST_STORE_S

    def _end_stalled(self, doing: Doing) -> None:
        """Report the actions of all ranks and end, unless this rank or one that it waits for makes progress."""
        states = self._others.live_states(ANSWER_S)
        failure = self._others.failure
        if failure is not None:  # another rank was first, and has its report
            self._end(str(failure), doing)
            return
        # Others may go on while this rank waits: the clock begins at their latest action
        latest_s = None if doing.draws or doing.is_long else idle_s(states, self._stall_timeout_s)
        if latest_s is not None:
            self._excused_at = time.monotonic() - latest_s
        elif self._record.doing is doing:
            key, limit_s = "stall_timeout_s", self._stall_timeout_s
            if doing.draws and time.monotonic() - doing.since_s > self._data_timeout_s:
                key, limit_s = "data_timeout_s", self._data_timeout_s
            self._end(stall_report(states, limit_s, self._asynchronous, key), doing, stalled=True)

    def _end(self, text: str, doing: Doing, stalled: bool = False) -> None:
        """End this process from the watch-dog's thread: the main thread waits in a call that cannot be interrupted."""
        where = "" if doing.wait else f"\nIts main thread is here:\n{self._record.full().stack}"
        failure = Failure(self._rank, self._record.stage_id, doing.action, text, stalled)
        if not self._words.are_mine():
            return  # the main thread raises by itself
        with self._words.leaving(1):
            self._words.tell(self._others, text, failure, f"\nThis rank was {doing}.{where}")
            # The rank that failed prints its traceback before a launcher ends it
            deadline = time.monotonic() + (LINGER_S if self._failure_of_others() is not None else 0.0)
            while time.monotonic() < deadline and not self._sigterm.wait():
                pass

    def _terminated(self) -> None:
        """End this process after SIGTERM, from the watch-dog's thread."""
        with self._words.leaving(128 + 15):
            doing = self._record.doing
            self._others.beat(ended="ended by SIGTERM")
            text = (
                "it was sent SIGTERM; launchers do so when another rank has ended, whose output and exit code say why."
                f"\n{self._lost_ranks(HURRIED_ANSWER_S) or 'All ranks are alive.'}\nThis rank was {doing}."
            )
            if self._words.are_mine():
                self._words.tell(self._others, text)
            if self._rank == 0:  # serves the store by which the others name who has died
                time.sleep(2 * POLL_S)


def _switches() -> int:
    """Return how often the calling thread has waited until now."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether the error says that a connected process is gone."""
    return isinstance(error, torch_dist.DistError) or _GLOO_ERROR.search(text_of(error)) is not None


def _ends_program_of_this_rank(error: BaseException) -> bool:
    """Return whether an error that Python has printed has left the main program, and is not one of all ranks."""
    # a console, a test runner and code in C print errors that they have caught further in
    if error.__traceback__ is None or error.__traceback__.tb_frame.f_back is not None:
        return False
    chain: BaseException | None = error
    while chain is not None and _AGREED not in getattr(chain, "__dict__", ()):
        chain = chain.__cause__ or chain.__context__
    return chain is None
