"""A thread per rank that ends the job instead of letting it hang.

A rank that raises in the middle of a batch leaves its neighbours waiting for messages that never come; gloo has no
way to give up such a wait without closing the connection for good. So each rank runs one daemon thread with a store
of its own (`watch_store`):

- a rank that fails says so, publishes why and waits a moment until the others have read it, before it raises;
- the thread of every other rank that is inside a batch sees it, prints it, and ends the process with exit code 1;
- a rank whose batch makes no progress for ``stall_timeout_s`` calls the roll, and ends the job with what every rank
  does and did last and at which stage it stands (`stall`);
- a rank that loses a connection, or that the launcher ends (SIGTERM) because another one died without a word, names
  the ranks that do not answer.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.runtime.rank_record import RankRecord
from terapipe_ds.runtime.sigterm import POLL_S, Sigterm
from terapipe_ds.runtime.stall import CLOSED, Doing, Wait, report_lines, stall_report, verdict
from terapipe_ds.runtime.watch_store import WatchStore, make_store

ACKNOWLEDGE_S = 2.0  # a rank that fails lets the others read why: launchers end them soon after it
LINGER_S = 2.0  # and they let it print its traceback: launchers end it soon after them
ANSWER_S = 3.0  # until a rank that does not answer counts as gone
HURRIED_ANSWER_S = 1.0  # the same where the launcher is about to end this rank, too
PATIENCE = 6  # so many stall timeouts (half an hour by default) for a rank that is busy outside a batch
LOST_STORE_S = 5.0  # at the end of a good run, too, rank 0 may be gone a little before the others
_OPENING = "the start of a batch (drawing data, hearing from the other stages)"
_WHAT_NOW = "Mend the cause and start the job again from its last checkpoint."


class PipelineAborted(RuntimeError):
    """Another rank failed, so this one cannot go on."""


class Watchdog:
    """Watches the main thread of this rank and the other ranks. One per engine; a collective to build."""

    def __init__(
        self, rank: int, stage_id: int, stall_timeout_s: float, store: Any | None = None, asynchronous: bool = False,
        peers: Sequence[int] = (), trace_dir: str | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            asynchronous: the device runs behind the host, which may wait for it anywhere, also outside a batch.
            peers: this rank and those that its layers may wait for: of its tensor-parallel group, if it has one.
            trace_dir: where each rank leaves its last actions when the job fails.
        """
        self._rank = rank
        self._stall_timeout_s = stall_timeout_s
        self._asynchronous = asynchronous
        self._record = RankRecord(rank, stage_id, tuple(peers), trace_dir)
        self._warned_at = 0.0  # since when this rank was waiting patiently when it warned of it
        self._published: Doing | None = None
        self._said = threading.Lock()  # taken for good by who says why this rank ends
        self._terminating = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._world_size = torch_dist.get_world_size()
        if store is None and self._world_size > 1:
            store = make_store(max(60.0, stall_timeout_s))
        self._others = WatchStore(store, rank, self._world_size, self._record.state)
        if self._world_size > 1:
            self._publish_state()
            self._sigterm = Sigterm(self._terminated)
            self._sigterm.install()
            self._thread = threading.Thread(target=self._watch, name="terapipe-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread inside the store's client must not meet the end of the interpreter

    # -- called by the engine, in the main thread ----------------------------------------------------------------

    @contextmanager
    def batch(self, forgive: Callable[[BaseException], bool]) -> Iterator[None]:
        """Around everything in which this rank waits for others. Publishes the exception that leaves it.

        ``forgive``: True for errors that leave no other rank waiting, which are nobody's business but the caller's.
        """
        if self._others.failure is not None:
            raise PipelineAborted(_failure_text(self._others.failure))
        self._record.enter(Doing(_OPENING, opening=True))
        try:
            yield
        except BaseException as error:
            if forgive(error):
                raise
            aborted = self._caused_by_others(error)
            self._fail(error if aborted is None else aborted)
            if aborted is None:
                raise
            raise aborted from error
        finally:
            self._record.now(Doing(""))

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Around a call outside a batch in which ranks wait for each other and which may take long: saving a
        checkpoint. Reported after ``stall_timeout_s``, ended after ``PATIENCE`` times as long. Its errors are the
        caller's, but for a connection that another rank's end has cut.
        """
        self._record.enter(Doing(what, apart=True))
        try:
            yield
        except RuntimeError as error:
            aborted = self._caused_by_others(error)
            if aborted is None:
                raise
            self._fail(aborted)
            raise aborted from error
        finally:
            self._record.now(Doing(""))

    def note(self, action: object) -> None:
        """Remember what this rank does now; cheap, called for each action."""
        self._record.now(Doing(str(action)))

    @contextmanager
    def waiting(self, what: Wait | str) -> Iterator[None]:
        """Around a blocking wait; ``what`` says for what and from whom. After an exception it stays noted."""
        action = self._record.now_waits(what if isinstance(what, Wait) else Wait(what))
        yield
        self._record.now(Doing(action))

    def close(self) -> None:
        """Stop the thread: the engine is done. Called again, as late as when the interpreter ends, it does nothing."""
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
            self._others.publish_state(self._record.brief(gone=CLOSED))

    # -- a failure of this rank, in the main thread -----------------------------------------------------------------

    def _caused_by_others(self, error: BaseException) -> PipelineAborted | None:
        """``error`` as the consequence of another rank's end, or None where it is this rank's own."""
        if not isinstance(error, RuntimeError):  # all that backends raise
            return None
        first = self._others.learn_failure()
        if first is not None and first["rank"] != self._rank:
            return PipelineAborted(_failure_text(first))
        if not is_lost_connection(error):
            return None
        doing = self._record.doing
        self._record.lost_in = "a connection that was lost"
        whose = f" while waiting for {doing.wait.text}" if doing.wait else f" at {doing.action or 'no action'}"
        return PipelineAborted(
            f"lost the connection to another rank{whose}: its process has ended without saying why. "
            f"{self._the_dead(ANSWER_S, or_terminated=True)}Its own output and exit code tell more: it was killed (out "
            "of memory?), or makes fewer steps than this rank"
        )

    def _the_dead(self, wait_s: float, or_terminated: bool = False) -> str:
        """Names the ranks that do not answer, as sentences; "" where all do.

        ``or_terminated``: where all do, those that SIGTERM has ended. Launchers send it to all where one has died.
        """
        if self._world_size == 1:
            return ""
        states = self._others.call_the_roll(wait_s)
        if self._others.failure is not None:
            return f"{_failure_text(self._others.failure)}. "
        if not states:
            return "Rank 0, which serves the watch-dog's store, is gone. "
        named = [state for state in states.values() if state.silent or state.gone == CLOSED]
        if or_terminated and not named:
            named = [state for state in states.values() if state.gone]
        return "".join(f"Rank {state.rank} (stage {state.stage_id}): {state.describe()}. " for state in named)

    def _fail(self, error: BaseException) -> None:
        if self._thread is None:  # alone: whoever called may go on
            return
        text = str(error) if isinstance(error, PipelineAborted) else f"{type(error).__name__}: {error}"
        action = self._record.doing.action or "no action"
        if self._say(text if isinstance(error, PipelineAborted) else f"it failed at {action}: {text}"):
            self._publish_failure(action, text)
        else:  # the thread has, and ends this process; one more traceback would hide the one that tells more
            self._stop.wait(ACKNOWLEDGE_S + LINGER_S)

    # -- what this rank tells the others, and they it -----------------------------------------------------------------

    def _say(self, text: str) -> bool:
        """Print why this rank ends, once. False where that was said before."""
        if not self._said.acquire(blocking=False):
            return False
        who = f"rank {self._rank} (stage {self._record.stage_id})"
        print(f"\nterapipe_ds: {who} ends: {text}\n{_WHAT_NOW}", file=sys.stderr, flush=True)
        self._record.state()  # leaves it in the trace directory
        return True

    def _publish_failure(self, action: str, text: str, stalled: bool = False) -> None:
        report: dict[str, Any] = {"rank": self._rank, "stage": self._record.stage_id, "action": action}
        report |= {"error": text, "stalled": stalled}
        self._others.publish_failure(report, ACKNOWLEDGE_S)
        if self._rank == 0:  # the server leaves last, or the clients complain
            time.sleep(POLL_S)

    def _publish_state(self) -> None:
        doing = self._record.doing
        if doing is not self._published:
            self._published = doing
            self._others.publish_state(self._record.brief())

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.is_set():
            if self._sigterm.wait():
                self._terminated()
            self._publish_state()
            self._others.answer()
            doing = self._record.doing
            if not doing.action and not self._asynchronous:
                continue
            failure = self._others.learn_failure()
            if failure is not None and failure["rank"] != self._rank:
                self._end(_failure_text(failure), doing if doing.action else Doing("the program outside a batch"))
            elif not doing.action:
                continue
            elif time.monotonic() - doing.since_s > self._stall_timeout_s and not self._is_patient(doing):
                self._end_stalled(doing)
            elif self._waits_without_store(doing):
                self._end("rank 0, which serves the watch-dog's store, is gone", doing)

    def _waits_without_store(self, doing: Doing) -> bool:
        if self._others.lost_at is None or not self._record.is_waiting:
            return False
        return time.monotonic() - max(doing.since_s, self._others.lost_at) > LOST_STORE_S

    def _is_patient(self, doing: Doing) -> bool:
        """True while a batch cannot begin because another rank does something else: saves, uploads, validates."""
        if not doing.apart and not (doing.opening and self._is_somebody_outside()):
            return False
        if self._warned_at != doing.since_s:
            self._warned_at = doing.since_s
            states = self._others.call_the_roll(ANSWER_S)
            waited_s = time.monotonic() - doing.since_s
            what = "for a batch to begin" if doing.opening else f"in {doing.action}"
            waits = f"terapipe_ds: rank {self._rank} has waited {waited_s:.0f} s {what}:"
            print("\n".join([waits, *report_lines(states.values()), *verdict(states)]), file=sys.stderr, flush=True)
        return time.monotonic() - doing.since_s < PATIENCE * self._stall_timeout_s

    def _is_somebody_outside(self) -> bool:
        states = self._others.last_states().values()
        return any(not state.gone and (not state.action or state.apart) for state in states)

    def _end_stalled(self, doing: Doing) -> None:
        """Report what all do, and end; unless this rank has gone on while the others answered."""
        states = self._others.call_the_roll(ANSWER_S)
        failure = self._others.failure
        if failure is not None:  # another rank was first, and has its report
            self._end(_failure_text(failure), doing)
        elif self._record.doing is doing:
            self._end(stall_report(states, self._stall_timeout_s, self._asynchronous), doing, stalled=True)

    def _end(self, text: str, doing: Doing, stalled: bool = False) -> None:
        """End this process from the watch-dog's thread: the main thread waits in a call that cannot be interrupted."""
        where = "" if doing.wait else f"\nIt stands here:\n{self._record.stack}"
        if not self._say(f"{text}\nThis rank was {doing}.{where}"):
            return  # the main thread raises by itself
        self._publish_failure(doing.action, text, stalled)
        failure = self._others.failure
        if failure is not None and failure["rank"] != self._rank:
            deadline = time.monotonic() + LINGER_S
            while time.monotonic() < deadline and not self._sigterm.wait():
                pass
        sys.stdout.flush()
        os._exit(1)

    def _terminated(self) -> None:
        """On SIGTERM, in either thread: the first one ends the process."""
        if not self._terminating.acquire(blocking=False):
            time.sleep(2 * ANSWER_S)  # the other thread ends the process meanwhile
        doing, failure = self._record.doing, self._others.learn_failure()
        self._others.publish_state(self._record.brief(gone="ended by SIGTERM"))
        known = self._the_dead(HURRIED_ANSWER_S) if failure is None else _failure_text(failure)
        self._say(
            "it was sent SIGTERM; launchers do so when another rank has ended, whose output and exit code say why.\n"
            f"{known or 'All ranks answer.'}\nThis rank was {doing if doing.action else 'outside a batch'}."
        )
        if self._rank == 0:  # serves the store by which the others name who has died
            time.sleep(2 * POLL_S)
        sys.stdout.flush()
        os._exit(128 + 15)


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether it says that a process that this one talks to is gone."""
    return isinstance(error, torch_dist.DistError) or "gloo" in str(error)


def _failure_text(report: dict[str, Any]) -> str:
    who = f"rank {report['rank']} (stage {report['stage']})"
    if report["stalled"]:
        return f"{who} reports {report['error']}"
    return f"{who} failed at {report['action']}: {report['error']}"
