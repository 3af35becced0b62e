"""What the figures of a benchmark mean: bubble, waits, bound and ratios, from the traces of steps.

Pure arithmetic, without torch, so that every definition is tested on hand-made traces.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Schedule
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.timeline import COMPUTE_KINDS, Timeline, TimelineEvent

Event = Sequence[Any]
"""A ``recorder.Recorded``, which has become a list on its way: kind, micro-batch, slice, chunk, start, end, CPU."""


@dataclass(frozen=True)
class StepTrace:
    """One step: the events of each stage, in the order in which they ran."""

    stages: tuple[tuple[Event, ...], ...]

    @classmethod
    def of(cls, stages: Sequence[Sequence[Event]]) -> StepTrace:
        """From what each rank has recorded."""
        return cls(tuple(tuple(mine) for mine in stages))

    def computations(self, stage_id: int) -> list[Event]:
        """F, B and W of a stage."""
        return [event for event in self.stages[stage_id] if event[0] in COMPUTE_KINDS]

    def timeline(self, name: str) -> Timeline:
        """F, B and W on one axis that begins with the first of them."""
        starts = [event[4] for k in range(len(self.stages)) for event in self.computations(k)]
        zero_s = min(starts, default=0.0)
        events = [
            TimelineEvent(k, _text(event), event[1], event[2], event[0], event[4] - zero_s, event[5] - zero_s, event[3])
            for k in range(len(self.stages))
            for event in self.computations(k)
        ]
        return Timeline(len(self.stages), tuple(sorted(events, key=lambda e: (e.start_s, e.stage_id))), name)

    def busy_s(self) -> tuple[float, ...]:
        """Per stage, the seconds of F, B and W."""
        return tuple(sum(e[5] - e[4] for e in self.computations(k)) for k in range(len(self.stages)))

    def closing_s(self, clock: str = "wall") -> tuple[float, ...]:
        """Per stage, the seconds of reduces and optimizer, on the ``wall`` or of its own ``cpu`` time."""
        spent = {"wall": lambda e: e[5] - e[4], "cpu": lambda e: e[6]}[clock]
        return tuple(sum(spent(e) for e in mine if e[0] not in COMPUTE_KINDS) for mine in self.stages)

    def bubble(self) -> float:
        """1 - (sum of F, B, W seconds) / (K * (last end - first start)); reduce and optimizer excluded."""
        events = [e for k in range(len(self.stages)) for e in self.computations(k)]
        whole_s = max((e[5] for e in events), default=0.0) - min((e[4] for e in events), default=0.0)
        return 1.0 - sum(self.busy_s()) / (len(self.stages) * whole_s) if whole_s > 0 else 0.0

    def exposed_comm_s(self, schedule: Schedule) -> tuple[float, ...]:
        """Per stage, the seconds in which it did nothing although the input that came next was computed already.

        So a wait counts from where its stage is free and the other stage has computed what it waits for; the wait
        before that is bubble. What is left is the message on its way, and whatever either side does with it.
        """
        ends = {
            (event[0], schedule.placement[k, event[3]], event[1], event[2]): event[5]
            for k in range(len(self.stages))
            for event in self.computations(k)
        }
        return tuple(
            sum(_exposed(ends, schedule, k, before, event) for before, event in _pairs(self.computations(k)))
            for k in range(len(self.stages))
        )


def _pairs(events: list[Event]) -> list[tuple[Event | None, Event]]:
    return list(zip([None, *events[:-1]], events, strict=True))


def _exposed(ends: Mapping[Any, float], schedule: Schedule, stage_id: int, before: Event | None, event: Event) -> float:
    kind, micro_batch_id, slice_id, chunk_id, start_s = event[:5]
    part_id = schedule.placement[stage_id, chunk_id]
    source = {"F": part_id - 1, "B": part_id + 1}.get(kind)
    ready_s = None if source is None else ends.get((kind, source, micro_batch_id, slice_id))
    if ready_s is None:
        return 0.0  # data of its own
    return max(start_s - max(ready_s, ready_s if before is None else before[5]), 0.0)


def _text(event: Event) -> str:
    chunk = f"c{event[3]}" if event[3] else ""
    return f"{event[0]}{event[1]}.{event[2]}{chunk}"


def ideal_bubble(schedule: Schedule) -> float:
    """The bubble of the schedule with parts alike, a backward of two forwards, slices alike, and free messages."""
    plans = [SlicePlan((1,) * count) for count in schedule.num_slices]
    costs = UnitCosts(max(schedule.num_slices))
    return simulate(schedule, plans, costs).bubble_fraction


def bound_s(unsliced_s: Sequence[float], accumulation: int, bubble: float, closing_s: float) -> float:
    """The step that a schedule would take at no cost of its own.

    Args:
        unsliced_s: per stage, the seconds of the unsliced forward and backward of a micro-batch.
        bubble: of the schedule, at its best; see :func:`ideal_bubble`.
        closing_s: reduce and optimizer.
    """
    return max(unsliced_s) * accumulation / (1.0 - bubble) + closing_s


def unsliced_s(runs: Sequence[Sequence[StepTrace]], accumulation: int) -> tuple[float, ...]:
    """Per stage, the seconds of F and B of a micro-batch: of several unsliced systems the one that is fastest there.

    ``runs``: per system, the traces of its steps; of these the median counts.
    """
    per_system = [
        [statistics.median(of_steps) / accumulation for of_steps in zip(*(t.busy_s() for t in traces), strict=True)]
        for traces in runs
    ]
    return tuple(min(of_stage) for of_stage in zip(*per_system, strict=True))


def ratio(others: Sequence[float], mine: Sequence[float]) -> float:
    """How many times as long the other's step takes: the median over the turns."""
    return statistics.median(a / b for a, b in zip(others, mine, strict=True))


def median_index(seconds: Sequence[float]) -> int:
    """The step of median length (of an even number, the faster of the two in the middle)."""
    return sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]


@dataclass(frozen=True)
class ActionCosts:
    """What the actions of one part took, as the simulator asks for it; links by tokens."""

    forward: Mapping[tuple[int, int], float]
    backward: Mapping[tuple[int, int], float]
    weight: Mapping[tuple[int, int], float]
    links: Mapping[int, float]

    def forward_s(self, tokens: int, prefix: int) -> float:
        """CPU seconds of F."""
        return self.forward[tokens, prefix]

    def backward_s(self, tokens: int, prefix: int) -> float:
        """CPU seconds of B, and of W where it is apart."""
        return self.backward[tokens, prefix] + self.weight.get((tokens, prefix), 0.0)

    def weight_s(self, tokens: int, prefix: int) -> float:
        """CPU seconds of W."""
        return self.weight.get((tokens, prefix), 0.0)

    def send_s(self, tokens: int) -> float:
        """Seconds on the link."""
        return self.links.get(tokens, 0.0)


def action_costs(
    trace: StepTrace, schedule: Schedule, plan: SlicePlan, links: Mapping[int, float]
) -> list[ActionCosts]:
    """Per part, the CPU time of its actions in one step: the mean over the micro-batches."""
    found: dict[int, dict[str, dict[tuple[int, int], list[float]]]] = {}
    for k in range(len(trace.stages)):
        for event in trace.computations(k):
            start, stop = plan.span(event[2])
            of_part = found.setdefault(schedule.placement[k, event[3]], {kind: {} for kind in COMPUTE_KINDS})
            of_part[event[0]].setdefault((stop - start, start), []).append(event[6])
    means = {
        part_id: {kind: {span: statistics.fmean(s) for span, s in spans.items()} for kind, spans in kinds.items()}
        for part_id, kinds in found.items()
    }
    return [ActionCosts(means[p]["F"], means[p]["B"], means[p]["W"], links) for p in sorted(means)]


def replay_s(
    trace: StepTrace, schedule: Schedule, plan: SlicePlan, links: Mapping[int, float], *, blocking: bool = False
) -> tuple[float, Timeline]:
    """The step as it would be with a core for each stage: the schedule with every action's own CPU time and the
    measured links, then reduce and optimizer of the slowest stage; and its timeline.

    Args:
        blocking: a stage does nothing else while it sends (DeepSpeed's own 1F1B).
    """
    timeline = simulate(schedule, plan, action_costs(trace, schedule, plan, links), overlap=not blocking)
    return timeline.makespan_s + max(trace.closing_s("cpu")), timeline


