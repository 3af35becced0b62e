"""Record what one rank does and did last. The main thread writes, and the watching thread reads."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import replace

from terapipe_ds.runtime.failures.report import OUTSIDE, Doing, PastAction, RankState, Wait

KEPT_ACTIONS = 32
_SHOWN_CALLS = 6
_COLLECTIVES = "distributed_c10d.py"  # the file of torch in which a thread waits that is in a collective


class RankRecord:
    """Keep the last actions of one rank in a ring buffer."""

    def __init__(self, rank: int, stage_id: int) -> None:
        self.rank = rank
        self.stage_id = stage_id
        self.doing = Doing("")
        self._recent: deque[Doing] = deque([self.doing], maxlen=KEPT_ACTIONS)
        self._batches = 0
        self._main_thread = threading.get_ident()

    def enter(self, doing: Doing) -> None:
        """Begin a batch or a long call, in the calling thread, which is the watched one from now on."""
        self._main_thread = threading.get_ident()
        self._batches += doing.opening
        self.now(doing)

    def now(self, doing: Doing) -> None:
        """Note what the main thread does from now on."""
        self.doing = doing
        self._recent.append(doing)

    def now_waits(self, wait: Wait) -> str:
        """Note that the action in hand has to wait; return its name."""
        action = self.doing.action or "no action"
        if self._recent[-1] is self.doing and self.doing.wait is None:
            self._recent.pop()  # an action that begins by waiting is one entry
        self.now(Doing(action, wait))
        return action

    def brief(self, ended: str = "") -> RankState:
        """Return what costs nothing to find out; where in the code the main thread is costs more."""
        doing = self.doing
        ranks = doing.wait.ranks if doing.wait else ()
        return RankState(
            self.rank,
            self.stage_id,
            str(doing) if doing.action else "",
            ranks,
            doing.wait is None,
            self._batches,
            time.monotonic() - doing.since_s,
            ended=ended,
        )

    def full(self) -> RankState:
        """Return all that a report needs, with the stack of the main thread and its last actions."""
        frame = sys._current_frames().get(self._main_thread)
        calls = [] if frame is None else traceback.format_stack(frame)
        # Where a call that was begun earlier is waited for, the last line of Python says so.
        waits = any(_COLLECTIVES in call for call in calls[-_SHOWN_CALLS:]) or (bool(calls) and ".wait(" in calls[-1])
        state = replace(self.brief(), stack="".join(calls[-_SHOWN_CALLS:]), recent=self._past_actions())
        if waits and state.is_busy:
            state = replace(state, is_busy=False, doing=f"{state.doing or OUTSIDE}, in a collective")
        return state

    def _past_actions(self) -> tuple[PastAction, ...]:
        """Return the ring buffer, in which each action lasted until the next one began."""
        ring, wall_s = tuple(self._recent), time.time() - time.monotonic()
        ends = [doing.since_s for doing in ring[1:]]
        return tuple(
            PastAction(
                doing.action or OUTSIDE,
                doing.wait.text if doing.wait else "",
                wall_s + doing.since_s,
                None if end is None else end - doing.since_s,
            )
            for doing, end in zip(ring, [*ends, None], strict=True)
        )
