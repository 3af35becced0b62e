"""Number the computations of a batch and hold their seconds, so that a changed order is timed quickly.

Node `(kind * parts + part) * units + unit` is one F, B or W. Where costs have `weight_s`, every backward is split: a
whole B is a B with its W right after it, which takes as long and sends its gradient earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terapipe_ds.costs.interface import costs_of_parts, know_weights
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import Action, Kind, Schedule
from terapipe_ds.schedule.clock import BACKWARD, FORWARD, KINDS, WEIGHT, end_of_orders
from terapipe_ds.schedule.placement import Placement
from terapipe_ds.simulator.costs import SEND, SEND_GRADIENT, SPLIT_BACKWARD, SimulationError, spans_of_units, tabulate

Orders = list[list[int]]
"""Nodes per stage, in the order they run."""
STUCK = float("inf")


class PricedNodes:
    """Hold the seconds and dependencies of the nodes of one batch; `makespan` times orders of them."""

    def __init__(self, placement: Placement, plans: Sequence[SlicePlan], costs: Any) -> None:
        self.placement, self.plans = placement, tuple(plans)
        self.num_stages, self.num_parts = 1 + max(k for k, _ in placement), len(placement)
        self.place_of_part = {part: place for place, part in placement.items()}
        self.stage_of_part = [self.place_of_part[part][0] for part in range(self.num_parts)]
        self.units = [(m, s) for m, plan in enumerate(plans) for s in range(plan.num_slices)]
        self.num_units = len(self.units)
        parts = costs_of_parts(costs, self.num_parts, SimulationError)
        self.is_split = know_weights(parts)
        self.num_kinds = 2 + self.is_split
        back = sorted(range(self.num_units), key=lambda unit: (self.units[unit][0], -self.units[unit][1]))
        self.order_of_kind = list(range(self.num_units)), back, back
        self._connect()
        self._price(parts)

    def node(self, kind: int, part: int, unit: int) -> int:
        return (kind * self.num_parts + part) * self.num_units + unit

    def split(self, node: int) -> tuple[int, int, int]:
        rest, unit = divmod(node, self.num_units)
        kind, part = divmod(rest, self.num_parts)
        return kind, part, unit

    def _price(self, parts: Sequence[Any]) -> None:
        spans, of_unit = spans_of_units(self.plans)
        # seconds by kind, part and unit, in the order of the nodes' numbers
        rows = [FORWARD, SPLIT_BACKWARD, WEIGHT] if self.is_split else [FORWARD, BACKWARD]
        table = tabulate(parts, [{*rows, SEND, SEND_GRADIENT}] * self.num_parts, spans)[:, :, of_unit]
        self.seconds: list[float] = np.concatenate([table[:, row].ravel() for row in rows]).tolist()
        sends = [table[:, SEND], table[:, SEND_GRADIENT], np.zeros_like(table[:, SEND])][: self.num_kinds]
        self.sends: list[float] = np.where(np.array(self.links) < 0, 0.0, np.concatenate(sends).ravel()).tolist()

    def _connect(self) -> None:
        """Set per node the node that it needs (the last entry: none), and its link; -1 where it sends nothing."""
        self.num_nodes = count = self.num_kinds * self.num_parts * self.num_units
        self.inputs, self.links = [count] * count, [-1] * count
        for node in range(count):
            kind, part, _ = self.split(node)
            step = (1, -1, 0)[kind]
            if kind < 2 and 0 <= part - step < self.num_parts:
                self.inputs[node] = node - step * self.num_units
            if kind < 2 and 0 <= part + step < self.num_parts:
                is_local = self.stage_of_part[part] == self.stage_of_part[part + step]
                self.links[node] = -1 if is_local else kind * self.num_parts + part

    def makespan(self, orders: Orders, has_whole_backwards: bool = False) -> float:
        """Return when the last computation ends; `STUCK` where stages wait for one another for ever.

        With whole backwards a B takes the seconds of its W too, before it sends its gradient.
        """
        seconds = self.seconds
        if has_whole_backwards and self.is_split:
            forward, back, weight = np.split(np.array(seconds), 3)
            seconds = [*forward.tolist(), *(back + weight).tolist(), *(0.0 * weight).tolist()]
        return end_of_orders(orders, self.inputs, seconds, self.sends, self.links)

    def of_schedule(self, schedule: Schedule) -> Orders:
        """Return the orders of a schedule with the same placement; a whole B becomes a B and its W."""
        first = np.cumsum([0, *schedule.num_slices]).tolist()
        has_weights = any(action.kind is Kind.WEIGHT for order in schedule.orders for action in order)
        orders: Orders = []
        for order in schedule.orders:
            nodes = []
            for action in order:
                unit = first[action.micro_batch_id] + action.slice_id
                if action.kind is not Kind.WEIGHT or self.is_split:
                    nodes.append(self.node(KINDS.index(action.kind), action.part_id, unit))
                if action.kind is Kind.BACKWARD and self.is_split and not has_weights:
                    nodes.append(self.node(2, action.part_id, unit))
            orders.append(nodes)
        return orders

    def to_schedule(self, orders: Orders) -> Schedule:
        slices = tuple(plan.num_slices for plan in self.plans)
        actions = tuple(tuple(map(self.action, order)) for order in orders)
        chunks = self.num_parts // self.num_stages
        return Schedule("search", self.num_stages, len(slices), slices, chunks, False, actions, dict(self.placement))

    def action(self, node: int) -> Action:
        kind, part, unit = self.split(node)
        return Action(KINDS[kind], *self.units[unit], part, self.place_of_part[part][1])

    def lower_bound(self) -> float:
        """Return a time that no order beats: for each stage its work, after its fastest fill and before its drain."""
        seconds = np.array(self.seconds).reshape(self.num_kinds, self.num_parts, self.num_units)
        sends = np.array(self.sends).reshape(seconds.shape)
        first_units = [i for i, (_, s) in enumerate(self.units) if s == 0]
        ahead, back = (seconds[kind] + sends[kind] for kind in (0, 1))
        bounds = []
        for stage_id in range(self.num_stages):
            parts = [p for p in range(self.num_parts) if self.stage_of_part[p] == stage_id]
            fill = ahead[: parts[0]][:, first_units].sum(axis=0).min() if parts[0] else 0.0
            # The last B or W of this stage: the first slice's B still goes down to part 0 after its own B.
            after = back[: parts[0]][:, first_units].sum(axis=0).min() if parts[0] else 0.0
            weights = seconds[2][parts].sum() if self.is_split else 0.0  # W may run while the gradient goes on
            work = seconds[:, parts].sum()
            bounds.append(fill + max(work, work - weights + after))
        return float(max(bounds))
