"""Replay the very `Schedule` that the engine runs under given costs, to tell how long it will take.

Every stage runs its computations in order. One starts when its stage is free and its input is there: F of part
p > 0 needs F of part p - 1 of the same unit, B needs B of part p + 1, each with its transfer where the two parts are
on different stages. Transfers of one link run one at a time in the order in which they are sent. All these dependencies
are known before the first cost, so a replay is one pass along a topological order: exact, without a ticking clock.

Not modelled: how far ahead receives are posted (a transfer starts when its tensor is there and its link is free),
waits of a stage that is a whole budget of messages ahead of the next one, links that share one wire, reduces and the
optimizer step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from terapipe_ds.costs.interface import costs_of_parts
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Action, Schedule, validate
from terapipe_ds.schedule.clock import BACKWARD, FORWARD
from terapipe_ds.schedule.proofs import budget_of_sends, is_ordered
from terapipe_ds.schedule.schedule import message
from terapipe_ds.simulator.costs import (
    SEND,
    SEND_GRADIENT,
    SPLIT_BACKWARD,
    SimulationError,
    plan_per_micro_batch,
    spans_of_units,
    tabulate,
)
from terapipe_ds.simulator.offload import HostCopies, Offloaded, find_offloaded
from terapipe_ds.simulator.peak_memory import Memory, bytes_of_stage, host_bytes, offloaded_bytes, over_time
from terapipe_ds.timeline import CriticalStep, Timeline, TimelineEvent

Plans = SlicePlan | Sequence[SlicePlan]
"""How the sequences are cut: one plan for all micro-batches, or one per micro-batch."""


def simulate(
    schedule: Schedule, plan: Plans, costs: Any, *, memory: Memory | None = None, overlap: bool = True
) -> Timeline:
    """Return the timeline of one batch of `schedule`, from time 0 on.

    Args:
        costs: `forward_s(tokens, prefix)` and `backward_s(tokens, prefix)`, optionally `send_s(tokens)` (of the
            sending part; without it links cost nothing), `send_gradient_s(tokens)` (of its message to the part
            before it; without it as `send_s`) and `weight_s(tokens, prefix)` (of the backward, the seconds of W); one
            object for all parts or a list with one per part.
        memory: a model from `planner.memory`; without it `peak_bytes` is None.
        overlap: transfers run beside computation. Otherwise the sending stage does nothing else during a transfer.

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
    """Hold times per node in topological order, in seconds; at `sent_s` the result is at the other end."""

    starts: list[float]
    ends: list[float]
    send_starts: list[float]
    sent: list[float]


class Replay:
    """Hold the computations of one schedule in a topological order, with their links, for many replays.

    Build it once (or take `Replay.of(schedule)`, which keeps the latest ones) and replay many plans and costs.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raise ScheduleError where the schedule cannot run."""
        self.schedule = schedule
        self._num_parts = schedule.num_parts
        if not is_ordered(schedule):
            self._refuse()
        self._find_nodes()
        self._find_links()
        self._peaks: dict[Any, tuple[int, int]] = {}  # bytes by stage, plan and memory

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(schedule: Schedule) -> Replay:
        """Return the replay of a schedule, built at the first call; the latest few are kept."""
        return Replay(schedule)

    def makespan(self, plan: Plans, costs: Any) -> float:
        """Return `run(...).makespan_s` without the events: for a search over many plans."""
        return max(self.ends_of_stages(plan, costs))

    def ends_of_stages(self, plan: Plans, costs: Any, memory: Memory | None = None) -> list[float]:
        """Return, per stage, the end of its last computation: then it can reduce its gradients."""
        plans, _, seconds, sends = self._durations(plan, costs)
        last = [0.0] * self.schedule.num_stages
        times = self._pass(seconds, sends, True, self._copies(plans, memory))
        for stage_id, end_s in zip(self._stages, times.ends, strict=True):
            last[stage_id] = end_s  # the computations of a stage are in its order
        return last

    def peak_bytes(self, plan: Plans, memory: Memory, stages: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return `run(...).peak_bytes`, which no cost changes: a stage's bytes follow from its order.

        `stages` are those to count; None: all.
        """
        return tuple(map(max, self.peaks_and_steps(plan, memory, stages)))

    def peaks_and_steps(
        self, plan: Plans, memory: Memory, stages: Sequence[int] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """Return, per stage, the peak bytes before its optimizer steps, and the bytes while it steps."""
        plans = plan_per_micro_batch(plan, self.schedule.num_slices)
        spans = [one.spans() for one in plans]
        # while a search moves layers between two stages, the bytes of all others stay
        counted = range(self.schedule.num_stages) if stages is None else stages
        places = self.schedule.placement.items()
        keys = [(k, plans, memory.key_of([part for (stage, _), part in places if stage == k])) for k in counted]
        for key in keys:
            if key not in self._peaks:
                numbers = bytes_of_stage(self.schedule, key[0], spans, memory, self._outstanding)
                self._peaks[key] = max(numbers[:-1]), numbers[-1]
        return tuple(self._peaks[key] for key in keys)

    def peak_by_kind(self, plan: Plans, memories: Sequence[Memory]) -> list[list[list[int]]]:
        """Return, per stage, the bytes under each memory at the two times of the first one's `peaks_and_steps`."""
        plans = plan_per_micro_batch(plan, self.schedule.num_slices)
        numbers = [self._bytes_of_stages(plans, memory, apart=True) for memory in memories]
        peaks = [stage.index(max(stage[:-1])) for stage in numbers[0]]
        return [[[of[k][at] for of in numbers] for at in (peak, -1)] for k, peak in enumerate(peaks)]

    def host_bytes(self, plan: Plans, memory: Memory) -> tuple[int, ...]:
        """Return, per stage, the most bytes of offloaded slices that are on the host at a time."""
        spans = [one.spans() for one in plan_per_micro_batch(plan, self.schedule.num_slices)]
        return tuple(host_bytes(order, spans, memory) for order in self.schedule.orders)

    def run(self, plan: Plans, costs: Any, *, memory: Memory | None = None, overlap: bool = True) -> Timeline:
        """Return the same timeline as `simulate`."""
        plans, has_sends, seconds, sends = self._durations(plan, costs)
        times = self._pass(seconds, sends, overlap, self._copies(plans, memory))
        computed = [self._event(i, action, times.starts[i], times.ends[i]) for i, action in enumerate(self._actions)]
        sent = {
            i: self._event(i, send, times.send_starts[i], times.sent[i])
            for i, action in enumerate(self._actions)
            if has_sends[i] and (send := message(action, self._peers[i])) is not None
        }
        peak_bytes, bytes_over_time = None, None
        if memory is not None:
            numbers = self._bytes_of_stages(plans, memory)
            spans: list[list[tuple[float, float]]] = [[] for _ in numbers]
            for stage_id, start_s, end_s in zip(self._stages, times.starts, times.ends, strict=True):
                spans[stage_id].append((start_s, end_s))
            peak_bytes, bytes_over_time = tuple(map(max, numbers)), tuple(map(over_time, numbers, spans))
        return Timeline(
            self.schedule.num_stages,
            tuple(sorted([*computed, *sent.values()], key=lambda event: (event.start_s, event.stage_id))),
            self.schedule.name,
            self.schedule.peak_live_slices(),
            peak_bytes,
            bytes_over_time,
            self._critical_path(times, computed, sent, overlap),
        )

    # --- decided by the schedule alone

    def _refuse(self) -> NoReturn:
        validate(self.schedule)  # its error explains best what is wrong
        raise SimulationError(f"schedule {self.schedule.name!r} cannot be replayed: check it with validate()")

    def _find_nodes(self) -> None:
        """Find all computations, with each stage's in its order and each after those that it needs; and per node: its
        stage, part, unit, row of the table, and the node of another part that it needs (or a last one, done at 0)."""
        nodes = self.schedule.nodes
        order = np.array(nodes.run_order(), np.int64)
        if len(order) < nodes.num_nodes:
            self._refuse()
        actions = [action for order in self.schedule.orders for action in order]
        self._actions = [actions[node] for node in order]
        self._stages: list[int] = nodes.stage[order].tolist()
        place = np.empty(nodes.num_nodes + 1, np.int64)
        place[order], place[-1] = np.arange(nodes.num_nodes), nodes.num_nodes
        self._inputs: list[int] = place[nodes.inputs[order]].tolist()
        self._parts, self._units = nodes.part[order], nodes.unit[order]
        kinds = nodes.kind[order]
        self._rows = np.where((kinds == BACKWARD) & nodes.is_split[order], SPLIT_BACKWARD, kinds)
        self._peers: list[int] = nodes.peers[order].tolist()

    def _find_links(self) -> None:
        """Find, per node, the number of the link that takes its result to another stage, or -1."""
        peers, num_stages = np.array(self._peers, np.int64), self.schedule.num_stages
        self._sends = peers >= 0
        is_forward = self._rows == FORWARD
        wires = ((is_forward * self._num_parts + self._parts) * num_stages + self._stages) * num_stages + peers
        found, numbers = np.unique(wires[self._sends], return_inverse=True)
        links = np.full(len(peers), -1)
        links[self._sends] = numbers
        self._links: list[int] = links.tolist()
        self._num_links = len(found)
        rows = [set(self._rows[self._parts == part_id].tolist()) for part_id in range(self._num_parts)]
        senders = set(self._parts[self._sends].tolist())
        self._rows_of_parts = [
            of | {SEND, SEND_GRADIENT} if part_id in senders else of for part_id, of in enumerate(rows)
        ]

    # --- one replay

    def _durations(self, plan: Plans, costs: Any) -> tuple[tuple[SlicePlan, ...], list[bool], list[float], list[float]]:
        """Return the plans, and per node: whether its part's messages take time, its seconds, its message's seconds."""
        plans = plan_per_micro_batch(plan, self.schedule.num_slices)
        parts = costs_of_parts(costs, self._num_parts, SimulationError)
        distinct, of_units = spans_of_units(plans)
        table = tabulate(parts, self._rows_of_parts, distinct)
        spans = np.array(of_units)[self._units]
        seconds: list[float] = table[self._parts, self._rows, spans].tolist()
        messages = np.where(self._rows == FORWARD, SEND, SEND_GRADIENT)
        sends: list[float] = np.where(self._sends, table[self._parts, messages, spans], 0.0).tolist()
        takes_time = table[:, SEND:].max(axis=(1, 2)) > 0
        return plans, takes_time[self._parts].tolist(), seconds, sends

    def _copies(self, plans: Sequence[SlicePlan], memory: Memory | None) -> HostCopies | None:
        """Return the copies between stages and their hosts, where there are any and they take time."""
        if memory is None or (rate := memory.host_bytes_per_s) is None or not memory.offloads:
            return None
        bytes_of = offloaded_bytes([plan.spans() for plan in plans], memory)
        forwards = (self._actions[one.forward] for one in self._offloaded)
        seconds = [bytes_of(action.part_id, action.unit) / rate for action in forwards]
        return HostCopies(self._offloaded, self._stages, seconds)

    @functools.cached_property
    def _offloaded(self) -> list[Offloaded]:
        return find_offloaded(self._actions, self._stages)

    def _pass(
        self, seconds: list[float], sends: list[float], overlap: bool, copies: HostCopies | None = None
    ) -> _Times:
        """Find the longest path to every node. Ends and arrivals are sums along it, so equal times are equal floats."""
        stage_free = [0.0] * self.schedule.num_stages
        link_free = [0.0] * (self._num_links + 1)
        starts, ends, send_starts = [], [], []
        arrivals = [0.0] * (len(seconds) + 1)
        for i, (stage_id, needs, link) in enumerate(zip(self._stages, self._inputs, self._links, strict=True)):
            start = stage_free[stage_id]
            if arrivals[needs] > start:
                start = arrivals[needs]
            if copies is not None:
                start = copies.start_s(i, start)
            send_start = end = start + seconds[i]
            if copies is not None:
                copies.ends(i, end)
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

    # --- the timeline

    @functools.cached_property
    def _outstanding(self) -> int:
        return budget_of_sends(self.schedule)

    def _bytes_of_stages(self, plans: Sequence[SlicePlan], memory: Memory, apart: bool = False) -> list[list[int]]:
        spans = [plan.spans() for plan in plans]
        stages = range(self.schedule.num_stages)
        return [bytes_of_stage(self.schedule, k, spans, memory, self._outstanding, apart) for k in stages]

    def _event(self, i: int, action: Action, start_s: float, end_s: float) -> TimelineEvent:
        what = str(action), *action.unit, action.kind.code
        return TimelineEvent(self._stages[i], *what, start_s, end_s, action.chunk_id)

    def _critical_path(
        self, times: _Times, computed: list[TimelineEvent], sent: dict[int, TimelineEvent], overlap: bool
    ) -> tuple[CriticalStep, ...] | None:
        """Walk back from the last end: each step starts in the moment in which the one before it ends.

        Return None where a step waits for a copy from or to the host, which is no event.
        """
        before_on_stage, before_on_link = _previous(self._stages), _previous(self._links)
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
            elif start == 0:
                before, waited = -1, "start"
            elif needs < len(computed) and times.sent[needs] == start:
                before, on_link = needs, needs in sent
                waited = "link" if on_link else "dependency"
            else:
                return None
            steps.append(CriticalStep(computed[node], waited))
            node = before
        return tuple(reversed(steps))


def _previous(groups: Sequence[int]) -> list[int]:
    """Return, per node, the last one before it of the same group; -1 for none."""
    latest: dict[int, int] = {}
    previous = []
    for node, group in enumerate(groups):
        previous.append(latest.get(group, -1))
        latest[group] = node
    return previous
