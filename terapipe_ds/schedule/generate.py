"""Generate schedules by name: short pure functions write the order of the computations of every stage.

A generator takes the number of stages and the number of slices of each micro-batch, and gives one list of units per
stage. The tables show unit time slots (a forward and a backward take one each) of 3 stages, 2 micro-batches, 2 slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from terapipe_ds.messages import check_count, closest
from terapipe_ds.schedule.action import Action, Kind, PlacedUnit, ScheduleError
from terapipe_ds.schedule.chunked import chimera, chimera_seq, in_groups, interleaved, seq1f1b_interleaved
from terapipe_ds.schedule.one_f_one_b import backwards, dapple, forwards, one_f_one_b, seq1f1b, seq1f1b_zb, zb_h1
from terapipe_ds.schedule.placement import LOOPED, SEARCH, Placement, loop, placement_for
from terapipe_ds.schedule.schedule import Schedule
from terapipe_ds.schedule.split_chunks import TAKE_LIMITS, seq1f1b_interleaved_zb, zbv


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    .    .    B0.1 B0.0 B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0 .    .
def gpipe(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Run all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""
    return [forwards(num_slices) + backwards(num_slices) for _ in range(num_stages)]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    .    .    B1.1 B1.0 B0.1 B0.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 .    .    B1.1 B1.0 B0.1 B0.0 .
# stage 2  .    .    F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 B0.1 B0.0 .    .
def terapipe(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Run all slices forward, then all backward in exactly the reverse order (Li et al., arXiv 2102.07988)."""
    order = forwards(num_slices)
    return [order + [(Kind.BACKWARD, *unit[1:]) for unit in reversed(order)] for _ in range(num_stages)]


GENERATORS: dict[str, Callable[..., list[list[PlacedUnit]]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "dapple": dapple,
    "terapipe": terapipe,
    "seq1f1b": seq1f1b,
    "zb-h1": zb_h1,
    "seq1f1b-zb": seq1f1b_zb,
    "interleaved": interleaved,
    "seq1f1b-interleaved": seq1f1b_interleaved,
    "seq1f1b-interleaved-zb": seq1f1b_interleaved_zb,
    "zbv": zbv,
    "chimera": chimera,
    "chimera-seq": chimera_seq,
}
"""They are called with K and the slices of each micro-batch; a looped one with the number of chunks too."""

SCHEDULE_NAMES = tuple(GENERATORS)
"""The names that `build` knows."""
_KNOWN = ", ".join(SCHEDULE_NAMES)

OPTIONS = {"dapple": ("policy",), **dict.fromkeys(TAKE_LIMITS, ("max_live_slices",))}
"""What a schedule takes besides counts: the keywords of its generator."""

SPLIT_SCHEDULES = ("zb-h1", "seq1f1b-zb", "seq1f1b-interleaved-zb", "zbv")
"""Those whose backwards are split in B and W, and whose times need `weight_s`."""


def build(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    num_slices: int | Iterable[int],
    *,
    forward_only: bool = False,
    chunks_per_stage: int = 1,
    **options: Any,
) -> Schedule:
    """Return a schedule for K stages, m micro-batches and `num_slices` slices (one int, or one per micro-batch).

    `chunks_per_stage` is v, the number of parts of each stage. `zbv`, `chimera` and `chimera-seq` take 1 and 2, and
    always have 2; `interleaved` and `seq1f1b-interleaved` take any, and are `1f1b` and `seq1f1b` with 1, and so does
    `seq1f1b-interleaved-zb`; all others take 1 only. With `forward_only` (evaluation) every stage runs all forwards:
    micro-batches and slices in order, parts in the order in which their inputs come. `dapple` has the option `policy`,
    "A" or "B"; `seq1f1b-interleaved-zb` and `zbv` have `max_live_slices`, a number of live slices of a stage over all
    its chunks, None for no limit, or "default" for as many as min(m, K) micro-batches have.

    Raises `ScheduleError` on an unknown name, and on counts or options that the schedule does not take.
    """
    _check_name(name)
    num_stages = check_count("num_stages", num_stages, ScheduleError)
    slices = _slice_counts(num_slices, check_count("num_micro_batches", num_micro_batches, ScheduleError))
    chunks_per_stage = check_count("chunks_per_stage", chunks_per_stage, ScheduleError)
    _check_option_names(name, options)
    placement = placement_for(name, num_stages, chunks_per_stage)
    chunks = len(placement) // num_stages
    if forward_only:
        return build_forwards(name, placement, slices)
    looped = (chunks,) if name in LOOPED else ()
    units = GENERATORS[name](num_stages, slices, *looped, **options)
    orders = tuple(
        tuple(Action(kind, m, s, placement[stage_id, chunk], chunk) for kind, m, s, chunk in order)
        for stage_id, order in enumerate(units)
    )
    return Schedule(name, num_stages, len(slices), slices, chunks, False, orders, placement)


def check_options(name: str, num_stages: int, options: Mapping[str, Any], chunks_per_stage: int = 1) -> None:
    """Raise `ScheduleError` where the schedule does not take an option, or not its value."""
    if options:
        _check_option_names(name, options)  # a keyword of build itself is no option
        build(name, num_stages, 1, 1, chunks_per_stage=chunks_per_stage, **options)


def _check_option_names(name: str, options: Iterable[str]) -> None:
    taken = OPTIONS.get(name, ())
    unknown = [repr(option) for option in sorted(options) if option not in taken]
    if unknown:
        hint = f"; it takes {', '.join(taken)}" if taken else ""
        raise ScheduleError(f"schedule {name!r} takes no option {', '.join(unknown)}: leave it out{hint}")


def build_forwards(name: str, placement: Placement, num_slices: Iterable[int]) -> Schedule:
    """Return an evaluation on any placement: every forward, each at the first of its part's places.

    The n-th slice of a batch runs on part p in the order of n + p, which is later than everything that it waits for.
    On a loop, groups of slices run chunk by chunk: few outputs and micro-batches are in flight, however many chunks.
    Of two directions all micro-batches go down: one stage has the results, in their order.
    """
    slices = tuple(num_slices)
    num_stages = 1 + max(stage for stage, _ in placement)
    chunks = len(placement) // num_stages
    homes = {part: place for place, part in sorted(placement.items(), key=lambda item: item[0][::-1], reverse=True)}
    units = forwards(slices)
    rounds = [number for number, group in enumerate(in_groups(units, num_stages)) for _ in group]
    is_loop = placement == loop(num_stages, chunks)
    orders = []
    for stage_id in range(num_stages):
        parts = [part for part, (home, _) in homes.items() if home == stage_id]
        runs = [(n, part) for n in range(len(units)) for part in parts]
        runs.sort(key=lambda run: (rounds[run[0]], run[1]) if is_loop else (sum(run), run[0]))
        orders.append(tuple(Action(*units[n][:3], part, homes[part][1]) for n, part in runs))
    return Schedule(name, num_stages, len(slices), slices, chunks, True, tuple(orders), dict(placement))


def _check_name(name: str) -> None:
    if isinstance(name, str) and name in SCHEDULE_NAMES:
        return
    if name == SEARCH:
        fix = "find one with `terapipe simulate --schedule search` or `terapipe plan --schedule search`"
        raise ScheduleError(f"schedule {name!r} has no order without costs: {fix}, or give a name: {_KNOWN}")
    near = closest(str(name).lower(), SCHEDULE_NAMES, cutoff=0.5)
    hint = "" if near is None else f" (did you mean {near!r}?)"
    if str(name).endswith(".csv"):
        hint = " (to read a file: --from-csv FILE, in Python terapipe_ds.schedule.load(FILE))"
    raise ScheduleError(f"unknown schedule {name!r}{hint}: known are {_KNOWN}")


def _slice_counts(num_slices: int | Iterable[int], num_micro_batches: int) -> tuple[int, ...]:
    if isinstance(num_slices, str | bytes) or not isinstance(num_slices, Iterable):
        return (check_count("num_slices", num_slices, ScheduleError),) * num_micro_batches
    counts = tuple(check_count(f"num_slices[{m}]", value, ScheduleError) for m, value in enumerate(num_slices))
    if len(counts) != num_micro_batches:
        fix = f"give one number of slices for each micro-batch; the step has {num_micro_batches}"
        raise ScheduleError(f"num_slices has {len(counts)} entries: {fix}")
    return counts
