"""A thread per rank that ends the job instead of letting it hang.

A rank that raises in the middle of a batch leaves its neighbours waiting for messages that never come; gloo has no way to
give up such a wait without closing the connection for good. So each rank runs one daemon thread with a store of its own
(the default store's client may be busy in the main thread):

- a rank that fails publishes why, before it raises;
- the thread of every other rank sees it, prints it, and ends the process with exit code 1 if that is inside a batch;
- a rank that waits longer than ``stall_timeout_s`` for one message does the same, with what every rank did last.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

POLL_S = 0.25
GRACE_S = 1.0  # a rank that is about to raise by itself (its neighbour closed the connection) may do so first
_ABORT = "abort"


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


class Watchdog:
    """Watches the main thread of this rank and the other ranks. One per engine; a collective to build."""

    def __init__(self, rank: int, stage_id: int, stall_timeout_s: float, store: Any | None = None) -> None:
        self._rank = rank
        self._stage_id = stage_id
        self._stall_timeout_s = stall_timeout_s
        self._in_batch = False
        self._last = "no action yet"
        self._waiting: tuple[str, float] | None = None
        self._published = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store = store
        if torch_dist.get_world_size() > 1:
            self._store = store if store is not None else _make_store(max(60.0, stall_timeout_s))
            self._thread = threading.Thread(target=self._watch, name="terapipe-watchdog", daemon=True)
            self._thread.start()

    # -- called by the engine, in the main thread ----------------------------------------------------------------

    @contextmanager
    def batch(self, forgive: Callable[[BaseException], bool]) -> Iterator[None]:
        """Around everything in which this rank waits for others. Publishes the exception that leaves it.

        ``forgive``: True for errors that leave no other rank waiting, which are nobody's business but the caller's.
        """
        self._in_batch = True
        try:
            yield
        except BaseException as error:
            if forgive(error):
                raise
            first = self._first_failure() if isinstance(error, RuntimeError) else None  # backends raise RuntimeError
            if first is not None and first["rank"] != self._rank:
                raise PipelineAborted(_failure_text(first)) from error
            self._publish_failure(error)
            raise
        finally:
            self._in_batch = False
            self._waiting = None

    def note(self, action: object) -> None:
        """Remember what this rank does now; cheap, called for each action."""
        self._last = str(action)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a blocking wait; ``what`` says for what and from whom."""
        self._waiting = (what, time.monotonic())
        yield
        self._waiting = None

    def close(self) -> None:
        """Stop the thread. The engine is done."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._store = None

    # -- the store ------------------------------------------------------------------------------------------------

    def _publish_failure(self, error: BaseException) -> None:
        if self._store is None:
            return
        report = {"rank": self._rank, "stage": self._stage_id, "action": self._last, "error": _one_line(error)}
        try:  # compare_set: the first failure stays
            self._store.compare_set(_ABORT, "", json.dumps(report))
        except Exception as store_error:
            print(f"terapipe_ds: rank {self._rank} cannot publish its failure: {store_error}", file=sys.stderr, flush=True)

    def _first_failure(self) -> dict[str, Any] | None:
        store = self._store
        if store is None:
            return None
        try:
            if store.check([_ABORT]):
                report: dict[str, Any] = json.loads(store.get(_ABORT))
                return report
        except Exception:
            return {"rank": 0, "stage": "?", "action": "?", "error": "rank 0, which serves the watch-dog's store, is gone"}
        return None

    def _state(self) -> str:
        waiting = self._waiting
        if not self._in_batch:
            return "outside a batch"
        if waiting is None:
            return f"runs {self._last}"
        return f"at {self._last}, waits for {waiting[0]}"

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._publish_state()
            waiting = self._waiting
            if waiting is not None and time.monotonic() - waiting[1] > self._stall_timeout_s:
                self._end(self._stall_text(waiting))
            if not self._in_batch:
                continue
            failure = self._first_failure()
            if failure is not None and failure["rank"] != self._rank:
                self._stop.wait(GRACE_S)
                if self._in_batch and not self._stop.is_set():
                    self._end(_failure_text(failure))

    def _publish_state(self) -> None:
        state = self._state()
        if state == self._published or self._store is None:
            return
        try:
            self._store.set(f"state/{self._rank}", state)
            self._published = state
        except Exception:
            self._published = ""  # rank 0 is gone; _first_failure says so where it matters

    def _stall_text(self, waiting: tuple[str, float]) -> str:
        lines = [f"no message for {self._stall_timeout_s:g} s (terapipe.stall_timeout_s) while waiting for {waiting[0]}"]
        lines += [f"  rank {rank}: {state}" for rank, state in self._all_states()]
        return "\n".join(lines)

    def _all_states(self) -> list[tuple[int, str]]:
        states = []
        for rank in range(torch_dist.get_world_size()):
            key = f"state/{rank}"
            try:
                known = self._store is not None and self._store.check([key])
                states.append((rank, self._store.get(key).decode() if known and self._store else "nothing known"))
            except Exception:
                states.append((rank, "cannot be asked: rank 0 is gone"))
        return states

    def _end(self, text: str) -> None:
        """End this process from the watch-dog's thread: the main thread waits in a call that cannot be interrupted."""
        print(f"\nterapipe_ds: rank {self._rank} (stage {self._stage_id}) ends: {text}", file=sys.stderr, flush=True)
        self._publish_failure(RuntimeError(text.splitlines()[0]))
        sys.stdout.flush()
        os._exit(1)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failure_text(report: dict[str, Any]) -> str:
    return f"rank {report['rank']} (stage {report['stage']}) failed at {report['action']}: {report['error']}"
