"""What the main thread of a rank does and has done last, written down cheaply and read by the watching thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from terapipe_ds.runtime.stall import Doing, RankState, Wait, past_actions, save_last_actions
from terapipe_ds.runtime.standing import standing_of

KEPT_ACTIONS = 32


class RankRecord:
    """A ring buffer of the last actions of one rank.

    Args:
        peers: this rank and those that its layers may wait for; empty where there are none.
        trace_dir: where :meth:`state` leaves what it gives; None for nowhere.
    """

    def __init__(self, rank: int, stage_id: int, peers: tuple[int, ...] = (), trace_dir: str | None = None) -> None:
        self.rank = rank
        self.stage_id = stage_id
        self.doing = Doing("")
        self.lost_in = ""  # the collective whose connection was lost, while the main thread looks for the reason
        self._peers = peers
        self._trace_dir = Path(trace_dir) if trace_dir else None
        self._recent: deque[Doing] = deque([self.doing], maxlen=KEPT_ACTIONS)
        self._batches = 0
        self._main_thread = threading.get_ident()

    def enter(self, doing: Doing) -> None:
        """The calling thread, from now on the watched one, begins a batch or a long call."""
        self._main_thread = threading.get_ident()
        self._batches += doing.opening
        self.now(doing)

    def now(self, doing: Doing) -> None:
        """From now on the main thread does this."""
        self.doing = doing
        self._recent.append(doing)

    def now_waits(self, wait: Wait) -> str:
        """The action in hand has to wait. Returns its name."""
        action = self.doing.action or "no action"
        if self._recent[-1] is self.doing and self.doing.wait is None:
            self._recent.pop()  # an action that begins by waiting is one entry
        self.now(Doing(action, wait))
        return action

    @property
    def stack(self) -> str:
        """Where the main thread stands."""
        return standing_of(self._main_thread).stack or "  nowhere\n"

    @property
    def is_waiting(self) -> bool:
        """The main thread waits for another rank, as far as can be told."""
        return self.doing.wait is not None or bool(standing_of(self._main_thread).collective)

    def brief(self, gone: str = "") -> RankState:
        """What to know of this rank should it not be able to answer."""
        doing = self.doing
        wait = doing.wait or Wait("")
        return RankState(
            self.rank, self.stage_id, doing.action, wait.text, wait.ranks, batch=self._batches, peers=self._peers,
            apart=doing.apart, gone=gone,
        )  # fmt: skip

    def state(self) -> RankState:
        """All that a report needs of this rank; also left in the trace directory."""
        now_s, standing = time.monotonic(), standing_of(self._main_thread)
        state = replace(
            self.brief(), collective=self.lost_in or standing.collective, stack=standing.stack,
            for_s=now_s - self.doing.since_s, recent=past_actions(tuple(self._recent), now_s, time.time()),
        )  # fmt: skip
        if self._trace_dir is not None:
            with suppress(OSError):  # the report matters more
                save_last_actions(self._trace_dir, state)
        return state
