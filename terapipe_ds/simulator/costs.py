"""Ask costs for the simulator: seconds per (part, slice), looked up once per call and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from terapipe_ds.costs.interface import Seconds, ask
from terapipe_ds.messages import show_value
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule.clock import BACKWARD, FORWARD, WEIGHT

SPLIT_BACKWARD, SEND, SEND_GRADIENT = 3, 4, 5
"""Rows of a table after F, whole B and W: a B whose weight gradients are left to W, and the messages of F and B."""

_METHODS = {FORWARD: "forward_s", BACKWARD: "backward_s", WEIGHT: "weight_s"}
_METHODS |= {SEND: "send_s", SEND_GRADIENT: "send_gradient_s"}

Span = tuple[int, int]
"""(tokens, prefix) of a slice."""


class SimulationError(ValueError):
    """Refuse a schedule, plan, costs or memory that do not fit together, or impossible times."""


@dataclasses.dataclass(frozen=True)
class UnitCosts:
    """Give costs without a machine: a forward over `sequence_length` tokens takes 1 s, a backward 2 s, its weight
    gradients 1 s of that, and a message `send_share` s. A slice takes its share of the tokens, and a part its
    `share` of the stage (1 / v where a stage holds v)."""

    sequence_length: int
    send_share: float = 0.0
    share: float = 1.0

    def forward_s(self, tokens: int, prefix: int) -> float:
        return self.share * tokens / self.sequence_length

    def backward_s(self, tokens: int, prefix: int) -> float:
        return self.share * 2 * tokens / self.sequence_length

    weight_s = forward_s

    def send_s(self, tokens: int) -> float:
        return self.send_share * tokens / self.sequence_length


def plan_per_micro_batch(plan: SlicePlan | Sequence[SlicePlan], num_slices: Sequence[int]) -> tuple[SlicePlan, ...]:
    """Return `plan` as one plan per micro-batch. Raises SimulationError unless each has the schedule's slices."""
    plans = (plan,) * len(num_slices) if isinstance(plan, SlicePlan) else tuple(plan)
    if len(plans) != len(num_slices):
        raise SimulationError(
            f"{len(plans)} plans for {len(num_slices)} micro-batches: give one plan for all, or one per micro-batch"
        )
    for micro_batch_id, (one, count) in enumerate(zip(plans, num_slices, strict=True)):
        if not isinstance(one, SlicePlan):
            raise SimulationError(f"the plan of micro-batch {micro_batch_id} is {show_value(one)}: give a SlicePlan")
        if one.num_slices != count:
            raise SimulationError(
                f"the plan of micro-batch {micro_batch_id} has {one.num_slices} slices {show_value(one.lengths)}, the"
                f" schedule {count}: build the schedule with num_slices={one.num_slices}, or cut it into {count}"
            )
    return plans


def spans_of_units(plans: Iterable[SlicePlan]) -> tuple[list[Span], list[int]]:
    """Return the different slices of some micro-batches, and for each slice of the batch its index among them."""
    numbers: dict[Span, int] = {}
    of_units = [
        numbers.setdefault(span, len(numbers)) for one in plans for span in zip(one.lengths, one.starts, strict=True)
    ]
    return list(numbers), of_units


def tabulate(parts: Sequence[Any], rows: Sequence[set[int]], spans: Sequence[Span]) -> Seconds:
    """Return seconds as an array `[parts, rows, spans]`: for part p the rows in `rows[p]`, 0 elsewhere.

    Every object is asked once per pair, even if several parts share it: with Python ints, or with arrays where it
    has `vectorized = True`. A part without `send_s` sends at no cost. Without `send_gradient_s` a message back costs
    as much as a message onwards.

    Raises:
        SimulationError: a required method is missing; a time is negative, not finite or no number; a `weight_s` is
            above its `backward_s`.
    """
    needed: dict[int, set[int]] = {}
    for cost, rows_of_part in zip(parts, rows, strict=True):
        needed.setdefault(id(cost), set()).update(rows_of_part)
    tables: dict[int, Seconds] = {}
    for part_id, cost in enumerate(parts):
        if id(cost) not in tables:
            tables[id(cost)] = _table(cost, f"the costs of part {part_id}", needed[id(cost)], spans)
    return np.stack([tables[id(cost)] for cost in parts])


def _table(cost: Any, whose: str, rows: set[int], spans: Sequence[Span]) -> Seconds:
    table = np.zeros((len(_METHODS) + 1, len(spans)))
    is_split = SPLIT_BACKWARD in rows
    for row in sorted(rows - {SPLIT_BACKWARD} | ({BACKWARD, WEIGHT} if is_split else set())):
        name = _METHODS[row]
        if hasattr(cost, name) and row < SEND:
            tokens, prefixes = zip(*spans, strict=True)
            table[row] = ask(cost, name, tokens, prefixes, SimulationError, f"{whose}, ")
        elif hasattr(cost, name):  # messages have no prefix: slices of one length send equal ones
            sizes = list(dict.fromkeys(tokens for tokens, _ in spans))
            seconds = dict(zip(sizes, ask(cost, name, sizes, None, SimulationError, f"{whose}, "), strict=True))
            table[row] = [seconds[tokens] for tokens, _ in spans]
        elif row == WEIGHT:
            raise SimulationError(f"the schedule has W but {whose} have no weight_s(tokens, prefix): add it")
        elif row == SEND_GRADIENT:
            table[row] = table[SEND]
        elif row != SEND:
            raise SimulationError(f"{whose} ({type(cost).__name__}) have no {name}(tokens, prefix): add it")
    if is_split:
        table[SPLIT_BACKWARD] = table[BACKWARD] - table[WEIGHT]
        if (left_s := table[SPLIT_BACKWARD]).min() < 0:
            most, prefix = spans[int(left_s.argmin())]
            raise SimulationError(
                f"{whose}: weight_s of {most} tokens after {prefix} is {-left_s.min():.6g} s above its backward_s, of "
                "which it is a part"
            )
    return table
