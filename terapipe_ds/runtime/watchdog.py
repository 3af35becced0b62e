"""A thread per rank that ends the job instead of letting it hang.

A rank that raises in the middle of a batch leaves its neighbours waiting for messages that never come; gloo has no
way to give up such a wait without closing the connection for good. So each rank runs one daemon thread with a store
of its own (the default store's client may be busy in the main thread):

- a rank that fails says so, publishes why and waits a moment until the others have read it, before it raises;
- the thread of every other rank that is inside a batch sees it, prints it, and ends the process with exit code 1;
- a rank whose batch makes no progress for ``stall_timeout_s`` does the same, with what every rank does;
- a rank that the launcher ends (SIGTERM), because another one died without a word, says what it was doing.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.runtime.sigterm import POLL_S, Sigterm

ACKNOWLEDGE_S = 2.0  # a rank that fails lets the others read why: launchers end them soon after it
LINGER_S = 2.0  # and they let it print its traceback: launchers end it soon after them
PATIENCE = 6  # so many stall timeouts (half an hour by default) for a rank that is busy outside a batch
OUTSIDE = "outside a batch"
LOST_STORE_S = 5.0  # at the end of a good run, too, rank 0 may be gone a little before the others
_ABORT = "abort"
_WHAT_NOW = "Mend the cause and start the job again from its last checkpoint."


class PipelineAborted(RuntimeError):
    """Another rank failed, so this one cannot go on."""


def _make_store(timeout_s: float) -> Any:
    """A TCP store of our own, served by rank 0; a collective over all ranks."""
    timeout = timedelta(seconds=timeout_s)
    address: list[Any] = [None, None]
    server = None
    if torch_dist.get_rank() == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if _single_host() else socket.gethostname())
        server = torch_dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = [host, server.port]
    torch_dist.broadcast_object_list(address, src=0)
    if server is not None:
        return server
    return torch_dist.TCPStore(address[0], int(address[1]), is_master=False, wait_for_workers=False, timeout=timeout)


def _single_host() -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 0)
    return local in (0, torch_dist.get_world_size())


@dataclass(frozen=True)
class _Doing:
    """What the main thread does inside a batch. Replaced as a whole, because the watching thread reads it."""

    action: str
    waits_for: str = ""
    opening: bool = False  # draws data and meets the other stages, which may be busy outside a batch
    since_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"at {self.action}, waiting for {self.waits_for}" if self.waits_for else f"running {self.action}"


class Watchdog:
    """Watches the main thread of this rank and the other ranks. One per engine; a collective to build."""

    def __init__(
        self, rank: int, stage_id: int, stall_timeout_s: float, store: Any | None = None, asynchronous: bool = False,
        peers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            asynchronous: the device runs behind the host, which may wait for it anywhere, also outside a batch.
            peers: this rank and those that its layers may wait for: of its tensor-parallel group, if it has one.
        """
        self._peers = tuple(peers)
        self._rank = rank
        self._stage_id = stage_id
        self._stall_timeout_s = stall_timeout_s
        self._asynchronous = asynchronous
        self._warned_at = 0.0  # since when the batch was opening that was warned of
        self._doing: _Doing | None = None  # None: outside a batch
        self._thread_of_batch = threading.get_ident()
        self._published = ""
        self._failure: dict[str, Any] | None = None  # the first one of the job, once it is known here
        self._lost_store_at: float | None = None
        self._said = threading.Lock()  # taken for good by who says why this rank ends
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._world_size = torch_dist.get_world_size()
        self._store = store
        if self._world_size > 1:
            self._store = store if store is not None else _make_store(max(60.0, stall_timeout_s))
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
        if self._failure is not None:
            raise PipelineAborted(_failure_text(self._failure))
        self._thread_of_batch = threading.get_ident()
        self._doing = _Doing("the start of a batch (drawing data, hearing from the other stages)", opening=True)
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
            self._doing = None

    def note(self, action: object) -> None:
        """Remember what this rank does now; cheap, called for each action."""
        self._doing = _Doing(str(action))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a blocking wait; ``what`` says for what and from whom. After an exception it stays noted."""
        action = self._doing.action if self._doing is not None else "no action"
        self._doing = _Doing(action, what)
        yield
        self._doing = _Doing(action)

    def close(self) -> None:
        """Stop the thread. The engine is done."""
        if self._thread is None:
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._sigterm.remove()
        self._sigterm.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    # -- a failure of this rank, in the main thread -----------------------------------------------------------------

    def _caused_by_others(self, error: BaseException) -> PipelineAborted | None:
        """``error`` as the consequence of another rank's end, or None where it is this rank's own."""
        if not isinstance(error, RuntimeError):  # all that backends raise
            return None
        first = self._learn_failure()
        if first is not None and first["rank"] != self._rank:
            return PipelineAborted(_failure_text(first))
        if not _is_lost_connection(error):
            return None
        doing = self._doing
        whose = f" while waiting for {doing.waits_for}" if doing is not None and doing.waits_for else ""
        return PipelineAborted(
            f"lost the connection to another rank{whose}: its process has ended without saying why. Its own output "
            "and exit code tell more: it was killed (out of memory?), or makes fewer steps than this rank"
        )

    def _fail(self, error: BaseException) -> None:
        if self._thread is None:  # alone: whoever called may go on
            return
        text = str(error) if isinstance(error, PipelineAborted) else f"{type(error).__name__}: {error}"
        action = self._doing.action if self._doing is not None else "no action"
        if self._say(text if isinstance(error, PipelineAborted) else f"it failed at {action}: {text}"):
            self._publish_failure(action, text)
        else:  # the thread has, and ends this process; one more traceback would hide the one that tells more
            self._stop.wait(ACKNOWLEDGE_S + LINGER_S)

    # -- what this rank tells the others, and they it -----------------------------------------------------------------

    def _say(self, text: str) -> bool:
        """Print why this rank ends, once. False where that was said before."""
        if not self._said.acquire(blocking=False):
            return False
        who = f"rank {self._rank} (stage {self._stage_id})"
        print(f"\nterapipe_ds: {who} ends: {text}\n{_WHAT_NOW}", file=sys.stderr, flush=True)
        return True

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """What the store answers; None where there is none, or where rank 0, which serves it, is gone."""
        if self._store is None or self._lost_store_at is not None:
            return None
        try:
            return question(self._store)
        except Exception:
            self._lost_store_at = time.monotonic()
            return None

    def _publish_failure(self, action: str, text: str) -> None:
        """Tell the others, unless one of them was first, and wait until all have read it."""
        report = {"rank": self._rank, "stage": self._stage_id, "action": action, "error": text}
        first = self._ask(lambda store: store.compare_set(_ABORT, "", json.dumps(report)))
        self._failure = report if first is None else json.loads(first)
        self._ask(lambda store: store.set(f"read/{self._rank}", ""))
        everyone = [f"read/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + ACKNOWLEDGE_S
        while self._ask(lambda store: store.check(everyone)) is False and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._rank == 0:  # the server leaves last, or the clients complain
            time.sleep(POLL_S)

    def _learn_failure(self) -> dict[str, Any] | None:
        """The first failure of the job, if there is one."""
        if self._failure is None and self._ask(lambda store: store.check([_ABORT])):
            report = self._ask(lambda store: store.get(_ABORT))
            self._failure = None if report is None else json.loads(report)
        return self._failure

    def _publish_state(self) -> None:
        state = OUTSIDE if self._doing is None else str(self._doing)
        if state != self._published:
            self._published = state
            self._ask(lambda store: store.set(f"state/{self._rank}", state))

    def _states(self) -> list[str]:
        return [f"  rank {rank}: {self._state_of(rank)}" for rank in range(self._world_size)]

    def _state_of(self, rank: int) -> str:
        key = f"state/{rank}"
        state = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return "not known" if state is None else state.decode()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.is_set():
            if self._sigterm.wait():
                self._terminated()
            self._publish_state()
            doing = self._doing
            if doing is None and not self._asynchronous:
                continue
            failure = self._learn_failure()
            if failure is not None and failure["rank"] != self._rank:
                self._end(_failure_text(failure), doing or _Doing("the program outside a batch"))
            elif doing is None:
                continue
            elif time.monotonic() - doing.since_s > self._stall_timeout_s and not self._is_patient(doing):
                self._end(self._stall_text(), doing)
            elif self._waits_without_store(doing):
                self._end("rank 0, which serves the watch-dog's store, is gone", doing)

    def _waits_without_store(self, doing: _Doing) -> bool:
        if self._lost_store_at is None or not doing.waits_for:
            return False
        return time.monotonic() - max(doing.since_s, self._lost_store_at) > LOST_STORE_S

    def _is_patient(self, doing: _Doing) -> bool:
        """True while a batch cannot begin because another rank does something else: saves, uploads, validates."""
        if not doing.opening or not any(state.endswith(OUTSIDE) for state in self._states()):
            return False
        if self._warned_at != doing.since_s:
            self._warned_at = doing.since_s
            waited_s = time.monotonic() - doing.since_s
            waits = f"terapipe_ds: rank {self._rank} has waited {waited_s:.0f} s for a batch to begin:"
            print("\n".join([waits, *self._states()]), file=sys.stderr, flush=True)
        return time.monotonic() - doing.since_s < PATIENCE * self._stall_timeout_s

    def _stall_text(self) -> str:
        lines = [f"no progress for {self._stall_timeout_s:g} s (terapipe.stall_timeout_s):"]
        lines += self._states()
        lines.append("Look at the ranks that wait for none of the others. If they are only slow, raise the limit.")
        if len(self._peers) > 1:
            lines.append(
                f"Layers of ranks {list(self._peers)} wait for each other too (tensor parallelism), which looks like "
                "running: where each of them stands tells which one does not come."
            )
        return "\n".join(lines)

    def _end(self, text: str, doing: _Doing) -> None:
        """End this process from the watch-dog's thread: the main thread waits in a call that cannot be interrupted."""
        where = "" if doing.waits_for else f"\nIt stands here:\n{self._stack()}"
        if not self._say(f"{text}\nThis rank was {doing}.{where}"):
            return  # the main thread raises by itself
        self._publish_failure(doing.action, text)
        if self._failure is not None and self._failure["rank"] != self._rank:
            deadline = time.monotonic() + LINGER_S
            while time.monotonic() < deadline and not self._sigterm.wait():
                pass
        sys.stdout.flush()
        os._exit(1)

    def _stack(self) -> str:
        """Where the main thread stands, innermost call last."""
        frame = sys._current_frames().get(self._thread_of_batch)
        return "".join(traceback.format_stack(frame)[-5:]) if frame is not None else "  nowhere\n"

    def _terminated(self) -> None:
        """On SIGTERM, in either thread."""
        doing, failure = self._doing, self._failure
        known = f"\n{_failure_text(failure)}" if failure is not None else ""
        self._say(
            "it was sent SIGTERM; launchers do so when another rank has ended, whose output and exit code say why."
            f"{known}\nThis rank was {'outside a batch' if doing is None else doing}."
        )
        os._exit(128 + 15)


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, torch_dist.DistError) or "gloo" in str(error)


def _failure_text(report: dict[str, Any]) -> str:
    return f"rank {report['rank']} (stage {report['stage']}) failed at {report['action']}: {report['error']}"
