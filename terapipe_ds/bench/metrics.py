"""Define the figures of a benchmark: bubble, waits, bound, ratios and noise, from the traces of steps.

This is pure arithmetic without torch, so that every definition is tested on hand-made traces.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.schedule import Schedule
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.timeline import COMPUTE_KINDS, Timeline, TimelineEvent


class Recorded(NamedTuple):
    """Hold one computation or closing action of a rank; times are on a clock that all processes of a machine share."""

    kind: str
    micro_batch_id: int
    slice_id: int
    chunk_id: int
    start_s: float
    end_s: float
    cpu_s: float  # of the process in between: it does not grow while another process has the core

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch_id}.{self.slice_id}" + f"c{self.chunk_id}" * bool(self.chunk_id)


Plans = tuple[SlicePlan, ...]  # the slices of each micro-batch


@dataclass(frozen=True)
class StepTrace:
    """Hold one step: the events of each stage, in the order in which they ran."""

    stages: Sequence[Sequence[Recorded]]

    def computations(self) -> list[list[Recorded]]:
        return [[event for event in events if event.kind in COMPUTE_KINDS] for events in self.stages]

    def timeline(self) -> Timeline:
        """Return F, B and W on one axis that begins with the first of them."""
        zero_s = min((event.start_s for events in self.computations() for event in events), default=0.0)
        events = [
            TimelineEvent(
                k, str(e), e.micro_batch_id, e.slice_id, e.kind, e.start_s - zero_s, e.end_s - zero_s, e.chunk_id
            )
            for k, events in enumerate(self.computations())
            for e in events
        ]
        return Timeline(len(self.stages), tuple(sorted(events, key=lambda e: (e.start_s, e.stage_id))))

    def closing_s(self, clock: str = "wall") -> tuple[float, ...]:
        """Return for each stage the seconds of reduces and optimizer, in `wall` time or its own `cpu` time."""
        closing = ([event for event in events if event.kind not in COMPUTE_KINDS] for events in self.stages)
        return tuple(sum(e.seconds if clock == "wall" else e.cpu_s for e in events) for events in closing)

    def off_core_s(self) -> float:
        """Return the seconds in which F, B or W ran and another program had the core, of the worst stage.

        That is wall time minus processor time of pinned processes of one thread each; on accelerators it means nothing.
        """
        lost_s = (sum(max(event.seconds - event.cpu_s, 0.0) for event in events) for events in self.computations())
        return max(lost_s, default=0.0)


@dataclass(frozen=True)
class SliceMeasurements:
    """Hold the measurements other than steps: costs and memory of slices by the cut of the layers, links by tokens."""

    costs: Mapping[str, Sequence[CostModel]]
    memory: Mapping[str, MemoryModel]
    links: Mapping[int, float]


def ideal_bubble(schedule: Schedule) -> float:
    """Return the bubble with equal parts, equal slices, a backward of two forwards, and free messages."""
    length = math.lcm(*schedule.num_slices)
    plans = [SlicePlan((length // count,) * count) for count in schedule.num_slices]
    return simulate(schedule, plans, UnitCosts(length)).bubble_fraction


def unsliced_s(systems: Sequence[Sequence[Timeline]], accumulation: int) -> tuple[float, ...]:
    """Return for each stage the seconds of F and B of a micro-batch, by the unsliced system that is fastest there.

    `systems`: the timelines of the steps of each system; the median of its steps counts.
    """
    medians = ([statistics.median(s) for s in zip(*(t.busy_s() for t in steps), strict=True)] for steps in systems)
    return tuple(min(of_stage) / accumulation for of_stage in zip(*medians, strict=True))


def drift(unsliced_s: Sequence[float], costs: Sequence[Any], sequence_length: int) -> float:
    """Return the time of unsliced F and B (by stage) in the turns, over their time when `costs` were measured."""
    whole_s = sum(c.forward_s(sequence_length, 0) + c.backward_s(sequence_length, 0) for c in costs)
    return sum(unsliced_s) / float(whole_s)


@dataclass(frozen=True)
class ActionCosts:
    """Hold CPU seconds of a part's actions by kind, tokens and prefix (a backward with its W), and of its links."""

    seconds: Mapping[tuple[str, int, int], float]
    links: Mapping[int, float]

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.seconds["F", tokens, prefix]

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self.seconds["B", tokens, prefix] + self.weight_s(tokens, prefix)

    def weight_s(self, tokens: int, prefix: int) -> float:
        return self.seconds.get(("W", tokens, prefix), 0.0)

    def send_s(self, tokens: int) -> float:
        return self.links.get(tokens, 0.0)


def action_costs(trace: StepTrace, schedule: Schedule, plans: Plans, links: Mapping[int, float]) -> list[ActionCosts]:
    """Return for each part the CPU time of its actions in one step: the mean over the micro-batches."""
    parts: dict[int, dict[tuple[str, int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for stage_id, events in enumerate(trace.computations()):
        for event in events:
            start, stop = plans[event.micro_batch_id].span(event.slice_id)
            part_id = schedule.placement[stage_id, event.chunk_id]
            parts[part_id][event.kind, stop - start, start].append(event.cpu_s)
    return [
        ActionCosts({action: statistics.fmean(seconds) for action, seconds in parts[part_id].items()}, links)
        for part_id in sorted(parts)
    ]


def replay_s(
    trace: StepTrace, schedule: Schedule, plans: Plans, links: Mapping[int, float], *, blocking: bool = False
) -> tuple[float, Timeline]:
    """Return the time that the step would take with a core for each stage, and its timeline.

    This replays the schedule with every action's own CPU time and the measured links, then adds reduce and optimizer
    of the slowest stage. `blocking`: a stage does nothing else while it sends (DeepSpeed's own 1F1B).
    """
    timeline = simulate(schedule, plans, action_costs(trace, schedule, plans, links), overlap=not blocking)
    return timeline.makespan_s + max(trace.closing_s("cpu")), timeline
