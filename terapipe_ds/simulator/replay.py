"""How long will it take? A replay of the very `Schedule` that the engine runs, with given costs.

Every stage runs its computations in order. One starts when its stage is free and its input is there: F of part
p > 0 needs F of part p - 1 of the same unit, B needs B of part p + 1, each with its transfer where the two parts are
on different stages. Transfers of one link run one at a time in the order in which they are sent. All that is known
before the first cost, so a replay is one pass along a topological order: exact, without a clock that ticks.

Not modelled: how far ahead receives are posted (a transfer starts when its tensor is there and its link is free),
links that share one wire, reduces and the optimizer step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Action, Kind, Schedule, ScheduleError, validate
from terapipe_ds.schedule.lower import DIRECTION
from terapipe_ds.schedule.validate import Key, in_run_order
from terapipe_ds.simulator.costs import (
    BACKWARD,
    FORWARD,
    SEND,
    SPLIT_BACKWARD,
    WEIGHT,
    SimulationError,
    Span,
    UnitCosts,
    costs_per_part,
    plan_per_micro_batch,
    tabulate,
)
from terapipe_ds.simulator.memory import during_and_after, peaks, step_functions
from terapipe_ds.timeline import CriticalStep, Timeline, TimelineEvent

__all__ = ["Replay", "SimulationError", "UnitCosts", "simulate"]

_SEND_KIND = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRAD}


def simulate(
    schedule: Schedule,
    plan: SlicePlan | Sequence[SlicePlan],
    costs: Any,
    *,
    memory: Any = None,
    overlap: bool = True,
) -> Timeline:
    """Return what one batch of `schedule` does when, from time 0 on.

    Args:
        plan: how the sequences are cut; one plan, or one per micro-batch.
        costs: `forward_s(tokens, prefix)` and `backward_s(tokens, prefix)`, optionally `send_s(tokens)` (of the
            sending part; without it links cost nothing) and `weight_s(tokens, prefix)` (of the backward, what W
            takes); one object for all parts or a list with one per part.
        memory: what `planner.memory` gives; without it `peak_bytes` is None.
        overlap: transfers run beside computation. Otherwise the sending stage does nothing else meanwhile.

    Returns:
        F, B and W of all stages, transfers that take time as SA and SG of the sending stage (which makespan and bubble
        leave out), live slices, bytes, and the critical path.

    Raises:
        SimulationError: plan, costs or memory do not fit the schedule, or a time is negative or not finite.
        ScheduleError: the schedule cannot run.
    """
    return Replay.of(schedule).run(plan, costs, memory=memory, overlap=overlap)


@dataclasses.dataclass(frozen=True)
class _Times:
    """Per node in topological order, in seconds; `sent_s` is where the result is at the other end."""

    starts: list[float]
    ends: list[float]
    send_starts: list[float]
    sent: list[float]


class Replay:
    """What replays of one schedule share: its computations in a topological order, with their links.

    Build it once (or take `Replay.of(schedule)`, which keeps the latest ones) and replay many plans and costs.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raises ScheduleError where the schedule cannot run."""
        self.schedule = schedule
        self.num_parts = schedule.num_parts
        self._peak_live_slices = schedule.peak_live_slices()
        self._homes = {action.key: stage_id for stage_id, order in enumerate(schedule.orders) for action in order}
        self._check_complete()
        self._nodes = self._in_run_order()
        self._number_nodes()
        self._find_links()

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(schedule: Schedule) -> Replay:
        """Return the replay of a schedule, built when it is first asked for; the latest few are kept."""
        return Replay(schedule)

    def makespan(self, plan: SlicePlan | Sequence[SlicePlan], costs: Any, *, overlap: bool = True) -> float:
        """Return `run(...).makespan_s` without the events: for a search over many plans."""
        _, _, seconds, sends = self._durations(plan, costs)
        return max(self._pass(seconds, sends, overlap).ends)

    def peak_bytes(self, plan: SlicePlan | Sequence[SlicePlan], memory: Any) -> tuple[int, ...]:
        """Return `run(...).peak_bytes`, which no cost changes: a stage's bytes follow from its order."""
        spans = [one.spans() for one in plan_per_micro_batch(plan, self.schedule.num_slices)]
        return peaks(self.schedule, during_and_after(self.schedule, spans, memory), memory)

    def run(
        self, plan: SlicePlan | Sequence[SlicePlan], costs: Any, *, memory: Any = None, overlap: bool = True
    ) -> Timeline:
        """Return what `simulate` does."""
        plans, has_sends, seconds, sends = self._durations(plan, costs)
        times = self._pass(seconds, sends, overlap)
        computed = [self._computation(i, times) for i in range(len(self._nodes))]
        sent = {i: self._transfer(i, times) for i, link in enumerate(self._links) if link >= 0 and has_sends[i]}
        events = sorted([*computed, *sent.values()], key=lambda event: (event.start_s, event.stage_id))
        peak_bytes, bytes_over_time = None, None
        if memory is not None:
            bytes_of = during_and_after(self.schedule, [one.spans() for one in plans], memory)
            peak_bytes = peaks(self.schedule, bytes_of, memory)
            bytes_over_time = step_functions(self.schedule, bytes_of, memory, self._spans_of_stages(times))
        path = self._critical_path(times, computed, sent, overlap)
        head = self.schedule.num_stages, tuple(events), self.schedule.name, self._peak_live_slices, peak_bytes
        return Timeline(*head, critical_path=path, bytes_over_time=bytes_over_time)

    # --- what the schedule alone decides

    def _in_run_order(self) -> list[Action]:
        """Return all computations, those of a stage in its order, each after those that it needs."""
        try:
            return [action for _, action, _ in in_run_order(self.schedule)]
        except ScheduleError:
            validate(self.schedule)  # says best what is wrong with it
            raise

    def _check_complete(self) -> None:
        """Check that every computation is there once, at its part's place; `validate` says best what is wrong."""
        schedule = self.schedule
        counts = enumerate(schedule.num_slices)
        units = [(part_id, m, s) for m, count in counts for s in range(count) for part_id in range(self.num_parts)]
        kinds = (Kind.FORWARD,) if schedule.forward_only else (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
        missing = {(kind, *unit) for unit in units for kind in kinds[:2]} - self._homes.keys()
        unknown = self._homes.keys() - {(kind, *unit) for unit in units for kind in kinds}
        placed = (
            schedule.placement.get((stage_id, action.chunk_id)) == action.part_id
            for stage_id, order in enumerate(schedule.orders)
            for action in order
        )
        once = len(self._homes) == sum(map(len, schedule.orders))
        if not (units and once and not missing and not unknown and all(placed)):
            validate(schedule)
            raise SimulationError(f"schedule {schedule.name!r} cannot be replayed: check it with validate()")

    def _input_of(self, action: Action) -> Key | None:
        """Return the computation of another part whose result an action waits for. W takes what its B has kept."""
        part_id = action.part_id - DIRECTION.get(action.kind, 0)
        known = action.kind in DIRECTION and 0 <= part_id < self.num_parts
        return (action.kind, part_id, *action.unit) if known else None

    def _number_nodes(self) -> None:
        """Find, per node: its stage, the node it needs (or a last one that is done at 0), its part, unit and row."""
        number = {action.key: i for i, action in enumerate(self._nodes)}
        split = {(a.part_id, a.unit) for a in self._nodes if a.kind is Kind.WEIGHT}
        starts = np.cumsum([0, *self.schedule.num_slices]).tolist()
        rows = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.WEIGHT: WEIGHT}
        self._stages = [self._homes[action.key] for action in self._nodes]
        self._inputs: list[int] = []
        row_of: list[int] = []
        for action in self._nodes:
            needs = self._input_of(action)
            self._inputs.append(len(self._nodes) if needs is None else number[needs])
            is_split = action.kind is Kind.BACKWARD and (action.part_id, action.unit) in split
            row_of.append(SPLIT_BACKWARD if is_split else rows[action.kind])
        self._rows = np.array(row_of)
        self._parts = np.array([action.part_id for action in self._nodes])
        self._units = np.array([starts[action.micro_batch_id] + action.slice_id for action in self._nodes])

    def _find_links(self) -> None:
        """Find, per node, the number of the link on which its result leaves, -1 where it stays on its stage."""
        numbers: dict[Key, int] = {}  # (kind, part, stage, stage at the other end)
        self._links: list[int] = []
        self._peers: list[tuple[int, int]] = []  # (stage, part) at the other end
        for action, stage_id in zip(self._nodes, self._stages, strict=True):
            peer_part_id = action.part_id + DIRECTION.get(action.kind, 0)
            peer = self._homes.get((action.kind, peer_part_id, *action.unit), stage_id)
            self._peers.append((peer, peer_part_id))
            key = (action.kind, action.part_id, stage_id, peer)
            self._links.append(-1 if peer == stage_id else numbers.setdefault(key, len(numbers)))
        self._num_links = len(numbers)
        self._sends = np.array(self._links) >= 0
        self._rows_of_parts: list[set[int]] = [set() for _ in range(self.num_parts)]
        for part_id, row, sends in zip(self._parts.tolist(), self._rows.tolist(), self._sends.tolist(), strict=True):
            self._rows_of_parts[part_id] |= {row, SEND} if sends else {row}

    # --- one replay

    def _durations(
        self, plan: SlicePlan | Sequence[SlicePlan], costs: Any
    ) -> tuple[tuple[SlicePlan, ...], list[bool], list[float], list[float]]:
        """Return the plans, and per node: whether messages of its part take time, its seconds, those of its message."""
        plans = plan_per_micro_batch(plan, self.schedule.num_slices)
        parts = costs_per_part(costs, self.num_parts)
        numbers: dict[Span, int] = {}
        span_of_unit = [
            numbers.setdefault((length, start), len(numbers))
            for one in plans
            for length, start in zip(one.lengths, one.starts, strict=True)
        ]
        table = tabulate(parts, self._rows_of_parts, list(numbers))
        spans = np.array(span_of_unit)[self._units]
        seconds: list[float] = table[self._parts, self._rows, spans].tolist()
        sends: list[float] = np.where(self._sends, table[self._parts, SEND, spans], 0.0).tolist()
        takes_time = table[:, SEND].max(axis=1) > 0
        return plans, takes_time[self._parts].tolist(), seconds, sends

    def _pass(self, seconds: list[float], sends: list[float], overlap: bool) -> _Times:
        """Find the longest path to every node. Ends and arrivals are sums along it, so equal times are equal floats."""
        stage_free = [0.0] * self.schedule.num_stages
        link_free = [0.0] * (self._num_links + 1)
        starts, ends, send_starts = [], [], []
        arrivals = [0.0] * (len(seconds) + 1)
        for i, (stage_id, needs, link) in enumerate(zip(self._stages, self._inputs, self._links, strict=True)):
            start = stage_free[stage_id]
            if arrivals[needs] > start:
                start = arrivals[needs]
            send_start = end = start + seconds[i]
            starts.append(start)
            ends.append(end)
            stage_free[stage_id] = end
            if link >= 0:
                if link_free[link] > end:
                    send_start = link_free[link]
                arrivals[i] = link_free[link] = send_start + sends[i]
                if not overlap:
                    stage_free[stage_id] = arrivals[i]
            else:
                arrivals[i] = end
            send_starts.append(send_start)
        return _Times(starts, ends, send_starts, arrivals[:-1])

    # --- what is made of it

    def _computation(self, i: int, times: _Times) -> TimelineEvent:
        return self._event(i, self._nodes[i], times.starts[i], times.ends[i])

    def _transfer(self, i: int, times: _Times) -> TimelineEvent:
        action = self._nodes[i]
        send = Action(_SEND_KIND[action.kind], *action.unit, action.part_id, action.chunk_id, *self._peers[i])
        return self._event(i, send, times.send_starts[i], times.sent[i])

    def _event(self, i: int, action: Action, start_s: float, end_s: float) -> TimelineEvent:
        what = str(action), *action.unit, action.kind.value
        return TimelineEvent(self._stages[i], *what, start_s, end_s, action.chunk_id)

    def _spans_of_stages(self, times: _Times) -> list[list[tuple[float, float]]]:
        """Return, per stage, start and end of its computations in their order."""
        spans: list[list[tuple[float, float]]] = [[] for _ in self.schedule.orders]
        for stage_id, start, end in zip(self._stages, times.starts, times.ends, strict=True):
            spans[stage_id].append((start, end))
        return spans

    def _critical_path(
        self, times: _Times, computed: list[TimelineEvent], sent: dict[int, TimelineEvent], overlap: bool
    ) -> tuple[CriticalStep, ...]:
        """Walk back from the last end: each step starts in the moment in which the one before it ends."""
        before_on_stage, before_on_link = self._predecessors()
        node, on_link = max(range(len(computed)), key=times.ends.__getitem__), False
        steps: list[CriticalStep] = []
        while node >= 0:
            if on_link:
                before = before_on_link[node]
                waits = before >= 0 and times.sent[before] == times.send_starts[node] > times.ends[node]
                steps.append(CriticalStep(sent[node], "link" if waits else "dependency"))
                node, on_link = (before, True) if waits else (node, False)
                continue
            start, before, needs = times.starts[node], before_on_stage[node], self._inputs[node]
            by_stage = before >= 0 and (times.ends[before] if overlap else times.sent[before]) == start
            if by_stage:
                waited, on_link = "stage", not overlap and before in sent
            elif needs < len(computed) and start > 0:
                before, on_link = needs, needs in sent
                waited = "link" if on_link else "dependency"
            else:
                before, waited = -1, "start"
            steps.append(CriticalStep(computed[node], waited))
            node = before
        return tuple(reversed(steps))

    def _predecessors(self) -> tuple[list[int], list[int]]:
        """Return, per node, the one before it on its stage and the one before it on its link; -1 for none."""
        on_stage: dict[int, int] = {}
        on_link: dict[int, int] = {}
        stages, links = [], []
        for i, (stage_id, link) in enumerate(zip(self._stages, self._links, strict=True)):
            stages.append(on_stage.get(stage_id, -1))
            links.append(on_link.get(link, -1) if link >= 0 else -1)
            on_stage[stage_id] = i
            if link >= 0:
                on_link[link] = i
        return stages, links
