"""What the watch-dogs of a job tell each other: states, failures, and answers when one of them calls the roll.

A store of its own, served by rank 0: the default store's client may be busy in the main thread. Nothing here blocks
for longer than it is told, and nothing raises: where rank 0 is gone, so is the store, and questions have no answer.
Where rank 0's process stands still (SIGSTOP, a paused machine), a question would never come back, whatever timeout the
store has: so each is asked by a thread that may be left behind.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.runtime.stall import RankState

_ABORT = "abort"
_ROLL = "roll"
_LOOK_S = 0.02
_SILENT_S = 3.0  # a store that answers nothing for so long is asked no more until that answer has come


def make_store(timeout_s: float) -> Any:
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


class WatchStore:
    """One rank's view of the store. Called by the main thread and the watching one.

    Args:
        state: this rank's state in full, for answers.
    """

    def __init__(self, store: Any | None, rank: int, world_size: int, state: Callable[[], RankState]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._state = state
        self._answered = 0  # the number of the last roll call that this rank has answered
        self.failure: dict[str, Any] | None = None  # the first one of the job, once it is known here
        self.lost_at: float | None = None
        self._unanswered: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether a question waits for its answer since long."""
        return self._unanswered is not None and self._unanswered.is_alive()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """What the store answers; None where there is none, or where rank 0, which serves it, is gone or silent."""
        if self._store is None or self.lost_at is not None or self.is_silent or sys.is_finalizing():
            return None  # a thread started while the interpreter ends would never run, and be waited for forever
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question(self._store))
            except Exception:
                self.lost_at = time.monotonic()

        asking = threading.Thread(target=ask, name="terapipe-watchdog-asks", daemon=True)
        asking.start()
        asking.join(_SILENT_S)
        if asking.is_alive():
            self._unanswered = asking
        return answers[0] if answers else None

    # -- failures ----------------------------------------------------------------------------------------------------

    def publish_failure(self, report: dict[str, Any], wait_s: float) -> None:
        """Tell the others, unless one of them was first, and wait until all have read it."""
        first = self._ask(lambda store: store.compare_set(_ABORT, "", json.dumps(report)))
        self.failure = report if first is None else json.loads(first)
        self._set(f"read/{self._rank}", "")
        self._wait_for([f"read/{rank}" for rank in range(self._world_size)], wait_s)

    def _wait_for(self, keys: list[str], wait_s: float, or_failure: bool = False) -> None:
        """Until all keys are there, or the time is over, or (``or_failure``) somebody has said why the job ends."""
        deadline = time.monotonic() + wait_s
        while self._ask(lambda store: store.check(keys)) is False and time.monotonic() < deadline:
            if or_failure and self.learn_failure() is not None:
                return
            self.answer()
            time.sleep(_LOOK_S)

    def learn_failure(self) -> dict[str, Any] | None:
        """The first failure of the job, if there is one."""
        if self.failure is None and self._ask(lambda store: store.check([_ABORT])):
            report = self._ask(lambda store: store.get(_ABORT))
            self.failure = None if report is None else json.loads(report)
        return self.failure

    # -- states ------------------------------------------------------------------------------------------------------

    def publish_state(self, state: RankState) -> None:
        """What is known of this rank, should it not be able to answer."""
        self._set(f"state/{self._rank}", state.to_json())

    def last_states(self) -> dict[int, RankState]:
        """What each rank has last published of itself."""
        found = self._read([f"state/{rank}" for rank in range(self._world_size)])
        return {rank: state for rank, state in enumerate(found) if state is not None}

    def _read(self, keys: list[str]) -> list[RankState | None]:
        """What stands under each key; None where nothing does."""
        if self._ask(lambda store: store.check(keys)):
            texts = self._ask(lambda store: store.multi_get(keys))
        else:
            texts = [self._get(key) for key in keys]
        return [None if text is None else RankState.from_json(text) for text in texts or [None] * len(keys)]

    def _get(self, key: str) -> Any:
        return self._ask(lambda store: store.get(key) if store.check([key]) else None)

    def answer(self) -> None:
        """Answer the roll calls since the last time; several ranks may call at once."""
        number = self._ask(lambda store: store.add(_ROLL, 0))
        if number is None or number <= self._answered:
            return
        unanswered, self._answered = range(self._answered + 1, number + 1), number
        text = self._state().to_json()
        for each in unanswered:
            self._set(_answer_key(each, self._rank), text)

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(key, text))

    def call_the_roll(self, wait_s: float) -> dict[int, RankState]:
        """What every rank does; those that do not answer within ``wait_s`` are silent. Empty without the store, and
        incomplete where a failure of the job becomes known meanwhile."""
        known = self.last_states()
        number = self._ask(lambda store: store.add(_ROLL, 1))
        self.answer()
        alive = [rank for rank in range(self._world_size) if rank not in known or not known[rank].gone]
        self._wait_for([_answer_key(number, rank) for rank in alive], wait_s, or_failure=True)
        if self.lost_at is not None or number is None:
            return {}
        answers = self._read([_answer_key(number, rank) for rank in range(self._world_size)])
        if all(answer is not None for answer in answers):
            return {rank: answer for rank, answer in enumerate(answers) if answer is not None}
        known = self.last_states()
        return {rank: answer or _silent(known.get(rank), rank) for rank, answer in enumerate(answers)}


def _silent(last: RankState | None, rank: int) -> RankState:
    """A rank that has not answered; one that has said that it ends is not expected to."""
    if last is None:
        return RankState(rank, stage_id=-1, silent=True)
    return last if last.gone else replace(last, silent=True)


def _answer_key(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"
