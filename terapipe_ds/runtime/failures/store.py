"""Let the watch-dogs of a job exchange states, signs of life, and the first failure.

They use a clone of torch's default store, because the main thread may be busy in that store. The process that serves
the store may not answer: so one thread does all the asking, and the others wait for its answer for a limited time.
Nothing here raises: a store that is gone gives no answers.
"""

from __future__ import annotations

import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as torch_dist

from terapipe_ds.runtime.agreement import default_store, from_rank_0
from terapipe_ds.runtime.failures.report import AS_JSON, OUTSIDE, Doing, RankRecord, RankState

_ABORT = "abort"
_LOOK_S = 0.05
_SILENT_S = 3.0  # a store that does not answer for so long is asked no more until the answer has come
_numbers = itertools.count(1)


class Failure(NamedTuple):
    """Say why a rank ends. With `stalled` the error is its report on all ranks."""

    rank: int
    stage_id: int
    action: str
    error: str
    stalled: bool = False

    def __str__(self) -> str:
        who = f"rank {self.rank} (stage {self.stage_id})"
        return f"{who} reports {self.error}" if self.stalled else f"{who} failed at {self.action}: {self.error}"


class _Beat(NamedTuple):
    """Hold a sign of life: its number, the seconds since the action began, and where the rank is ("" in a batch)."""

    number: int
    for_s: float
    where: str

    @property
    def has_ended(self) -> bool:
        return self.where not in ("", OUTSIDE)


def make_store() -> Any:
    """Return a store of this engine's own on the server of the default store. A collective over all ranks."""
    number = from_rank_0(lambda: next(_numbers))
    return torch_dist.PrefixStore(f"terapipe_ds/watch/{number}", default_store().clone())


class WatchStore:
    """Give one rank's view of the store, to the main thread and the watching one.

    Args:
        slow_s: after so long an action of this rank is published with its stack.
    """

    def __init__(self, store: Any | None, record: RankRecord, world_size: int, slow_s: float) -> None:
        self._store, self._record, self._world_size, self._slow_s = store, record, world_size, slow_s
        self._published: Doing | None = None
        self._is_full = False
        self._beats = 0
        self._ended = ""
        self._asked = self._answered = 0
        self._turn = threading.Lock()
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failure: Failure | None = None  # the first one of the job, once it is known here
        self.lost_at: float | None = None
        if store is not None:
            threading.Thread(target=self._answer, name="terapipe-watchdog-asks", daemon=True).start()

    def close(self) -> None:
        """Let the asking thread end."""
        self._questions.put((None, None))

    @property
    def _is_gone(self) -> bool:
        """Return whether the store gives no answers now: its server has ended, or is still to answer a question."""
        return self._store is None or self.lost_at is not None or self._asked > self._answered

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what the store answers; None without a store, or where its server is gone or silent."""
        with self._turn:
            if self._is_gone or sys.is_finalizing():
                return None
            self._asked += 1
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._questions.put((question, answers))
            try:
                return answers.get(timeout=_SILENT_S)
            except queue.Empty:
                return None

    def _answer(self) -> None:
        while True:
            question, answers = self._questions.get()
            if question is None:
                return
            try:
                answer = question(self._store)
            except Exception:
                self.lost_at, answer = time.monotonic(), None
            self._answered += 1
            answers.put(answer)

    # -- this rank ---------------------------------------------------------------------------------------------------

    def beat(self, ended: str = "") -> None:
        """Publish a sign of life, and what this rank does if that is new or takes long; learn of a failure.

        Args:
            ended: why this rank leaves, for good.
        """
        self._ended = self._ended or ended
        doing, state = self._record.doing, None
        for_s = time.monotonic() - doing.since_s
        is_slow = for_s > self._slow_s
        if self._ended or doing is not self._published or (is_slow and not self._is_full):
            state = self._record.full() if is_slow and not self._ended else self._record.brief(self._ended)
            self._published, self._is_full = doing, is_slow
        self._beats += 1
        where = self._ended or ("" if doing.action and not doing.is_long else OUTSIDE)
        rank, beat = self._record.rank, json.dumps(_Beat(self._beats, for_s, where))

        def publish(store: Any) -> Any:
            if state is not None:
                store.set(f"state/{rank}", AS_JSON.dump_json(state).decode())
            store.set(f"beat/{rank}", beat)
            return self.failure is None and store.check([_ABORT]) and store.get(_ABORT)

        failure = self._ask(publish)
        if failure:
            self.failure = Failure(*json.loads(failure))

    def publish_failure(self, failure: Failure, wait_s: float) -> None:
        """Tell the others, unless one of them was first, and wait until all have read it."""
        first = self._ask(lambda store: store.compare_set(_ABORT, "", json.dumps(failure)))
        self.failure = failure if first is None else Failure(*json.loads(first))
        self._ask(lambda store: store.add("read", 1))
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self._is_gone:
            if (self._ask(lambda store: store.add("read", 0)) or 0) >= self._world_size:
                return
            time.sleep(_LOOK_S)

    # -- all ranks ---------------------------------------------------------------------------------------------------

    def is_one_outside(self) -> bool:
        """Return whether a rank is outside a batch, or in a call that may take long."""
        return any(beat.where == OUTSIDE for beat in self._read_beats().values())

    def live_states(self, wait_s: float) -> dict[int, RankState]:
        """Return the states of all ranks, once each has given another sign of life, or after `wait_s`.

        Ranks that give none until then are silent. The result is empty without the store, and incomplete where the job
        fails meanwhile.
        """
        before, deadline, ranks = self._read_beats(), time.monotonic() + wait_s, range(self._world_size)
        beats, quiet = before, list(ranks)
        while quiet and time.monotonic() < deadline and self.failure is None and not self._is_gone:
            time.sleep(_LOOK_S)
            self.beat()
            beats = self._read_beats()
            quiet = [r for r in ranks if beats.get(r) == before.get(r) and (r not in beats or not beats[r].has_ended)]
        texts = self._read("state")
        if self._is_gone:
            return {}
        states = {}
        for rank in ranks:
            state = AS_JSON.validate_json(texts[rank]) if rank in texts else RankState(rank, stage_id=-1)
            for_s = beats[rank].for_s if rank in beats else 0.0
            states[rank] = replace(state, for_s=for_s, silent=rank in quiet)
        return states

    def _read_beats(self) -> dict[int, _Beat]:
        return {rank: _Beat(*json.loads(text)) for rank, text in self._read("beat").items()}

    def _read(self, kind: str) -> dict[int, bytes]:
        """Return what each rank has published of a kind; ranks that have published nothing are left out."""
        keys = [f"{kind}/{rank}" for rank in range(self._world_size)]

        def read(store: Any) -> list[bytes | None]:
            if store.check(keys):
                return list(store.multi_get(keys))
            return [store.get(key) if store.check([key]) else None for key in keys]

        return {rank: text for rank, text in enumerate(self._ask(read) or ()) if text is not None}
