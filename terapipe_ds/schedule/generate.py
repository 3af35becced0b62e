"""The schedules by name: short pure functions that write the order of the computations of every stage.

A generator takes the number of stages and the number of slices of each micro-batch, and gives one list of
units per stage. The tables show unit time slots (a forward and a backward take one each) of 3 stages, 2
micro-batches, 2 slices.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable

from .action import Action, Kind, Schedule, ScheduleError
from .one_for_one import Unit, backwards, forwards, one_f_one_b, seq1f1b
from .zero_bubble import seq1f1b_zb, zb_h1


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


GENERATORS: dict[str, Callable[[int, tuple[int, ...]], list[list[Unit]]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "terapipe": terapipe,
    "seq1f1b": seq1f1b,
    "zb-h1": zb_h1,
    "seq1f1b-zb": seq1f1b_zb,
}
SCHEDULE_NAMES = tuple(GENERATORS)
"""The names that ``build`` knows."""

SPLIT_SCHEDULES = ("zb-h1", "seq1f1b-zb")
"""Those whose backwards are split in B and W, and whose times need ``weight_s``."""


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
