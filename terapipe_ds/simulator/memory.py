"""Bytes of every stage over a replay. They follow from the stage's order alone; times only say when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from terapipe_ds.schedule import Action, Kind, Schedule

ByteSteps = tuple[tuple[float, int], ...]
"""(from this time on, bytes), times ascending."""

_Held = tuple[str, int, int, int]


def during_and_after(
    schedule: Schedule, spans: Sequence[Sequence[tuple[int, int]]], memory: Any
) -> list[list[tuple[int, int]]]:
    """Return, per stage and computation in order, the bytes while it runs, and those once it has run.

    `spans[micro_batch_id][slice_id]` is (start, stop). `memory` has `static_bytes(part_id)`,
    `store_bytes(part_id, sequence_length)`, `store_grad_bytes(part_id, sequence_length)`, `slice_bytes(part_id,
    tokens, prefix)` and `working_bytes(part_id, tokens, prefix)`. Three more are asked where it has them:
    `gradient_bytes(part_id)`; `whole_bytes(part_id, sequence_length)`, which takes the place of the two of the
    store for a micro-batch that is one slice; `weight_bytes(part_id, tokens, prefix)`, what is left of a slice
    between its B and its W.

    A slice counts from its F to the end of its B; then what its W needs, if it has one (all of it, where memory does
    not say). The store of a micro-batch counts from its first F to its last B on the part, the gradients of the store
    from its first B to its last. Without backward a slice counts while its F runs, and the store until the F of the
    last slice: an evaluation keeps nothing else. The gradients of a part's parameters come while its first B runs, as
    much as what the slice kept goes, and stay.
    """
    return [
        _of_stage(order, static_bytes(schedule, stage_id, memory), spans, memory)
        for stage_id, order in enumerate(schedule.orders)
    ]


def _of_stage(
    order: Sequence[Action], static: int, spans: Sequence[Sequence[tuple[int, int]]], memory: Any
) -> list[tuple[int, int]]:
    first: dict[_Held, int] = {}
    last: dict[_Held, int] = {}
    for index, action in enumerate(order):
        whole = len(spans[action.micro_batch_id]) == 1 and hasattr(memory, "whole_bytes")
        for held in _held_for(action, whole, hasattr(memory, "weight_bytes")):
            first.setdefault(held, index)
            last[held] = index
    gained, lost = [0] * len(order), [0] * len(order)
    for held, begin in first.items():
        size = _size(held, spans, memory)
        gained[begin] += size
        lost[last[held]] += size
    bytes_of = []
    now = static
    changes = _changes_after(order, spans, memory)
    for index, action in enumerate(order):
        now += gained[index]
        start, stop = spans[action.micro_batch_id][action.slice_id]
        after = now - lost[index] + changes[index]
        during = max(now, after) + memory.working_bytes(action.part_id, stop - start, start)
        now = after
        bytes_of.append((during, now))
    return bytes_of


def _changes_after(order: Sequence[Action], spans: Sequence[Sequence[tuple[int, int]]], memory: Any) -> Counter[int]:
    """Return index in the order -> change in bytes once that computation has run: the gradients of parameters, which
    come with a part's first B, and what W needs, added at its B and removed at its W."""
    changes: Counter[int] = Counter()
    if hasattr(memory, "gradient_bytes"):
        backwards = [(action.part_id, i) for i, action in enumerate(order) if action.kind is Kind.BACKWARD]
        for part_id, index in dict(reversed(backwards)).items():
            changes[index] += memory.gradient_bytes(part_id)
    if hasattr(memory, "weight_bytes"):
        split = {(action.part_id, action.unit) for action in order if action.kind is Kind.WEIGHT}
        for index, action in enumerate(order):
            if action.kind is not Kind.FORWARD and (action.part_id, action.unit) in split:
                size = _size(("weight_bytes", action.part_id, *action.unit), spans, memory)
                changes[index] += size if action.kind is Kind.BACKWARD else -size
    return changes


def _held_for(action: Action, whole: bool, says_weights: bool) -> list[_Held]:
    """Return what has to be there while an action runs, as (method that says its bytes, part, micro-batch, slice)."""
    part_id, (micro_batch_id, slice_id) = action.part_id, action.unit
    if action.kind is Kind.WEIGHT:  # keys and values are of no use any more
        return [] if says_weights else [("slice_bytes", part_id, micro_batch_id, slice_id)]
    held = [("slice_bytes", part_id, micro_batch_id, slice_id)]
    held.append(("whole_bytes" if whole else "store_bytes", part_id, micro_batch_id, -1))
    if action.kind is Kind.BACKWARD and not whole:
        held.append(("store_grad_bytes", part_id, micro_batch_id, -1))
    return held


def _size(held: _Held, spans: Sequence[Sequence[tuple[int, int]]], memory: Any) -> int:
    method, part_id, micro_batch_id, slice_id = held
    start, stop = spans[micro_batch_id][slice_id]
    size: int = getattr(memory, method)(part_id, *((stop - start, start) if slice_id >= 0 else (stop,)))
    return size


def peaks(schedule: Schedule, bytes_of: list[list[tuple[int, int]]], memory: Any) -> tuple[int, ...]:
    """Return the most bytes of every stage."""
    return tuple(
        max([static_bytes(schedule, stage_id, memory), *(during for during, _ in mine)])
        for stage_id, mine in enumerate(bytes_of)
    )


def step_functions(
    schedule: Schedule,
    bytes_of: list[list[tuple[int, int]]],
    memory: Any,
    times: Sequence[Sequence[tuple[float, float]]],
) -> tuple[ByteSteps, ...]:
    """Return bytes over time; `times` has start and end of each computation. What takes no time does not show."""
    functions = []
    for stage_id, mine in enumerate(bytes_of):
        steps = {0.0: static_bytes(schedule, stage_id, memory)}
        for (during, after), (start_s, end_s) in zip(mine, times[stage_id], strict=True):
            steps[start_s] = during
            steps[end_s] = after
        changes: list[tuple[float, int]] = []
        for time_s, number in steps.items():
            if not changes or changes[-1][1] != number:
                changes.append((time_s, number))
        functions.append(tuple(changes))
    return tuple(functions)


def static_bytes(schedule: Schedule, stage_id: int, memory: Any) -> int:
    """Return what the parts of a stage hold all along."""
    parts = {part_id for (stage, _), part_id in schedule.placement.items() if stage == stage_id}
    return sum(memory.static_bytes(part_id) for part_id in sorted(parts))
