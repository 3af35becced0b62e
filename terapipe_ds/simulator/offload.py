"""Find when offloaded slices have their saved tensors on the host; the schedule alone decides it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

from terapipe_ds.schedule import Action, Kind
from terapipe_ds.schedule.action import SliceKey

OFFLOAD_AHEAD = 2
"""Computations before its B from which on what a slice saved is on the device again."""

LEAVES_AFTER = 1
"""Computations after its F that hide the copy out; at their end the memory is free."""


@functools.lru_cache(maxsize=256)
def offloaded_until(order: tuple[Action, ...]) -> dict[tuple[int, SliceKey], int]:
    """Return, for each offloaded slice (part, unit), the computation of the order at whose start it comes back.

    A slice that would be away for no whole computation stays.
    """
    forwards = {(action.part_id, action.unit): i for i, action in enumerate(order) if action.kind is Kind.FORWARD}
    until = {}
    for index, action in enumerate(order):
        key = action.part_id, action.unit
        if action.kind is Kind.BACKWARD and index - OFFLOAD_AHEAD > forwards[key] + LEAVES_AFTER + 1:
            until[key] = index - OFFLOAD_AHEAD
    return until


class HostCopies:
    """Time the copies of a replay between stages and their hosts: one by one per stage, beside its computations.

    The copy out of a slice starts when its F ends. The computation after `LEAVES_AFTER` more of the stage waits for it,
    since the copy frees memory for that one. The copy back starts with the computation at which it is due, and B waits
    for it.
    """

    def __init__(
        self, actions: Sequence[Action], stages: Sequence[int], seconds_of: Callable[[int, SliceKey], float]
    ) -> None:
        """Take the computations in the order of the later calls; each stage's are in its order."""
        self._free: dict[int, float] = defaultdict(float)
        self._out: dict[int, float] = {}  # computation -> seconds of the copy out after it
        self._back: dict[int, list[tuple[int, float]]] = defaultdict(list)  # computation -> B and seconds of its copy
        self._not_before: dict[int, float] = defaultdict(float)
        self._waits: dict[int, int] = {}  # computation after which a copy out begins -> the one that waits for it
        self._stages = stages
        numbers: dict[int, list[int]] = defaultdict(list)
        for number, stage_id in enumerate(stages):
            numbers[stage_id].append(number)
        for own in numbers.values():
            order = [actions[number] for number in own]
            place = {(a.kind, a.part_id, a.unit): i for i, a in enumerate(order)}
            for (part_id, unit), index in offloaded_until(tuple(order)).items():
                seconds, forward = seconds_of(part_id, unit), place[Kind.FORWARD, part_id, unit]
                self._out[own[forward]] = seconds
                self._waits[own[forward]] = own[forward + LEAVES_AFTER + 1]
                self._back[own[index]].append((own[place[Kind.BACKWARD, part_id, unit]], seconds))

    def start_s(self, number: int, start_s: float) -> float:
        """Return the start of a computation that is ready at `start_s`, and begin the copies back due with it."""
        start_s = max(start_s, self._not_before[number])
        stage_id = self._stages[number]
        for backward, seconds in self._back[number]:
            self._free[stage_id] = max(self._free[stage_id], start_s) + seconds
            self._not_before[backward] = max(self._not_before[backward], self._free[stage_id])
        return start_s

    def ends(self, number: int, end_s: float) -> None:
        """Begin the copy out of a slice whose F ends."""
        if number in self._out:
            stage_id, waiting = self._stages[number], self._waits[number]
            self._free[stage_id] = max(self._free[stage_id], end_s) + self._out[number]
            self._not_before[waiting] = max(self._not_before[waiting], self._free[stage_id])
