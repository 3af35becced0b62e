"""The schedules: short pure functions that write the order of the computations of every stage.

A generator takes the number of stages and the number of slices of each micro-batch, and gives one list of
units per stage. The tables show unit time slots (a forward and a backward take one each) of 3 stages, 2
micro-batches, 2 slices.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable
from itertools import chain

from .action import Action, Kind, Schedule, ScheduleError

Unit = tuple[Kind, int, int]
"""(F or B or W, micro_batch_id, slice_id)."""


def forwards(num_slices: tuple[int, ...]) -> list[Unit]:
    """Every forward: micro-batches in order, slices in order."""
    return [(Kind.FORWARD, m, s) for m, count in enumerate(num_slices) for s in range(count)]


def backwards(num_slices: tuple[int, ...]) -> list[Unit]:
    """Every backward: micro-batches first in first out, slices last in first out."""
    return [(Kind.BACKWARD, m, s) for m, count in enumerate(num_slices) for s in reversed(range(count))]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    .    .    B0.1 B0.0 B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0 .    .
def gpipe(num_stages: int, num_slices: tuple[int, ...]) -> list[list[Unit]]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965)."""
    return [forwards(num_slices) + backwards(num_slices) for _ in range(num_stages)]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    .    .    B1.1 B1.0 B0.1 B0.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 .    .    B1.1 B1.0 B0.1 B0.0 .
# stage 2  .    .    F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 B0.1 B0.0 .    .
def terapipe(num_stages: int, num_slices: tuple[int, ...]) -> list[list[Unit]]:
    """All slices forward, then all backward in exactly the reverse order (Li et al., arXiv 2102.07988)."""
    order = forwards(num_slices)
    return [order + [(Kind.BACKWARD, m, s) for _, m, s in reversed(order)] for _ in range(num_stages)]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 .    .    B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 .    .    B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0 .    .
def one_f_one_b(num_stages: int, num_slices: tuple[int, ...]) -> list[list[Unit]]:
    """One forward, one backward, by whole micro-batches, each expanded to its slices.

    Equals the compute order of DeepSpeed's ``TrainSchedule`` (deepspeed/runtime/pipe/schedule.py).
    """
    ahead, back = _by_micro_batch(forwards(num_slices)), _by_micro_batch(backwards(num_slices))
    num_micro_batches = len(num_slices)
    orders = []
    for stage_id in range(num_stages):
        warm_up = min(num_stages - stage_id - 1, num_micro_batches)
        groups = ahead[:warm_up]
        for m in range(num_micro_batches):
            groups += [*ahead[warm_up + m : warm_up + m + 1], back[m]]
        orders.append(list(chain.from_iterable(groups)))
    return orders


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 .    B0.0 .    B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 .    B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0 .    .
def seq1f1b(num_stages: int, num_slices: tuple[int, ...]) -> list[list[Unit]]:
    """One forward, one backward, by slices (Seq1F1B, arXiv 2406.03488).

    At stage i, after a warm-up of ``min(K - i + s - 2, m * s)`` forwards, each forward is followed by a
    backward. The first backward is that of the last slice of micro-batch 0, so with unequal numbers of slices
    s is its number.

    Where micro-batches differ, a later one may be longer, and its backward starts at a slice that has not run
    yet. So the last stage runs forwards until it has, and stage i stays K - 1 - i forwards ahead of the last
    stage all along (without that lead the pipeline would run empty at each longer micro-batch). With equal
    numbers this is plain one for one. No deadlock: before its k-th backward no stage runs fewer forwards than
    the stages after it, so all that they wait for has been sent.
    """
    ahead, back = forwards(num_slices), backwards(num_slices)
    place = {(m, s): index for index, (_, m, s) in enumerate(ahead)}
    orders: list[list[Unit]] = []
    for stage_id in range(num_stages):
        order: list[Unit] = []
        done = on_last_stage = 0  # forwards run so far: here, and on the last stage
        for unit in back:
            on_last_stage = max(on_last_stage + 1, place[unit[1:]] + 1)
            upto = min(on_last_stage + num_stages - 1 - stage_id, len(ahead))
            order += [*ahead[done:upto], unit]
            done = upto
        orders.append(order)
    return orders


GENERATORS: dict[str, Callable[[int, tuple[int, ...]], list[list[Unit]]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "terapipe": terapipe,
    "seq1f1b": seq1f1b,
}
SCHEDULE_NAMES = tuple(GENERATORS)
"""The names that ``build`` knows."""


def build(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    num_slices: int | Iterable[int],
    *,
    forward_only: bool = False,
    chunks_per_stage: int = 1,
    **options: object,
) -> Schedule:
    """The schedule ``name`` for K stages, m micro-batches and ``num_slices`` slices (one int, or one per
    micro-batch).

    With ``forward_only`` (evaluation) every stage runs all forwards in order. Raises ``ScheduleError`` on an
    unknown name, on counts that are not whole numbers of at least 1, and on options that the schedule does
    not take.
    """
    generator = _generator(name)
    num_stages = _count("num_stages", num_stages)
    slices = _slice_counts(num_slices, _count("num_micro_batches", num_micro_batches))
    if _count("chunks_per_stage", chunks_per_stage) != 1:
        raise ScheduleError(
            f"chunks_per_stage is {chunks_per_stage}: schedule {name!r} has one part per stage, leave it at 1"
        )
    if options:
        raise ScheduleError(
            f"schedule {name!r} takes no option {', '.join(sorted(map(repr, options)))}: leave it out"
        )
    units = [forwards(slices)] * num_stages if forward_only else generator(num_stages, slices)
    orders = tuple(
        tuple(Action(kind, m, s, part_id=stage_id) for kind, m, s in order)
        for stage_id, order in enumerate(units)
    )
    placement = {(stage_id, 0): stage_id for stage_id in range(num_stages)}
    return Schedule(name, num_stages, len(slices), slices, 1, bool(forward_only), orders, placement)


def _by_micro_batch(units: list[Unit]) -> list[list[Unit]]:
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit[1], []).append(unit)
    return list(groups.values())


def _generator(name: str) -> Callable[[int, tuple[int, ...]], list[list[Unit]]]:
    if isinstance(name, str) and name in GENERATORS:
        return GENERATORS[name]
    near = difflib.get_close_matches(str(name).lower(), SCHEDULE_NAMES, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ScheduleError(f"unknown schedule {name!r}{hint}: known are {', '.join(SCHEDULE_NAMES)}")


def _count(what: str, value: object) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 1:
        raise ScheduleError(f"{what} is {value!r}: give a whole number of at least 1")
    return number


def _slice_counts(num_slices: int | Iterable[int], num_micro_batches: int) -> tuple[int, ...]:
    if isinstance(num_slices, str | bytes) or not isinstance(num_slices, Iterable):
        return (_count("num_slices", num_slices),) * num_micro_batches
    counts = tuple(_count(f"num_slices[{m}]", value) for m, value in enumerate(num_slices))
    if len(counts) != num_micro_batches:
        raise ScheduleError(
            f"num_slices has {len(counts)} entries: give one to each of {num_micro_batches} micro-batches"
        )
    return counts
