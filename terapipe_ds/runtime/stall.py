"""What a stalled job looks like: the states of its ranks, who waits for whom, and the report made of them.

Pure functions of plain values, no thread and no store, so that a report can be tested without processes. The graph is
simple: a rank that waits for a message waits for one other rank; a rank that stands in a collective waits for all who
are not there yet; a rank that does something of its own, or does not answer, waits for nobody. The job stands where
somebody whom the others wait for waits for nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from terapipe_ds.files import write_text

OUTSIDE = "outside a batch"
CLOSED = "done with its engine"
SHOWN_ACTIONS = 8  # of each rank, in a report
SHOWN_RANKS = 64
_POSTED = ("RA", "RG")  # receives that are only asked for: no time passes in them
_IN_LAYERS = ("F", "B", "W", "measuring")  # actions in which only tensor-parallel peers meet in collectives


class Wait(NamedTuple):
    """What a rank waits for, in words, and the ranks that it comes from; none where that is not known."""

    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Doing:
    """What the main thread does. Replaced as a whole, because the watching thread reads it."""

    action: str
    wait: Wait | None = None
    opening: bool = False  # draws data and meets the other stages, which may be busy outside a batch
    apart: bool = False  # a long call outside a batch: saving a checkpoint
    since_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"at {self.action}, waiting for {self.wait.text}" if self.wait else f"running {self.action}"


@dataclass(frozen=True)
class PastAction:
    """One entry of a rank's ring buffer. ``start_s``: of the wall clock; no duration: it goes on."""

    action: str
    waited_for: str
    start_s: float
    duration_s: float | None

    def __str__(self) -> str:
        what = f"{self.action} (waiting)" if self.waited_for else self.action
        return what if self.duration_s is None else f"{what} {_seconds(self.duration_s)}"


@dataclass(frozen=True)
class RankState:
    """What a rank says of itself when somebody asks.

    Attributes:
        action: the action of the schedule or what else it does; "" outside a batch.
        waits_for: in words; "" where it waits for no message.
        waits_for_ranks: who sends it; empty where that is not known.
        collective: the call of torch.distributed in which the main thread stands; "" where it stands elsewhere.
        batch: how many batches it has begun.
        for_s: since when it does this.
        peers: the tensor-parallel ranks that its layers meet, itself among them; empty where it is alone.
        stack: where the main thread stands, innermost call last.
        recent: what it did before, the oldest first.
        apart: it is in a long call outside a batch.
        silent: it did not answer; the rest is what was last heard of it.
        gone: it has said that it ends, for a reason that is told elsewhere.
    """

    rank: int
    stage_id: int
    action: str = ""
    waits_for: str = ""
    waits_for_ranks: tuple[int, ...] = ()
    collective: str = ""
    batch: int = 0
    for_s: float = 0.0
    peers: tuple[int, ...] = ()
    stack: str = ""
    recent: tuple[PastAction, ...] = ()
    apart: bool = False
    silent: bool = False
    gone: str = ""

    @property
    def is_free(self) -> bool:
        """It waits for nobody: it works, hangs by itself, or is gone."""
        return self.silent or bool(self.gone) or not (self.waits_for or self.collective)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        fields: dict[str, Any] = json.loads(text)
        recent = tuple(PastAction(**entry) for entry in fields.pop("recent"))
        lists: dict[str, Any] = {name: tuple(fields.pop(name)) for name in ("waits_for_ranks", "peers")}
        return cls(**fields, **lists, recent=recent)

    def describe(self) -> str:
        """In a few words, without the rank."""
        doing = self._doing()
        if self.gone:
            return self.gone
        if self.silent:
            return f"does not answer: its process is gone or stopped; last seen {doing}"
        return f"{doing} for {_seconds(self.for_s)}" if self.for_s >= 0.001 else doing

    def _doing(self) -> str:
        if not self.action:
            doing = OUTSIDE
        elif self.waits_for:
            return f"at {self.action}, waiting for {self.waits_for}"
        else:
            doing = f"running {self.action}"
        return f"{doing}, in a collective ({self.collective})" if self.collective else doing


def past_actions(ring: Sequence[Doing], now_s: float, wall_s: float) -> tuple[PastAction, ...]:
    """A ring buffer as a report shows it: each action lasted until the next one began.

    Args:
        now_s: of the clock of ``Doing.since_s``.
        wall_s: of the wall clock at that moment.
    """
    ends = [doing.since_s for doing in ring[1:]]
    return tuple(
        PastAction(
            doing.action or OUTSIDE, doing.wait.text if doing.wait else "", wall_s - (now_s - doing.since_s),
            None if end is None else end - doing.since_s,
        )
        for doing, end in zip(ring, [*ends, None], strict=True)
    )  # fmt: skip


# -- who waits for whom ----------------------------------------------------------------------------------------------


def waits_on(state: RankState, states: Mapping[int, RankState]) -> set[int]:
    """The ranks that ``state`` waits for at this moment."""
    if state.is_free:
        return set()
    if state.waits_for_ranks:
        return set(state.waits_for_ranks) & states.keys()
    in_layers = len(state.peers) > 1 and state.action.startswith(_IN_LAYERS)
    group = set(state.peers) & states.keys() if in_layers else set(states)
    missing = {rank for rank in group if states[rank].is_free or not states[rank].collective}
    elsewhere = {rank for rank in group if _place(states[rank]) != _place(state)}
    return (missing or elsewhere) - {state.rank}


def _place(state: RankState) -> tuple[str, str]:
    return state.action, state.collective


def who_waits_for(states: Mapping[int, RankState], of: Iterable[int] | None = None) -> dict[int, set[int]]:
    """For each rank, or those of ``of``, all that wait for it, directly or through others."""
    direct = {rank: waits_on(state, states) for rank, state in states.items()}
    waiters: dict[int, set[int]] = {}
    for rank in states if of is None else of:
        found: set[int] = set()
        frontier = {rank}
        while frontier:
            frontier = {other for other, awaited in direct.items() if not awaited.isdisjoint(frontier)} - found
            found |= frontier
        waiters[rank] = found
    return waiters


def culprits(states: Mapping[int, RankState]) -> list[int]:
    """Where the job stands: the ranks that wait for nobody while others wait for them; empty where all wait.

    Ranks that are gone come before those that still run; of these, the ones that have only just begun what they do
    while another has been at it for long are left out: they make progress.
    """
    free = [state for state in states.values() if state.is_free]
    waiters = who_waits_for(states, [state.rank for state in free])
    awaited = [state for state in free if waiters[state.rank]]
    if not awaited:  # nobody waits yet: the one that hangs is the one that says so
        awaited = [state for state in free if state.action or state.silent]
    for gone in ([s.rank for s in awaited if s.silent], [s.rank for s in awaited if s.gone]):
        if gone:
            return gone
    longest_s = max((state.for_s for state in awaited), default=0.0)
    return [state.rank for state in awaited if state.for_s >= longest_s / 2]


# -- the report ------------------------------------------------------------------------------------------------------


def report_lines(states: Iterable[RankState]) -> list[str]:
    """What each rank does and did last, one or two lines per rank; of a large job only those that wait for nobody, and
    some of the others."""
    everyone = sorted(states, key=lambda state: (not state.is_free, state.rank))
    left_out = len(everyone) - SHOWN_RANKS
    lines = []
    for state in sorted(everyone[:SHOWN_RANKS], key=lambda state: state.rank):
        lines.append(f"  {_name(state)}: {state.describe()}")
        before = [str(past) for past in state.recent[:-1] if not past.action.startswith(_POSTED)]
        if before:
            lines.append(f"    before: {', '.join(before[-SHOWN_ACTIONS:])}")
    if left_out > 0:
        lines.append(f"  and {left_out} more ranks, which wait")
    return lines


def stall_report(states: Mapping[int, RankState], stall_timeout_s: float, asynchronous: bool) -> str:
    """The whole report. ``asynchronous``: the device runs behind the host. No states: nobody can be asked."""
    head = f"no progress for {stall_timeout_s:g} s (terapipe.stall_timeout_s):"
    if not states:
        return (
            f"{head} and nobody can be asked, because rank 0, which serves the watch-dog's store, does not answer: its "
            "process has ended, or stands still with its machine. Look there."
        )
    lines = [head, *report_lines(states.values()), *verdict(states)]
    if asynchronous:
        lines.append("The device runs behind the host: what it waits for may be earlier than where the host stands.")
    if any(states[rank].action and not states[rank].silent for rank in culprits(states)):
        lines.append("If that stage is only slow, raise the limit.")
    return "\n".join(lines)


def verdict(states: Mapping[int, RankState]) -> list[str]:
    """Which stage the job stands at, and where in the code."""
    blamed = culprits(states)
    if not blamed:
        return [_cycle(states)]
    waiters = who_waits_for(states, blamed)
    lines = []
    for state in (states[rank] for rank in blamed):
        waiting = sorted(waiters[state.rank])
        whom = f"; {_ranks(waiting)} for it" if waiting else ""
        lines.append(f"Stage {state.stage_id} (rank {state.rank}) is where it stands: {_verdict_on(state)}{whom}.")
        if state.stack and not state.silent:
            lines.append(f"Rank {state.rank} stands here:\n{state.stack.rstrip()}")
    return lines


def _verdict_on(state: RankState) -> str:
    if state.silent or state.gone:
        return f"it {state.describe()}" if state.silent else f"it is {state.gone}"
    if not state.action:
        return f"it is {state.describe()} (it has begun {state.batch} batches) and waits for no other rank"
    return f"it has been {state.describe()} and waits for no other rank"


def _ranks(waiting: Sequence[int]) -> str:
    if len(waiting) == 1:
        return f"rank {waiting[0]} waits"
    shown = ", ".join(map(str, waiting[:SHOWN_ACTIONS]))
    return f"ranks {shown} wait" if len(waiting) <= SHOWN_ACTIONS else f"ranks {shown} and more wait"


def _cycle(states: Mapping[int, RankState]) -> str:
    """All wait: for each other, or in collectives that never end."""
    circle = [rank for rank, waiters in who_waits_for(states).items() if rank in waiters]
    if not circle:
        return "All ranks stand in the same collective: a connection between two of them is broken, or very slow."
    return (
        f"Ranks {', '.join(map(str, circle))} wait for each other: they do not make the same calls in the same order. "
        "Compare what each of them waits for."
    )


def _name(state: RankState) -> str:
    return f"rank {state.rank} (stage {state.stage_id})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.1f} ms"


# -- the file --------------------------------------------------------------------------------------------------------


def save_last_actions(folder: Path, state: RankState) -> None:
    """Write ``last-actions-rank{rank}.json`` into ``folder``, whole or not at all.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"written_s": time.time(), "now": state.describe(), **asdict(state), "stack": state.stack.splitlines()}
    text = json.dumps(content, indent=1)
    path = folder / f"last-actions-rank{state.rank:04d}.json"
    write_text(path, text)
