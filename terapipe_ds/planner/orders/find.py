"""Find the order with the least simulated time under a limit of live slices per stage.

The search starts from the named schedules with one copy of the layers and from orders played by simulated time. Then
it changes, by seeded chance, first the policies of the stages and then single places of the best order. Its budget is
a number of evaluations, so every machine finds the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.orders.holdings import Holdings, limited
from terapipe_ds.planner.orders.play import Policy, play
from terapipe_ds.planner.orders.priced_nodes import STUCK, Orders, PricedNodes
from terapipe_ds.schedule import SEARCH, SPLIT_SCHEDULES, Schedule, ScheduleError, build, placement_for, validate
from terapipe_ds.simulator.peak_memory import Memory

NAMED = ("seq1f1b-zb", "seq1f1b", "zb-h1", "1f1b", "gpipe", "terapipe")
"""The schedules with one copy of the layers and one part per stage."""

_WORK = 1_200_000  # computations timed in some five seconds, overhead included
_FEWEST, _MOST = 8, 2000  # evaluations, however many computations there are
_FEW_UNITS = 8  # up to here it also plays other orders of the micro-batches' slices


@dataclass(frozen=True)
class FoundOrder:
    """Hold a schedule with its plans (one per micro-batch) and simulated time.

    `named_s` has the times of the named schedules that keep the limit. No order takes less than `lower_bound_s`.
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
    max_live_slices: int | Sequence[int] | None = None,
    *,
    max_live_sequences: float | None = None,
    memory: Memory | None = None,
    memory_limit_bytes: float | None = None,
    chunks_per_stage: int = 1,
    evaluations: int | None = None,
    budget: float = 1.0,
    names: Sequence[str] = NAMED,
) -> FoundOrder:
    """Search valid schedules within a limit (see `holdings.limited`), and return the fastest one.

    It is never slower than a schedule of `names` that keeps the limit. With `chunks_per_stage` 2 the parts lie in a V.
    `evaluations` is the number of orders to try; None: a share `budget` of some five seconds on one core, counted in
    computations, so that every machine finds the same.
    Raises ScheduleError where no order that the search meets keeps the limit.
    """
    plans = (plan,) * num_micro_batches if isinstance(plan, SlicePlan) else tuple(plan)
    if len(plans) != num_micro_batches:
        raise ScheduleError(f"{len(plans)} plans for {num_micro_batches} micro-batches: give one per micro-batch")
    # the batch as numbered computations with their seconds, and the limit of a stage
    nodes = PricedNodes(placement_for("search", num_stages, chunks_per_stage), plans, costs)
    holdings = limited(nodes, max_live_slices, max_live_sequences, memory, memory_limit_bytes)
    evaluations = budget_for(nodes.num_nodes, budget) if evaluations is None else evaluations
    # named orders first, then played ones, and the best of these changed bit by bit
    search = _Search(nodes, holdings, evaluations, random.Random(0))
    named_s = search.start_from_named(names)
    search.play_policies()
    search.move_nodes()
    schedule = search.schedule()
    if schedule is None:
        raise ScheduleError(f"no order found keeps the limit of {holdings.limit}: raise it, or give shorter slices")
    validate(schedule)
    return FoundOrder(schedule, plans, search.best_s, search.nodes.lower_bound(), named_s, search.used)


def budget_for(num_computations: int, share: float = 1.0) -> int:
    """Return the number of evaluations that take a share of some five seconds."""
    return max(_FEWEST, min(_MOST, round(share * _WORK / num_computations)))


def looks_for(num_computations: int, share: float) -> int:
    """Return the number of plans to try in half of that time."""
    return min(16, int(0.5 * share * _WORK / (_FEWEST * num_computations)))


class _Search:
    def __init__(self, nodes: PricedNodes, holdings: Holdings, budget: int, chance: random.Random) -> None:
        self.nodes, self.holdings, self.budget, self.chance = nodes, holdings, budget, chance
        most = nodes.num_units * nodes.num_parts // nodes.num_stages
        # policies count slices, whatever the unit of the limit; they never run a computation that the holdings forbid
        least = min((gain for gain in holdings.gain[: nodes.num_parts * nodes.num_units] if gain > 0), default=0.0)
        room = [limit - base for limit, base in zip(holdings.limits, holdings.base, strict=True)]
        self.limits = tuple(max(0, min(most, int(has / least + 1e-9))) if least else most for has in room)
        self.best: Orders = []
        self.best_s = STUCK
        self.named: list[tuple[float, Schedule]] = []  # those that keep the limits
        self.bound_s = nodes.lower_bound() * (1 + 1e-12)
        self.used = 0

    def _offer(self, orders: Orders, seconds: float) -> None:
        if seconds < self.best_s:
            self.best, self.best_s = orders, seconds

    def start_from_named(self, names: Sequence[str]) -> dict[str, float]:
        """Take the named schedules that keep the limits and return their seconds."""
        nodes, seconds = self.nodes, dict[str, float]()
        slices = [plan.num_slices for plan in nodes.plans]
        candidates: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names]
        if nodes.num_parts > nodes.num_stages:  # a V, by default or with what the limit has room for
            limited = {"max_live_slices": max(2 * max(slices), min(self.limits))}
            candidates = [("zbv", {}), ("zbv", limited)] if nodes.is_split else []
        for name, options in candidates:
            if name in seconds:
                continue
            schedule = build(name, nodes.num_stages, len(slices), slices, **options)
            orders, is_whole = nodes.of_schedule(schedule), name not in SPLIT_SCHEDULES
            is_known = is_whole or nodes.is_split
            if not is_known:  # nobody knows the seconds of its W: its order with whole backwards
                schedule = nodes.to_schedule(orders)
            if self.holdings.keeps(schedule, orders):
                self.used += 1
                seconds |= {name: nodes.makespan(orders, is_whole)} if is_known else {}
                self._offer(orders, nodes.makespan(orders))
                self.named.append((nodes.makespan(orders, is_whole), schedule))
        return seconds

    def schedule(self) -> Schedule | None:
        """Return the best order, if there is one.

        Holdings count `OUTSTANDING_SENDS` messages; an order that needs more of them may not fit in bytes.
        """
        if self.best_s == STUCK:
            return None
        schedule = self.nodes.to_schedule(self.best)
        if self.holdings.keeps(schedule, self.best):
            return schedule
        # a named schedule stays as it is: its order with B and W apart may hold more
        self.best_s, named = min(self.named, key=itemgetter(0), default=(STUCK, None))
        return None if named is None else replace(named, name=SEARCH)

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
        # first the grid, from its end on; then changes of the best policy
        while self.used < self.budget // 2 and self.best_s > self.bound_s:
            policy = grid.pop() if grid else self._changed(best or plain)
            played = play(self.nodes, self.holdings, policy, *self._unit_orders())
            self.used += 1
            if played is None or not self.holdings.fit(played[1]):
                continue
            if played[0] <= best_s:
                best, best_s = policy, played[0]
                self._offer(played[1], played[0])

    def _unit_orders(self) -> tuple[list[int], list[int]]:
        """Return the orders of the units' F and B: micro-batches in order; with few units, sometimes any order.

        The first order that keeps the limit is one with micro-batches in order, which need least room.
        """
        ahead, back, _ = self.nodes.order_of_kind
        if len(ahead) > _FEW_UNITS or not self.best or self.chance.random() < 0.5:
            return ahead, back
        return self._merged(ahead), self._merged(back)

    def _merged(self, units: Sequence[int]) -> list[int]:
        """Return units in a random order that keeps the order within each micro-batch."""
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
        """Move single computations of the best order to other places of their stage; keep a move that is not slower."""
        if self.best_s == STUCK:
            return
        tries = 20 * self.budget  # a move that breaks a rule takes no evaluation
        while self.used < self.budget and tries and self.best_s > self.bound_s:
            tries -= 1
            stage_id = self.chance.randrange(len(self.best))
            order = self._moved(self.best[stage_id])
            if order is None or not self.holdings.fits(stage_id, order):
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
        # the F of a part stay in order, the B too, and no computation passes another one of its own slice
        crossed = order[target:source] if step < 0 else order[source + 1 : target + 1]
        for other in crossed:
            other_kind, other_part, other_unit = split(other)
            if other_part == part and (other_unit == unit or (other_kind == kind and kind < 2)):
                return None
        moved = [*order[:source], *order[source + 1 :]]
        moved.insert(target, node)
        return moved
