"""Explain the waits of a stage: find the computation, and its stage, whose result the next computation needed.

A timeline has actions and times, and neither placement nor links. So the way of the slice reveals the source: it is the
computation of the same micro-batch and slice that ended last before. This is the forward of the part before, or the
backward of the part after; for the first backward of a slice, it is the slice's forward.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from terapipe_ds.timeline.timeline import Timeline, TimelineEvent

_SHORTEST = 1e-4  # of the makespan: shorter gaps are between any two actions
_ROUNDING = 1e-9  # of the makespan

_Ended = defaultdict[tuple[str, int, int], list[TimelineEvent]]
"""The computations of a kind and slice in the order of their ends."""


@dataclass(frozen=True)
class Wait:
    """Hold a gap on a stage before a computation.

    `source` yielded the input of that computation. It is None where no computation of its slice ran before: then the
    stage waited for data, or for the step to begin.
    """

    stage_id: int
    start_s: float
    end_s: float
    before: TimelineEvent
    source: TimelineEvent | None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def reason(self) -> str:
        """Describe in words the cause of the wait."""
        if self.source is None:
            return "nothing of this slice ran before: the data, or the start of the step"
        where = f"{self.source.action} of stage {self.source.stage_id}"
        if self.source.stage_id == self.stage_id:
            return f"no input: {where} was done; this stage itself was slow to go on"
        late_s = self.source.end_s - self.start_s
        if late_s <= 0:
            return f"the message of {where}, which was done before this gap: the link, or this rank itself"
        if self.duration_s - late_s <= 0.05 * self.duration_s:
            return where
        return f"{where}, for {100 * late_s / self.duration_s:.0f} % of the time; then the link, or this rank itself"


def find_waits(timeline: Timeline) -> list[Wait]:
    """Return the gaps before computations, from the first computation of the step on, in the order of stages."""
    computations = timeline.computations()
    zero_s, least_s = timeline.start_s, timeline.makespan_s * _SHORTEST
    ended: _Ended = defaultdict(list)
    for event in sorted(computations, key=lambda event: event.end_s):
        ended[event.kind, event.micro_batch_id, event.slice_id].append(event)
    waits = []
    by_stage = sorted(computations, key=lambda event: (event.stage_id, event.start_s, event.end_s))
    for stage_id, own in itertools.groupby(by_stage, key=lambda event: event.stage_id):
        until_s = zero_s
        for event in own:
            if event.start_s - until_s > least_s:
                source = _source_of(event, ended, timeline.makespan_s * _ROUNDING)
                waits.append(Wait(stage_id, until_s, event.start_s, event, source))
            until_s = max(until_s, event.end_s)
    return waits


def exposed_comm_s(timeline: Timeline, placement: Mapping[tuple[int, int], int]) -> tuple[float, ...]:
    """Return for each stage the seconds in which it did nothing although its next input was computed already.

    In these seconds it waited for the message in flight, or for work on it at either end; an earlier wait is bubble.
    `placement` has the part at (stage_id, chunk_id). The events of a stage are in the order in which they ran.
    """
    ends: dict[tuple[str, int, int, int], float] = {}
    for event in timeline.computations():
        part_id = placement[event.stage_id, event.chunk_id]
        ends[event.kind, part_id, event.micro_batch_id, event.slice_id] = event.end_s
    exposed_s, free_s = [0.0] * timeline.num_stages, [0.0] * timeline.num_stages
    for event in timeline.computations():
        part_id = placement[event.stage_id, event.chunk_id]
        source = {"F": part_id - 1, "B": part_id + 1}.get(event.kind, -1)
        ready_s = ends.get((event.kind, source, event.micro_batch_id, event.slice_id))
        if ready_s is not None:  # else it needs no message
            exposed_s[event.stage_id] += max(event.start_s - max(ready_s, free_s[event.stage_id]), 0.0)
        free_s[event.stage_id] = event.end_s
    return tuple(exposed_s)


def _source_of(event: TimelineEvent, ended: _Ended, rounding_s: float) -> TimelineEvent | None:
    """Return the computation whose result `event` takes; None where there is none."""
    for kind in {"F": "F", "B": "BF", "W": "B"}[event.kind]:
        of_slice = ended[kind, event.micro_batch_id, event.slice_id]
        place = bisect_left(of_slice, event.start_s + rounding_s, key=lambda one: one.end_s)
        before = [one for one in of_slice[:place] if one is not event]
        if event.kind == "W":  # the backward of its own part
            before = [one for one in before if (one.stage_id, one.chunk_id) == (event.stage_id, event.chunk_id)]
        if before:
            return before[-1]
    return None
