"""Run a thread per rank that ends the job instead of letting it hang.

A rank that raises in the middle of a batch leaves its neighbours waiting for messages that never come; gloo cannot give
up such a wait without closing the connection. So each rank runs one daemon thread, which publishes what the rank does:

- a rank that fails publishes why and waits a moment until the others have read it, before it raises;
- the thread of every other rank that is inside a batch prints it, and ends the process with exit code 1;
- a rank whose batch makes no progress for `stall_timeout_s` ends the job with what every rank does and did last;
- a rank that loses a connection, or that the launcher ends (SIGTERM) because another rank died without a word, names
  the ranks that give no sign of life.

A timer in C ends the process if that thread does not run any more.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as torch_dist

from terapipe_ds.runtime.agreement import RaisedEverywhere
from terapipe_ds.runtime.failures.process_end import POLL_S, Sigterm, arm_timer, disarm_timer
from terapipe_ds.runtime.failures.report import CLOSED, OUTSIDE, Doing, RankRecord, Wait, stall_report
from terapipe_ds.runtime.failures.store import Failure, WatchStore, make_store

ACKNOWLEDGE_S = 2.0  # a rank that fails lets the others read why: launchers end them soon after it
LINGER_S = 2.0  # and they let it print its traceback: launchers end it soon after them
ANSWER_S = 3.0  # until a rank that gives no sign of life counts as gone
HURRIED_ANSWER_S = 1.0  # the same where the launcher is about to end this rank, too
LONG_CALL = 6  # so many stall timeouts (half an hour by default) for what a rank does outside a batch
LOST_STORE_S = 5.0  # at the end of a good run, too, rank 0 may be gone a little before the others
_SLOW = 0.25  # of the stall timeout: what takes longer is published with its stack
_TIMER_S = 60.0  # at least
_OPENING = "the start of a batch (drawing data, hearing from the other stages)"
_WHAT_NOW = "Mend the cause and start the job again from its last checkpoint."


class PipelineAborted(RuntimeError):
    """Say that another rank failed, so that this one cannot go on."""


class Watchdog:
    """Watch the main thread of this rank and the other ranks. One per engine; a collective to build.

    Args:
        store: for tests; a clone of the default store otherwise.
        asynchronous: the device runs behind the host, which may wait for it anywhere, also outside a batch.
        trace_dir: where each rank leaves its last actions when the job fails.
    """

    def __init__(
        self,
        rank: int,
        stage_id: int,
        stall_timeout_s: float,
        store: Any | None = None,
        asynchronous: bool = False,
        trace_dir: str | None = None,
    ) -> None:
        self._rank = rank
        self._stall_timeout_s = stall_timeout_s
        self._asynchronous = asynchronous
        self._trace_dir = trace_dir
        self._record = RankRecord(rank, stage_id)
        self._said = threading.Lock()  # taken for good by the thread that says why this rank ends
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._world_size = torch_dist.get_world_size()
        if store is None and self._world_size > 1:
            store = make_store()
        self._others = WatchStore(store, self._record, self._world_size, _SLOW * stall_timeout_s)
        if self._world_size > 1:
            self._others.beat()
            self._sigterm = Sigterm()
            self._thread = threading.Thread(target=self._watch, name="terapipe-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread inside the store's client must not meet the end of the interpreter

    # -- called by the engine, in the main thread ----------------------------------------------------------------

    def _failure_of_others(self) -> Failure | None:
        """Return the failure that ended the job, if another rank was the first to publish one."""
        failure = self._others.failure
        return None if failure is None or failure.rank == self._rank else failure

    def batch(self) -> AbstractContextManager[None]:
        """Watch everything in which this rank waits for others, and publish the exception that leaves it.

        Errors that all ranks raise alike leave no rank waiting, and are not published.
        """
        failure = self._others.failure
        if failure is not None:
            self._say(str(failure))
            raise PipelineAborted(str(failure))
        return self._watched(Doing(_OPENING, opening=True))

    def long_call(self, what: str) -> AbstractContextManager[None]:
        """Watch a call outside a batch in which ranks wait for one another, for `LONG_CALL` times `stall_timeout_s`.

        Its errors are the caller's, but for a connection that another rank's end has cut.
        """
        return self._watched(Doing(what, is_long=True))

    @contextmanager
    def _watched(self, doing: Doing) -> Iterator[None]:
        self._record.enter(doing)
        try:
            yield
        except RaisedEverywhere:
            raise
        except BaseException as error:
            aborted = self._caused_by_others(error)
            if aborted is not None:
                self._fail(aborted)
                raise aborted from error
            if not doing.is_long:
                self._fail(error)
            raise
        finally:
            self._record.now(Doing(""))

    def note(self, action: object) -> None:
        """Remember what this rank does now; cheap, called for each action."""
        self._record.now(Doing(str(action)))

    @contextmanager
    def waiting(self, what: Wait | str) -> Iterator[None]:
        """Watch a blocking wait; `what` says for what and from whom. After an exception it stays noted."""
        action = self._record.now_waits(what if isinstance(what, Wait) else Wait(what))
        yield
        self._record.now(Doing(action))

    def close(self) -> None:
        """Stop the thread: the engine is done. Another call, as late as the interpreter's end, does nothing."""
        if self._thread is None:
            return
        self._sigterm.remove()  # which only the main thread can, perhaps in a second call
        if self._stop.is_set():
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._sigterm.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._others.beat(ended=CLOSED)
            self._others.close()

    # -- a failure of this rank, in the main thread -----------------------------------------------------------------

    def _caused_by_others(self, error: BaseException) -> PipelineAborted | None:
        """Return `error` as the consequence of another rank's end; None where it is this rank's own."""
        if not isinstance(error, RuntimeError):  # all that backends raise
            return None
        self._others.beat()
        if (failure := self._failure_of_others()) is not None:
            return PipelineAborted(str(failure))
        if not is_lost_connection(error):
            return None
        doing = self._record.doing
        whose = f" while waiting for {doing.wait.text}" if doing.wait else f" at {doing.action or 'no action'}"
        return PipelineAborted(
            f"lost the connection to another rank{whose}: its process has ended without saying why. "
            f"{self._lost_ranks(ANSWER_S, or_ended=True)}Its own output and exit code tell more: it was killed (out "
            "of memory?), or makes fewer steps than this rank"
        )

    def _lost_ranks(self, wait_s: float, or_ended: bool = False) -> str:
        """Return sentences that name the ranks that give no sign of life or are done; "" without any.

        With `or_ended` and none of these, name those that SIGTERM has ended: launchers send it to all if one has died.
        """
        if self._world_size == 1:
            return ""
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
        text = str(error) if isinstance(error, PipelineAborted) else f"{type(error).__name__}: {error}"
        action = self._record.doing.action or "no action"
        if self._say(text if isinstance(error, PipelineAborted) else f"it failed at {action}: {text}"):
            self._publish_failure(action, text)
        else:  # the thread has, and ends this process; one more traceback would hide the one that tells more
            self._stop.wait(ACKNOWLEDGE_S + LINGER_S)

    def _say(self, text: str) -> bool:
        """Print why this rank ends, once. Return False where that was said before."""
        if not self._said.acquire(blocking=False):
            return False
        who = f"rank {self._rank} (stage {self._record.stage_id})"
        print(f"\nterapipe_ds: {who} ends: {text}\n{_WHAT_NOW}", file=sys.stderr, flush=True)
        if self._trace_dir is not None:
            with suppress(OSError):  # the report matters more
                self._record.full().save(Path(self._trace_dir))
        return True

    def _publish_failure(self, action: str, text: str, stalled: bool = False) -> None:
        failure = Failure(self._rank, self._record.stage_id, action, text, stalled)
        self._others.publish_failure(failure, ACKNOWLEDGE_S)
        if self._rank == 0:  # the server leaves last, or the clients complain
            time.sleep(POLL_S)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._stop.is_set():
                arm_timer(max(_TIMER_S, LONG_CALL * self._stall_timeout_s))
                if self._sigterm.wait():
                    self._terminated()
                self._others.beat()
                self._judge(self._record.doing)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        finally:
            disarm_timer()

    def _judge(self, doing: Doing) -> None:
        if not doing.action and not self._asynchronous:
            return
        if (failure := self._failure_of_others()) is not None:
            self._end(str(failure), doing)
        elif doing.action and time.monotonic() - doing.since_s > self._limit_s(doing):
            self._end_stalled(doing)
        elif doing.action and self._waits_without_store(doing):
            self._end("rank 0, or the launcher that serves the store of the job, is gone", doing)

    def _limit_s(self, doing: Doing) -> float:
        """Return how long `doing` may take. A batch cannot begin while a rank saves, uploads or validates."""
        is_long = doing.is_long or (
            doing.opening and time.monotonic() - doing.since_s > self._stall_timeout_s and self._others.is_one_outside()
        )
        return LONG_CALL * self._stall_timeout_s if is_long else self._stall_timeout_s

    def _waits_without_store(self, doing: Doing) -> bool:
        if self._others.lost_at is None or self._record.full().is_busy:
            return False
        return time.monotonic() - max(doing.since_s, self._others.lost_at) > LOST_STORE_S

    def _end_stalled(self, doing: Doing) -> None:
        """Report what all ranks do, and end; unless this rank has gone on meanwhile."""
        states = self._others.live_states(ANSWER_S)
        failure = self._others.failure
        if failure is not None:  # another rank was first, and has its report
            self._end(str(failure), doing)
        elif self._record.doing is doing:
            self._end(stall_report(states, self._stall_timeout_s, self._asynchronous), doing, stalled=True)

    def _end(self, text: str, doing: Doing, stalled: bool = False) -> None:
        """End this process from the watch-dog's thread: the main thread waits in a call that cannot be interrupted."""
        what = str(doing) if doing.action else OUTSIDE
        where = "" if doing.wait else f"\nIts main thread is here:\n{self._record.full().stack}"
        if not self._say(f"{text}\nThis rank was {what}.{where}"):
            return  # the main thread raises by itself
        self._publish_failure(doing.action, text, stalled)
        if self._failure_of_others() is not None:
            deadline = time.monotonic() + LINGER_S
            while time.monotonic() < deadline and not self._sigterm.wait():
                pass
        sys.stdout.flush()
        os._exit(1)

    def _terminated(self) -> NoReturn:
        """End this process after SIGTERM."""
        doing = self._record.doing
        self._others.beat(ended="ended by SIGTERM")
        failure = self._others.failure
        lost = self._lost_ranks(HURRIED_ANSWER_S) if failure is None else str(failure)
        self._say(
            "it was sent SIGTERM; launchers do so when another rank has ended, whose output and exit code say why.\n"
            f"{lost or 'All ranks are alive.'}\nThis rank was {doing if doing.action else OUTSIDE}."
        )
        if self._rank == 0:  # serves the store by which the others name who has died
            time.sleep(2 * POLL_S)
        sys.stdout.flush()
        os._exit(128 + 15)


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether the error says that a process that this one talks to is gone."""
    return isinstance(error, torch_dist.DistError) or "gloo" in str(error)
