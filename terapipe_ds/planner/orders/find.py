"""Find the order that takes least simulated time under a limit of live slices per stage.

It starts from the named schedules with one copy of the layers and from orders played by simulated time; then it
changes, by seeded chance, first how the stages play and then single places of the best order. Its budget is a number
of evaluations, so every machine finds the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.orders.play import Policy, play
from terapipe_ds.planner.orders.priced_nodes import STUCK, Orders, PricedNodes
from terapipe_ds.schedule import Schedule, ScheduleError, build, validate
from terapipe_ds.schedule.placement import loop, v_shape

NAMED = ("seq1f1b-zb", "seq1f1b", "zb-h1", "1f1b", "gpipe", "terapipe")
"""The schedules with one copy of the layers and one part per stage."""

_FEW_UNITS = 8  # up to which other orders of the micro-batches' slices are played too


@dataclass(frozen=True)
class FoundOrder:
    """A schedule with its plans (one per micro-batch) and simulated time.

    `named_s` has the times of the named schedules that keep the limit. `lower_bound_s` is what no order beats.
    """

    schedule: Schedule
    plans: tuple[SlicePlan, ...]
    makespan_s: float
    lower_bound_s: float
    named_s: dict[str, float]
    evaluations: int


def find_order(
    costs: Any,
    plan: SlicePlan | Sequence[SlicePlan],
    num_stages: int,
    num_micro_batches: int,
    max_live_slices: int | Sequence[int],
    *,
    chunks_per_stage: int = 1,
    evaluations: int = 400,
    seed: int = 0,
) -> FoundOrder:
    """Return the fastest valid schedule found with at most `max_live_slices` (one number, or one per stage).

    With `chunks_per_stage` 2 the parts lie in a V. Raises ScheduleError where no order found keeps the limit.
    """
    plans = (plan,) * num_micro_batches if isinstance(plan, SlicePlan) else tuple(plan)
    limits = (max_live_slices,) * num_stages if isinstance(max_live_slices, int) else tuple(max_live_slices)
    if len(plans) != num_micro_batches or len(limits) != num_stages or chunks_per_stage not in (1, 2):
        raise ScheduleError(
            f"{len(plans)} plans for {num_micro_batches} micro-batches, {len(limits)} limits for {num_stages} stages,"
            f" {chunks_per_stage} chunks: give one plan per micro-batch, one limit per stage, and 1 or 2 chunks"
        )
    placement = loop(num_stages, 1) if chunks_per_stage == 1 else v_shape(num_stages)
    search = _Search(PricedNodes(placement, plans, costs), limits, evaluations, random.Random(seed))
    named_s = search.start_from_named()
    search.play_policies()
    search.move_nodes()
    if search.best_s == STUCK:
        raise ScheduleError(f"no order found keeps the limits {limits} of live slices: raise them")
    schedule = search.nodes.to_schedule(search.best)
    validate(schedule)
    return FoundOrder(schedule, plans, search.best_s, search.nodes.lower_bound(), named_s, search.used)


class _Search:
    def __init__(self, nodes: PricedNodes, limits: Sequence[int], budget: int, chance: random.Random) -> None:
        self.nodes, self.limits, self.budget, self.chance = nodes, tuple(limits), budget, chance
        self.best: Orders = []
        self.best_s = STUCK
        self.bound_s = nodes.lower_bound() * (1 + 1e-12)
        self.used = 0
        first = [sum(plan.num_slices for plan in nodes.plans[:m]) for m in range(len(nodes.plans))]
        self.back = [first[m] + s for m, plan in enumerate(nodes.plans) for s in reversed(range(plan.num_slices))]

    def _offer(self, orders: Orders, seconds: float) -> None:
        if seconds < self.best_s:
            self.best, self.best_s = orders, seconds

    def start_from_named(self) -> dict[str, float]:
        """Take the named schedules that keep the limits and return their seconds."""
        nodes, seconds = self.nodes, {}
        names = NAMED if nodes.num_parts == nodes.num_stages else ("zbv",)
        for name in names:
            slices = [plan.num_slices for plan in nodes.plans]
            orders = nodes.of_schedule(build(name, nodes.num_stages, len(slices), slices))
            if len(names) == 1 and not nodes.is_split:
                continue
            if all(nodes.peak_live(order) <= limit for order, limit in zip(orders, self.limits, strict=True)):
                self.used += 1
                seconds[name] = nodes.makespan(orders)
                self._offer(orders, seconds[name])
        return seconds

    def play_policies(self) -> None:
        """Play a grid of policies, then change the best one while half of the budget lasts."""
        stages, most = range(self.nodes.num_stages), max(plan.num_slices for plan in self.nodes.plans)
        best, best_s = None, STUCK
        plain = Policy(self.limits, (0.0,) * len(stages), (0,) * len(stages))
        grid = [
            Policy(
                tuple(min(self.limits[k], most + slope * (len(stages) - 1 - k) + extra) for k in stages),
                (patience,) * len(stages),
                (0,) * len(stages),
            )
            for slope in (1, 2, 3)
            for extra in (0, 2, 10**6)
            for patience in (0.0, 0.5)
        ]
        while self.used < self.budget // 2 and self.best_s > self.bound_s:
            policy = grid.pop() if grid else self._changed(best or plain)
            played = play(self.nodes, policy, *self._unit_orders())
            self.used += 1
            if played is not None and played[0] <= best_s:
                best, best_s = policy, played[0]
                self._offer(played[1], played[0])

    def _unit_orders(self) -> tuple[list[int], list[int]]:
        """Return the orders of the units' F and B: micro-batches in order, but where few units are, any at times."""
        ahead = list(range(self.nodes.num_units))
        if len(ahead) > _FEW_UNITS or self.chance.random() < 0.5:
            return ahead, self.back
        return self._merged(ahead), self._merged(self.back)

    def _merged(self, units: Sequence[int]) -> list[int]:
        """Return units in an order by chance that keeps those of each micro-batch in theirs."""
        owners = [self.nodes.units[unit][0] for unit in units]
        left = {m: [unit for unit in units if self.nodes.units[unit][0] == m] for m in owners}
        self.chance.shuffle(owners)
        return [left[m].pop(0) for m in owners]

    def _changed(self, policy: Policy) -> Policy:
        """Return a policy that differs for a few neighbouring stages."""
        start = self.chance.randrange(self.nodes.num_stages)
        stages = range(start, min(start + self.chance.choice((1, 1, 2, self.nodes.num_stages)), self.nodes.num_stages))
        limits, patience, keen = list(policy.limits), list(policy.patience), list(policy.keen)
        what, step = self.chance.randrange(3), self.chance.choice((-3, -2, -1, 1, 2, 3))
        share = self.chance.choice((0.0, 0.1, 0.25, 0.5, 0.75, 1.0))
        for k in stages:
            if what == 0:
                limits[k] = max(1, min(self.limits[k], limits[k] + step))
            elif what == 1:
                patience[k] = share
            else:
                keen[k] = max(0, min(limits[k], keen[k] + step))
        return replace(policy, limits=tuple(limits), patience=tuple(patience), keen=tuple(keen))

    def move_nodes(self) -> None:
        """Move single computations of the best order to other places of their stage; keep what is not slower."""
        if self.best_s == STUCK:
            return
        tries = 20 * self.budget  # moves that break a rule are found out without an evaluation
        while self.used < self.budget and tries and self.best_s > self.bound_s:
            tries -= 1
            stage_id = self.chance.randrange(len(self.best))
            order = self._moved(self.best[stage_id])
            if order is None or self.nodes.peak_live(order) > self.limits[stage_id]:
                continue
            orders = [*self.best[:stage_id], order, *self.best[stage_id + 1 :]]
            seconds = self.nodes.makespan(orders)
            self.used += 1
            if seconds <= self.best_s:
                self.best, self.best_s = orders, seconds

    def _moved(self, order: Sequence[int]) -> list[int] | None:
        """Return an order with one node at another place; None where a rule forbids it."""
        source = self.chance.randrange(len(order))
        step = self.chance.choice((-1, 1)) * self.chance.choice((1, 1, 2, 3, 5, 8))
        target = source + step
        if not 0 <= target < len(order):
            return None
        node, split = order[source], self.nodes.split
        kind, part, unit = split(node)
        crossed = order[target:source] if step < 0 else order[source + 1 : target + 1]
        for other in crossed:
            other_kind, other_part, other_unit = split(other)
            if other_part == part and (other_unit == unit or (other_kind == kind and kind < 2)):
                return None
        moved = [*order[:source], *order[source + 1 :]]
        moved.insert(target, node)
        return moved


Cut = Callable[[int], SlicePlan]
"""Returns the plan with a number of slices."""


def find_order_and_slices(
    costs: Any, cut: Cut, num_slices: int, num_stages: int, num_micro_batches: int, max_live_slices: int, **options: Any
) -> FoundOrder:
    """Return the fastest of orders with `num_slices` everywhere, with fewer in the middle, and with more at the ends.

    The first and last micro-batches make the ramp, where short slices pay most.
    """
    ends, found = max(1, num_micro_batches // 4), []
    middle = range(ends, num_micro_batches - ends)
    for inner, outer in ((num_slices, num_slices), (max(1, num_slices - 1), num_slices), (num_slices, num_slices + 1)):
        plans = [cut(inner if m in middle else outer) for m in range(num_micro_batches)]
        if max(plan.num_slices for plan in plans) <= max_live_slices:
            found.append(find_order(costs, plans, num_stages, num_micro_batches, max_live_slices, **options))
    if not found:
        raise ScheduleError(f"max_live_slices is {max_live_slices}, below {num_slices} slices: raise it, or cut fewer")
    return min(found, key=lambda one: one.makespan_s)
