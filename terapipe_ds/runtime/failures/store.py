"""Let the watch-dogs of a job exchange states, signs of life, and the first failure.

They use a clone of torch's default store, because the main thread may be busy in that store. The process that serves
the store may not answer. So one thread sends all requests, and the others wait for its answer for a limited time.
Nothing here raises: a store that is gone gives no answers, and a value that no rank has written is ignored.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

import torch.distributed as torch_dist
from pydantic import Field, TypeAdapter

from terapipe_ds.runtime.agreement import default_store, from_rank_0
from terapipe_ds.runtime.failures.process_end import POLL_S, keep_from_children
from terapipe_ds.runtime.failures.report import (
    AS_JSON,
    CLOSED,
    DRAWING,
    IN_LINES,
    OUTSIDE,
    Count,
    Doing,
    Line,
    Lines,
    RankRecord,
    RankState,
    printable,
)

T = TypeVar("T")
_ABORT = "abort"
_LOOK_S = 0.05
_RANKS_PER_S = 200.0  # the rate at which a waiting rank reads signs of life; thousands of ranks share one store
_MAX_CHARACTERS = 20_000  # of a published error; each takes at most twelve bytes in JSON
_MAX_BYTES = 1 << 18  # of a value that is read
_SILENT_S = 3.0  # after a store has not answered for this time, send no request until the answer has come
_numbers = itertools.count(1)


def _keep_process_groups() -> None:
    """Keep process groups alive in a forked child: gloo's end would wait for threads that only the parent has."""
    for group in torch_dist.distributed_c10d._world.pg_map:  # noqa: SLF001 - no other way to all of them
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_process_groups)


class Failure(NamedTuple):
    """Say why a rank ends. With `stalled` the error is the rank's report on all ranks."""

    rank: Count
    stage_id: int
    action: Line
    error: Lines
    stalled: bool = False

    def __str__(self) -> str:
        who = f"rank {self.rank} (stage {self.stage_id})"
        return f"{who} reports {self.error}" if self.stalled else f"{who} failed at {self.action}: {self.error}"


class _Beat(NamedTuple):
    """Hold a sign of life: its number, the seconds since the action began, and where the rank is ("" in a batch).

    Also the numbers of batches and of long calls that it has begun, and the name of its last long call.
    """

    number: Count
    for_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    where: Line
    batches: Count = 0
    long_calls: Count = 0
    long_call: Line = ""

    @property
    def has_ended(self) -> bool:
        return self.where not in ("", OUTSIDE, DRAWING)


_FAILURE, _BEAT = TypeAdapter(Failure), TypeAdapter(_Beat)


def make_store() -> Any:
    """Return a store of this engine's own on the server of the default store. A collective over all ranks."""
    number = from_rank_0(lambda: next(_numbers))
    store = default_store()
    while isinstance(store, torch_dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch_dist.TCPStore):
        keep_from_children(store.port)
    return torch_dist.PrefixStore(f"terapipe_ds/watch/{number}", default_store().clone())


class WatchStore:
    """Give the main thread and the watching one access to one rank's view of the store.

    Args:
        slow_s: each time that an action of this rank has lasted so much longer, it is published with its stack.
        warn: called once for each key whose value no rank has written.
    """

    def __init__(
        self, store: Any | None, record: RankRecord, world_size: int, slow_s: float, warn: Callable[[str], None]
    ) -> None:
        self._store, self._record, self._world_size, self._slow_s = store, record, world_size, slow_s
        self._warn = warn
        self._strange: set[str] = set()  # keys with such values
        self._beats_of: dict[int, _Beat] = {}  # the last one of each rank
        self._quiet_s = dict.fromkeys(range(world_size), 0.0)  # for this time it has been the last one
        self._looked_at = -math.inf
        self._published: tuple[Doing | None, int] = None, 0  # and how many times `slow_s` it had lasted
        self._beats = 0
        self._ended = ""
        self._asked = self._answered = 0
        self._silent: list[int] = []  # ranks, by the last report
        self._turn = threading.RLock()
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failure: Failure | None = None  # the first one of the job, once it is known here
        self.lost_at: float | None = None
        self._thread = threading.Thread(target=self._answer, name="terapipe-watchdog-asks", daemon=True)
        if store is not None:
            self._thread.start()

    def close(self) -> None:
        """End the asking thread, which holds all that the record refers to: messages, and so their connections."""
        self._questions.put(None)
        if self._store is not None:
            self._thread.join(timeout=1.0)
        self._store = None  # and its connection: a reference to the watch-dog may remain

    @property
    def _is_gone(self) -> bool:
        """Return whether the store gives no answers now: its server has ended, or is still to answer a question."""
        with self._turn:  # a question of another thread at this moment does not mean that
            return self._store is None or self.lost_at is not None or self._asked > self._answered

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the store's answer; None without a store, or if its server is gone or silent."""
        with self._turn:
            if self._is_gone or sys.is_finalizing():
                return None
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._questions.put((question, answers))
            self._asked += 1  # after it: Ctrl-C in between must not leave a question that is never answered
            try:
                return answers.get(timeout=_SILENT_S)
            except queue.Empty:
                return None

    def _answer(self) -> None:
        for question, answers in iter(self._questions.get, None):
            try:
                answer = question(self._store)
            except Exception:
                self.lost_at, answer = time.monotonic(), None
            self._answered += 1
            answers.put(answer)

    # -- this rank ---------------------------------------------------------------------------------------------------

    def beat(self, ended: str = "") -> None:
        """Publish a sign of life, a new or slow action, or why this rank has `ended`; learn of a failure."""
        self._ended = self._ended or ended
        # The state is long and seldom new; the sign of life is short and comes with every beat
        doing, text = self._record.doing, None
        for_s = time.monotonic() - doing.since_s
        # A long call moves on within one action, from a collective to work of this rank alone: its stack grows old
        times_slow = int(for_s / self._slow_s)
        if self._ended or (doing, times_slow) != self._published:
            state = self._record.full() if times_slow and not self._ended else self._record.brief(self._ended)
            text = AS_JSON.dump_json(state).decode()
            self._published = doing, times_slow
        # The place of the rank decides how long others wait for it
        self._beats += 1
        where = self._ended or (DRAWING if doing.draws else "" if doing.action and not doing.is_long else OUTSIDE)
        rank, batches = self._record.rank, self._record.batches
        beat = json.dumps(_Beat(self._beats, for_s, where, batches, *self._record.long_call))

        # One question for all of it: the store may be slow to answer
        def publish(store: Any) -> Any:
            if text is not None:
                store.set(f"state/{rank}", text)
            store.set(f"beat/{rank}", beat)
            return self.failure is None and store.check([_ABORT]) and store.get(_ABORT)

        failure = self._ask(publish)
        if failure and self.failure is None:
            self.failure = self._valid(_FAILURE, _ABORT, failure)

    def publish_failure(self, failure: Failure) -> None:
        """Publish the failure, unless another rank was first."""
        # The first failure stays: later ones are mostly its consequences
        text = json.dumps(failure._replace(error=printable(failure.error, IN_LINES)[:_MAX_CHARACTERS]))
        first = self._ask(lambda store: store.compare_set(_ABORT, "", text))
        published = self._valid(_FAILURE, _ABORT, first)
        # A value that no rank has written must not hide the failure
        if first is not None and published is None:
            self._ask(lambda store: store.set(_ABORT, text))
        self.failure = published or failure

    def wait_until_read(self, wait_s: float) -> None:
        """Publish that this rank has read why the job ends, and wait until all ranks with signs of life have, too."""
        self.have_come("read", self._world_size - len(self._silent), wait_s)

    def have_come(self, name: str, num_ranks: int, wait_s: float) -> bool:
        """Publish that this rank has come to a place, and return whether `num_ranks` ranks come within `wait_s`."""
        self._ask(lambda store: store.add(name, 1))
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self._is_gone:
            if (self._ask(lambda store: store.add(name, 0)) or 0) >= num_ranks:
                return True
            time.sleep(_LOOK_S)
        return False

    # -- all ranks ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the signs of life, unless they were read just now; a rank that waits calls this repeatedly.

        The time for which a rank is quiet counts in looks: a look that comes late, because this process itself was
        stopped, does not mean that others are gone. While the store does not answer, all are quiet.
        """
        # Thousands of ranks share one store, so the more ranks there are, the less often each looks
        now, pause_s = time.monotonic(), max(POLL_S, self._world_size / _RANKS_PER_S)
        passed_s = now - self._looked_at
        if passed_s < pause_s:
            return
        # While the store does not answer, nothing is known about any rank: all are quiet for this time
        is_silent = self._is_gone and self._store is not None and self.lost_at is None
        beats = self._beats_of if is_silent else self._read("beat", _BEAT)
        if not (beats or is_silent):
            return
        self._looked_at = now
        # Add at most two pauses: this process may itself have stood still
        for rank in self._quiet_s:
            is_quiet = beats.get(rank) == self._beats_of.get(rank) and not (rank in beats and beats[rank].has_ended)
            self._quiet_s[rank] = self._quiet_s[rank] + min(passed_s, 2 * pause_s) if is_quiet else 0.0
        self._beats_of = beats

    def is_one_silent(self, for_s: float) -> bool:
        """Return whether a rank has given no sign of life for `for_s` seconds, by the looks until now."""
        return max(self._quiet_s.values()) >= for_s

    def is_one(self, where: str) -> bool:
        """Return whether another rank was `OUTSIDE` or `DRAWING` at the last look."""
        return any(beat.where == where for rank, beat in self._beats_of.items() if rank != self._record.rank)

    def elsewhere(self, doing: Doing) -> dict[str, list[int]]:
        """Return the ranks that cannot come to the long call `doing`, by where they are: they wait there for this rank.

        They are in a batch that this rank has not begun, done with the engine, or in another call of this number.
        """
        batches, (long_calls, name), places = self._record.batches, self._record.long_call, dict[str, list[int]]()
        for rank, beat in self._beats_of.items():
            if beat.long_calls < long_calls and (beat.batches > batches or beat.where == CLOSED):
                places.setdefault("done" if beat.where == CLOSED else "in a batch", []).append(rank)
            elif beat.long_calls == long_calls and beat.long_call != name:
                places.setdefault(f"in {beat.long_call}", []).append(rank)
        return places if self._record.doing is doing else {}  # else the numbers may be of the next call

    def live_states(self, wait_s: float) -> dict[int, RankState]:
        """Return the states of all ranks, once each has given another sign of life, or after `wait_s`.

        Ranks that give none until then are silent. This does not wait for ranks that were already quiet for that time.
        The result is empty without the store, and incomplete if the job fails during the wait.
        """
        before, deadline, ranks = self._read("beat", _BEAT), time.monotonic() + wait_s, range(self._world_size)
        beats, quiet = before, list(ranks)
        # Begin with the last sign of each rank
        for rank in ranks:
            if before.get(rank) != self._beats_of.get(rank):  # it was quiet by the last look, which may be long ago
                self._quiet_s[rank] = 0.0
        # Wait for one more sign of life of each rank, except those that were quiet for long enough
        while time.monotonic() < deadline and self.failure is None and not self._is_gone:
            time.sleep(_LOOK_S)
            self.beat()
            beats = self._read("beat", _BEAT)
            quiet = [r for r in ranks if beats.get(r) == before.get(r) and (r not in beats or not beats[r].has_ended)]
            if all(self._quiet_s[rank] >= wait_s for rank in quiet):
                break
        # The states tell the actions of the ranks; the signs of life tell for how long
        published = self._read("state", AS_JSON)
        if self._is_gone:
            return {}
        self._silent = quiet
        states = {}
        for rank in ranks:
            state = published.get(rank)
            if state is None or state.rank != rank:
                state = RankState(rank, stage_id=-1)
            for_s = beats[rank].for_s if rank in beats else 0.0
            states[rank] = replace(state, for_s=for_s, silent=rank in quiet, silent_s=self._quiet_s[rank])
        return states

    def _read(self, kind: str, adapter: TypeAdapter[T]) -> dict[int, T]:
        """Return the values of a kind that ranks have published; ranks without one are left out."""
        keys = [f"{kind}/{rank}" for rank in range(self._world_size)]

        def read(store: Any) -> list[bytes | None]:
            if store.check(keys):
                return list(store.multi_get(keys))
            return [store.get(key) if store.check([key]) else None for key in keys]

        values = [self._valid(adapter, key, text) for key, text in zip(keys, self._ask(read) or (), strict=False)]
        return {rank: value for rank, value in enumerate(values) if value is not None}

    def _valid(self, adapter: TypeAdapter[T], key: str, text: bytes | None) -> T | None:
        """Return a value of the store, or None if there is none, or if it has not the form in which ranks write."""
        if text is None:
            return None
        try:
            if len(text) > _MAX_BYTES:
                raise ValueError(f"it has {len(text)} bytes, and at most {_MAX_BYTES} are read")
            return adapter.validate_json(text, strict=True)
        except ValueError as error:
            if key not in self._strange:
                self._strange.add(key)
                reason = printable(str(error).replace("\n", " "))[:500]
                self._warn(f"{key!r} in the store of the job is passed over, because no rank has written it: {reason}")
            return None
