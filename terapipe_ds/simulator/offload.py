"""Find when offloaded slices have their saved tensors on the host; the schedule alone decides it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

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


class Offloaded(NamedTuple):
    """Hold the numbers of the computations that the copies of an offloaded slice concern."""

    forward: int  # the copy out starts at its end
    waiting: int  # waits for the copy out
    due: int  # the copy back starts with it
    backward: int  # waits for the copy back


def find_offloaded(actions: Sequence[Action], stages: Sequence[int]) -> list[Offloaded]:
    """Return the offloaded slices of computations in the order of a replay; each stage's are in its order."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, stage_id in enumerate(stages):
        numbers[stage_id].append(number)
    found = []
    for own in numbers.values():
        order = [actions[number] for number in own]
        place = {(a.kind, a.part_id, a.unit): i for i, a in enumerate(order)}
        for (part_id, unit), due in offloaded_until(tuple(order)).items():
            forward, backward = place[Kind.FORWARD, part_id, unit], place[Kind.BACKWARD, part_id, unit]
            places = forward, forward + LEAVES_AFTER + 1, due, backward
            found.append(Offloaded(*(own[index] for index in places)))
    return found


class HostCopies:
    """Time the copies of a replay between stages and their hosts: one by one per stage, beside its computations.

    The copy out of a slice starts when its F ends. The computation after `LEAVES_AFTER` more of the stage waits for it,
    since the copy frees memory for that one. The copy back starts with the computation at which it is due, and B waits
    for it.
    """

    def __init__(self, offloaded: Sequence[Offloaded], stages: Sequence[int], seconds: Sequence[float]) -> None:
        """Take the offloaded slices, each with the seconds of a copy, and the stage of each later computation."""
        self._free = [0.0] * (max(stages) + 1)
        self._not_before = [0.0] * len(stages)
        self._out: dict[int, tuple[int, float]] = {}  # F -> the computation that waits for its copy, and seconds
        self._back: dict[int, list[tuple[int, float]]] = {}  # computation -> B and seconds of each of its copies
        self._stages = stages
        for one, copy_s in zip(offloaded, seconds, strict=True):
            self._out[one.forward] = one.waiting, copy_s
            self._back.setdefault(one.due, []).append((one.backward, copy_s))

    def start_s(self, number: int, start_s: float) -> float:
        """Return the start of a computation that is ready at `start_s`, and begin the copies back due with it."""
        start_s = max(start_s, self._not_before[number])
        for backward, seconds in self._back.get(number, ()):
            self._copy(number, start_s, seconds, backward)
        return start_s

    def ends(self, number: int, end_s: float) -> None:
        """Begin the copy out of a slice whose F ends."""
        if number in self._out:
            waiting, seconds = self._out[number]
            self._copy(number, end_s, seconds, waiting)

    def _copy(self, number: int, start_s: float, seconds: float, waiting: int) -> None:
        stage_id = self._stages[number]
        self._free[stage_id] = done_s = max(self._free[stage_id], start_s) + seconds
        self._not_before[waiting] = max(self._not_before[waiting], done_s)
