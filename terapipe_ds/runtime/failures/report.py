"""Describe the action of a rank, and report on all ranks when a job makes no progress.

These are plain values, so that a report can be tested without processes. A rank that waits for a message or in a
collective is not at fault. A rank that computes, that has left or that gives no sign of life may be.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from terapipe_ds.files.atomic import write_text
from terapipe_ds.runtime.failures.device_memory import allocator_retries

OUTSIDE = "outside a batch"
CLOSED = "done with its engine"
SHOWN_ACTIONS = 8  # of each rank, in a report
SHOWN_RANKS = 64
DRAWING = "drawing data from the iterator"
KEPT_ACTIONS = 32
_SHOWN_CALLS = 6
_STACK_CHARACTERS = 10_000
_COLLECTIVES = "distributed_c10d.py"  # the file of torch in which a thread waits during a collective
_POSTED = ("RA", "RG")  # receives that are only posted: they take no time
_FLIGHT_RECORDER = (
    "The device runs behind the host: what it waits for may be earlier than what the host does. NCCL's own record of "
    "collectives tells more: set TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_FR_DUMP_TEMP_FILE to a "
    "path on a shared disk and terapipe.stall_timeout_s above the timeout of the process group; then run python -m "
    "torch.distributed.flight_recorder.fr_trace on that folder."
)


class Wait(NamedTuple):
    """Describe in words the message that a rank waits for, and the ranks that send it; none if they are not known."""

    text: str
    ranks: tuple[int, ...] = ()


@dataclass(eq=False)
class Doing:
    """Describe the action of the main thread. It is replaced as a whole, because the watching thread reads it.

    Each action of a batch makes one, so the text is formatted only when somebody reads it. `what` is "" outside a
    batch, or any object that prints as its name; `awaited` may be a function that returns the wait.
    """

    what: object
    awaited: Wait | Callable[[], Wait] | None = None
    opening: bool = False  # draws data and meets the other ranks, which may be busy outside a batch
    is_long: bool = False  # a call outside a batch that may take long: saving a checkpoint
    draws: bool = False  # waits in the user's iterator, which has a limit of its own
    since_s: float = field(default_factory=time.monotonic)

    @property
    def action(self) -> str:
        """Return the name of the action; "" outside a batch."""
        return str(self.what)

    @property
    def wait(self) -> Wait | None:
        """Return the wait of the action; None if it waits for nothing."""
        return self.awaited() if callable(self.awaited) else self.awaited

    def __str__(self) -> str:
        action, wait = self.action, self.wait
        running = f"running {action}" if action else OUTSIDE
        return f"at {action}, waiting for {wait.text}" if wait else running


IN_LINES = "\n\t"


def printable(text: str, also: str = "") -> str:
    """Return `text` without the characters that move a cursor, colour a terminal or turn the direction of writing."""
    return "".join(letter if letter.isprintable() or letter in also else "\ufffd" for letter in text)


Line = Annotated[str, AfterValidator(printable)]
Lines = Annotated[str, AfterValidator(partial(printable, also=IN_LINES))]
Count = Annotated[int, Field(ge=0)]
FROM_A_STORE = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class PastAction:
    """Describe an action of the past: its start on the wall clock; without a duration it still goes on."""

    __pydantic_config__: ClassVar[ConfigDict] = FROM_A_STORE
    action: Line
    waited_for: Line
    start_s: float
    duration_s: float | None

    def __str__(self) -> str:
        what = f"{self.action} (waiting)" if self.waited_for else self.action
        return what if self.duration_s is None else f"{what} {_seconds(self.duration_s)}"


@dataclass(frozen=True)
class RankState:
    """Hold the state that a rank publishes."""

    __pydantic_config__: ClassVar[ConfigDict] = FROM_A_STORE
    rank: Count
    stage_id: int
    doing: Line = ""  # in words; "" outside a batch
    waits_for_ranks: tuple[int, ...] = ()  # ranks that send the awaited message, as far as they are known
    is_busy: bool = True  # it waits for no other rank, as far as this is known
    batch: Count = 0  # the number of batches it has begun
    for_s: float = 0.0  # for this time it has been doing this
    stack: Lines = ""  # the innermost calls of the main thread; "" while nothing takes long
    recent: Annotated[tuple[PastAction, ...], Field(max_length=KEPT_ACTIONS)] = ()  # the oldest first, if it takes long
    ended: Line = ""  # why it has left the job; "" while it runs
    silent: bool = False  # it gives no sign of life; the rest is its last published state
    silent_s: float = 0.0  # for at least this time, if it was measured
    alloc_retries: Count = 0  # of the device's allocator, before the batch

    def describe(self) -> str:
        """Describe the rank's action in a few words."""
        doing = self.doing or f"{OUTSIDE} (it has begun {self.batch} batches)"
        if self.ended or self.silent:
            ago = f", at least {_seconds(self.silent_s)} ago" if self.silent_s else ""
            return self.ended or f"does not answer: its process is gone or stopped; last seen {doing}{ago}"
        return f"{doing} for {_seconds(self.for_s)}" if self.for_s >= 0.001 else doing

    def save(self, folder: Path) -> None:
        """Write `last-actions-rank{rank}.json` into `folder`, whole or not at all. May raise OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"written_s": time.time(), "now": self.describe(), **asdict(self), "stack": self.stack.splitlines()}
        write_text(folder / f"last-actions-rank{self.rank:04d}.json", json.dumps(content, indent=1))


AS_JSON = TypeAdapter(RankState)


class RankRecord:
    """Keep the last actions of one rank in a ring buffer."""

    def __init__(self, rank: int, stage_id: int) -> None:
        self.rank = rank
        self.stage_id = stage_id
        self.doing = Doing("")
        self._recent: deque[Doing] = deque([self.doing], maxlen=KEPT_ACTIONS)
        self.batches = self._alloc_retries = 0  # begun until now, as many on all ranks
        self.long_call = 0, ""  # how many have begun, and the last one's name: in one value for the watching thread
        self._main_thread = threading.current_thread()

    @property
    def busy(self) -> str:
        """Return the main thread's action in a call of the engine; "" outside."""
        doing = self.doing
        return str(doing) if doing.action else ""

    def claim(self, call: str, moves: bool) -> None:
        """Refuse a call while another thread uses the engine: collectives would mix in another order on each rank.

        With `moves` another thread may take over between calls. Otherwise it may not: the moment differs by rank.
        A batch within another call would reset what this call has open; only the user's iterator may save.
        """
        here, main = threading.current_thread(), self._main_thread
        if here is main and self.busy and (moves or not self.doing.draws):
            raise RuntimeError(f"{call} was called while the engine is {self.busy}: call it after that")
        if here is not main and main.is_alive() and (self.busy or not moves):
            raise RuntimeError(
                f"{call} was called in thread {here.name!r}, while the engine runs in thread {main.name!r} "
                f"({self.busy or OUTSIDE}): ranks would wait for one another; call it there, between batches"
            )

    @property
    def is_watched(self) -> bool:
        """Tell whether the calling thread is the watched one."""
        return threading.current_thread() is self._main_thread

    def enter(self, doing: Doing) -> None:
        """Begin a batch or a long call; from now on the calling thread is the watched one."""
        self._main_thread = threading.current_thread()
        self._alloc_retries = allocator_retries()
        self.batches += doing.opening
        if doing.is_long:
            self.long_call = self.long_call[0] + 1, doing.action
        self.now(doing)

    @contextmanager
    def aside(self, doing: Doing) -> Iterator[None]:
        """Note a temporary action of the main thread, then that it goes on. The last actions do not show it."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = replace(before, since_s=time.monotonic())

    def note(self, action: object) -> None:
        """Note an action that the main thread begins."""
        self.now(Doing(action))

    def now(self, doing: Doing) -> None:
        """Note the action of the main thread from now on."""
        self.doing = doing
        self._recent.append(doing)

    def now_waits(self, wait: Wait | Callable[[], Wait]) -> object:
        """Note that the current action has to wait; return that action."""
        before = self.doing
        action = before.what or "no action"
        # Otherwise the report would show the action twice, once without any duration
        if self._recent[-1] is before and before.awaited is None:
            self._recent.pop()  # an action that begins by waiting is one entry
        self.now(Doing(action, wait))
        return action

    def brief(self, ended: str = "") -> RankState:
        """Return the state without the stack and the past actions, which take time to collect."""
        doing, now_s = self.doing, time.monotonic()
        what, wait = str(doing) if doing.action else "", doing.wait
        ranks = wait.ranks if wait else ()
        state = RankState(self.rank, self.stage_id, what, ranks, is_busy=wait is None, batch=self.batches)
        return replace(state, for_s=now_s - doing.since_s, ended=ended, alloc_retries=self._alloc_retries)

    def full(self) -> RankState:
        """Return the complete state for a report, with the stack of the main thread and its last actions."""
        # The frame of the main thread as the watching thread sees it: innermost calls last
        frame = sys._current_frames().get(self._main_thread.ident or 0)
        calls = [] if frame is None else traceback.format_stack(frame)
        # If the thread waits for a call that began earlier, the last line of Python shows it.
        waits = any(_COLLECTIVES in call for call in calls[-_SHOWN_CALLS:]) or (bool(calls) and ".wait(" in calls[-1])
        stack = printable("".join(calls[-_SHOWN_CALLS:])[-_STACK_CHARACTERS:], IN_LINES)
        state = replace(self.brief(), stack=stack, recent=self._past_actions())
        if waits and state.is_busy:
            state = replace(state, is_busy=False, doing=f"{state.doing or OUTSIDE}, in a collective")
        return state

    def _past_actions(self) -> tuple[PastAction, ...]:
        """Return the ring buffer, in which each action lasted until the next one began."""
        ring, wall_s = tuple(self._recent), time.time() - time.monotonic()
        durations_s = [*(after.since_s - before.since_s for before, after in pairwise(ring)), None]
        return tuple(
            PastAction(past.action or OUTSIDE, past.wait.text if past.wait else "", wall_s + past.since_s, duration_s)
            for past, duration_s in zip(ring, durations_s, strict=True)
        )


def at_fault(states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that hold up the job, as far as the states show them.

    These are the first of the following kinds that exists: ranks without a sign of life; ranks that have left after
    fewer batches than others have begun; ranks that are busy in a batch, unless their action began only recently; ranks
    that have left or are outside a batch.
    """
    # A rank is busy if it neither waits for a message nor is in a collective
    everyone = list(states.values())
    batches = max((one.batch for one in everyone), default=0)
    busy = [one for one in everyone if one.doing and one.is_busy and not one.ended]
    longest_s = max((one.for_s for one in busy), default=0.0)
    # The first kind that exists tells the cause; later kinds may be its consequences
    suspects = (
        [one for one in everyone if one.silent],
        [one for one in everyone if one.ended and one.batch < batches],
        [one for one in busy if one.for_s >= longest_s / 2],
        [one for one in everyone if one.ended or not one.doing],
    )
    return [one.rank for one in next(filter(None, suspects), [])]


def idle_s(states: Mapping[int, RankState], limit_s: float) -> float | None:
    """Return for how long no rank in a batch has begun an action; None if the job has stalled.

    A rank may wait for longer than `limit_s` while others work through many actions: the checks of all layers of the
    stage before it, or the slices of a long batch. Then each of these actions is shorter than the limit, and all ranks
    answer.
    """
    # Progress is an action that began less than `limit_s` ago, on any rank that is in a batch
    running = [one for one in states.values() if one.doing and not one.ended]
    batches = max((one.batch for one in states.values()), default=0)
    is_left = any(one.silent or (one.ended and one.batch < batches) for one in states.values())
    is_stuck = any(one.is_busy and one.for_s >= limit_s for one in running)
    latest_s = min((one.for_s for one in running), default=limit_s)
    return None if is_left or is_stuck or latest_s >= limit_s else latest_s


def stall_report(
    states: Mapping[int, RankState], limit_s: float, asynchronous: bool, key: str = "stall_timeout_s"
) -> str:
    """Return the whole report. Without states, it says that no rank can be asked.

    `key` of the section sets the limit. `asynchronous`: the device runs behind the host.
    """
    head = f"no progress for {limit_s:g} s (terapipe.{key}):"
    if not states:
        return (
            f"{head} and what the others do is not known, because the store of the job does not answer. Rank 0, or the "
            "launcher that serves the store, has ended, or stands still with its machine. Look there."
        )
    # List ranks at fault first, so that a job of thousands of ranks shows them
    faulty = [states[rank] for rank in at_fault(states)]
    shown = sorted({*(one.rank for one in faulty[:SHOWN_RANKS]), *list(states)[:SHOWN_RANKS]})
    lines = [head, *(line for rank in shown for line in _lines_of(states[rank]))]
    if len(shown) < len(states):
        lines.append(f"  and {len(states) - len(shown)} more ranks")
    # Name the rank at fault, the ranks that wait for it, and its place in the code
    for one in faulty[:SHOWN_RANKS]:
        waiting = [str(other.rank) for other in states.values() if one.rank in other.waits_for_ranks]
        whom = f" Ranks that wait for it: {', '.join(waiting)}." if waiting else ""
        lines.append(f"Stage {one.stage_id} (rank {one.rank}) holds up the job: {one.describe()}.{whom}")
        if one.stack and not one.silent:
            lines.append(f"Rank {one.rank} is here:\n{one.stack.rstrip()}")
    if not faulty:
        lines.append(
            "All ranks wait: they do not make the same calls in the same order, or a connection between two of them is "
            "broken or very slow. Compare what each of them waits for."
        )
    # The host may be ahead of its device, and a slow stage is no stall
    if asynchronous:
        lines.append(_FLIGHT_RECORDER)
    if any(one.doing and not one.silent for one in faulty):
        lines.append("If that stage is only slow, raise the limit.")
    return "\n".join(lines)


def _lines_of(state: RankState) -> list[str]:
    before = [str(past) for past in state.recent[:-1] if not past.action.startswith(_POSTED)]
    recent = [f"    before: {', '.join(before[-SHOWN_ACTIONS:])}"] if before else []
    if state.alloc_retries:
        recent.append(
            f"    its allocator ran out of memory and waited for the device {state.alloc_retries} times before"
        )
    return [f"  rank {state.rank} (stage {state.stage_id}): {state.describe()}", *recent]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.1f} ms"
