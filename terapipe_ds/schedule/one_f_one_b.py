"""Generate the schedules that alternate forwards and backwards.

A generator takes the number of stages and the number of slices of each micro-batch, and gives one list of units per
stage. The tables show unit time slots (F, B and W take one each) of 3 stages, 2 micro-batches, 2 slices.

Zero bubble splits each backward in two: B for the input gradients, which the stage before waits for, and W for the
weight gradients, which no stage waits for and which therefore fill waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from terapipe_ds.schedule.action import Kind, PlacedUnit, ScheduleError


def forwards(num_slices: tuple[int, ...]) -> list[PlacedUnit]:
    """Return every forward: micro-batches in order, slices in order."""
    return [(Kind.FORWARD, m, s, 0) for m, count in enumerate(num_slices) for s in range(count)]


def backwards(num_slices: tuple[int, ...]) -> list[PlacedUnit]:
    """Return every backward: micro-batches first in first out, slices last in first out."""
    return [(Kind.BACKWARD, m, s, 0) for m, count in enumerate(num_slices) for s in reversed(range(count))]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 .    .    B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 .    .    B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0 .    .
def one_f_one_b(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Alternate forwards and backwards by whole micro-batches, each expanded to its slices.

    It equals the compute order of DeepSpeed's `TrainSchedule` (deepspeed/runtime/pipe/schedule.py).
    """
    return _by_whole_micro_batches(range(num_stages - 1, -1, -1), num_slices)


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 .    .    B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 .    .    B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0 .    .
def dapple(num_stages: int, num_slices: tuple[int, ...], policy: object = "A") -> list[list[PlacedUnit]]:
    """Run `1f1b` with the warm-ups of DAPPLE (Fan et al., PPoPP 2021, arXiv 2007.01045), for comparison.

    Stage i runs K - i micro-batches forward before its first backward with policy "A", which is `1f1b`, and
    2(K - i) - 1 with policy "B", which hides messages that take as long as a forward. Raises `ScheduleError` on
    another policy.
    """
    if policy not in ("A", "B"):
        raise ScheduleError(f"policy is {policy!r}: give 'A' (K - i warm-up micro-batches) or 'B' (2(K - i) - 1)")
    leads = range(num_stages - 1, -1, -1)
    return _by_whole_micro_batches([lead if policy == "A" else 2 * lead for lead in leads], num_slices)


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 .    B0.0 .    B1.1 B1.0
# stage 1  .    F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 .    B1.1 B1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0 .    .
def seq1f1b(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Alternate forwards and backwards by slices (Seq1F1B, arXiv 2406.03488).

    At stage i, after a warm-up of `min(K - i + s - 2, m * s)` forwards, each forward is followed by a backward. The
    first backward belongs to the last slice of micro-batch 0, so with unequal numbers of slices s is its number.

    Where micro-batches differ, a later one may be longer, and its backward starts at a slice that has not run yet. So
    stage i stays K - 1 - i forwards ahead of the last stage all along (without that lead the pipeline would run empty
    at each longer micro-batch). With equal numbers this is plain one for one. It cannot deadlock: before its k-th
    backward no stage runs fewer forwards than the stages after it, so everything that they wait for has been sent.
    """
    return with_leads(forwards(num_slices), backwards(num_slices), range(num_stages - 1, -1, -1))


def with_leads(ahead: Sequence[PlacedUnit], back: Sequence[PlacedUnit], leads: Iterable[int]) -> list[list[PlacedUnit]]:
    """Return, per stage, forwards and backwards merged, each stage its `lead` of forwards ahead of the last one.

    The last stage runs at least one forward before each backward, and goes on until that backward's own F has run.
    """
    position = {unit[1:]: index for index, unit in enumerate(ahead)}
    orders = []
    for lead in leads:
        order: list[PlacedUnit] = []
        done = on_last_stage = 0  # forwards run so far: here, and on the last stage
        for unit in back:
            on_last_stage = max(on_last_stage + 1, position[unit[1:]] + 1)
            upto = min(on_last_stage + lead, len(ahead))
            order.extend(ahead[done:upto])
            order.append(unit)
            done = upto
        orders.append(order)
    return orders


def _by_whole_micro_batches(leads: Iterable[int], num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Return, per stage, `lead` micro-batches forward, then one forward and one backward in turns."""
    whole = (1,) * len(num_slices)
    return expanded(with_leads(forwards(whole), backwards(whole), leads), num_slices)


def expanded(whole: Iterable[Iterable[PlacedUnit]], num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Return orders of whole micro-batches with each F in its slices, and each B and W in its slices in reverse."""
    return [
        [
            (kind, m, s, chunk)
            for kind, m, _, chunk in order
            for s in range(num_slices[m])[:: 1 if kind is Kind.FORWARD else -1]
        ]
        for order in whole
    ]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 W0.1 W0.0 B1.1 B1.0 W1.1 W1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 W0.1 W0.0 B1.1 B1.0 W1.1 W1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0 W0.1 W0.0 W1.1 W1.0
def zb_h1(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Run 1F1B by whole micro-batches, with W (ZB-H1 of Qi et al., arXiv 2401.10241, figure 3).

    No stage holds more than K micro-batches between their F and their W, as many as stage 0 of `1f1b`: see
    `with_weights`. Each F, B and W is expanded to the slices, in reverse for B and W, so that the W of a micro-batch
    are in a row.
    """
    whole = one_f_one_b(num_stages, (1,) * len(num_slices))
    return expanded((with_weights(order, num_stages) for order in whole), num_slices)


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 W0.1 B0.0 W0.0 B1.1 W1.1 B1.0 W1.0
# stage 1  .    F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 W0.1 B1.1 W0.0 B1.0 W1.1 W1.0
# stage 2  .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 W0.1 B1.0 W0.0 W1.1 W1.0
def seq1f1b_zb(num_stages: int, num_slices: tuple[int, ...]) -> list[list[PlacedUnit]]:
    """Run `seq1f1b` with W (the rule behind the zero-bubble figure of the Seq1F1B authors, arXiv 2406.03488).

    No stage holds more than K + s - 1 slices between their F and their W, as many as stage 0 of `seq1f1b` (s of the
    micro-batch that has most). Where `seq1f1b` holds more, for a longer one comes, every W that can runs before an F.
    """
    limit = num_stages + max(num_slices) - 1
    return [with_weights(order, limit) for order in seq1f1b(num_stages, num_slices)]


def with_weights(order: list[PlacedUnit], limit: int) -> list[PlacedUnit]:
    """Return `order` (F and B) with a W for each B, first in first out.

    Before a forward the oldest ones run, until fewer than `limit` units are between F and W; after the last forward
    one runs after each B; the remaining ones run at the end.
    """
    merged: list[PlacedUnit] = []
    pending: deque[PlacedUnit] = deque()
    live = 0
    ahead = sum(unit[0] is Kind.FORWARD for unit in order)
    for unit in order:
        if unit[0] is Kind.FORWARD:
            while live >= limit and pending:
                merged.append(pending.popleft())
                live -= 1
            live, ahead = live + 1, ahead - 1
        merged.append(unit)
        if unit[0] is Kind.BACKWARD:
            pending.append((Kind.WEIGHT, *unit[1:]))
            if ahead == 0:
                merged.append(pending.popleft())
                live -= 1
    return merged + list(pending)
