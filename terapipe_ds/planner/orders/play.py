"""List scheduling by simulated time: what a stage can run, it runs; B before F before W, looking a little ahead.

F and B of all parts come in one order over the batch, so that links keep theirs. An order that was played cannot
deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.planner.orders.priced_nodes import Orders, PricedNodes


@dataclass(frozen=True)
class Policy:
    """What the stages do: per stage the live slices that they stop at, and how long they would rather wait for a B.

    `patience[k]` is a share of the computation that stage k could start: where a B comes within that share of its
    time, the stage waits. `keen[k]`: F before B while the stage holds fewer live slices than this.
    """

    limits: tuple[int, ...]
    patience: tuple[float, ...]
    keen: tuple[int, ...]


def play(nodes: PricedNodes, policy: Policy, ahead: Sequence[int], back: Sequence[int]) -> tuple[float, Orders] | None:
    """Return makespan and orders of a policy; None where a limit leaves no stage anything to run.

    `ahead` and `back` are the orders of the units' F and B on every part.
    """
    parts, units, stages, last = nodes.num_parts, nodes.num_units, nodes.stage_of_part, nodes.num_kinds - 1
    parts_of = [[p for p in reversed(range(parts)) if stages[p] == k] for k in range(nodes.num_stages)]
    reserve = max(plan.num_slices for plan in nodes.plans)
    done = [[0] * parts for _ in range(3)]
    live_of, live = [0] * parts, [0] * nodes.num_stages
    arrivals, free = [-1.0] * nodes.num_nodes + [0.0], [0.0] * nodes.num_stages
    link_free = [0.0] * (nodes.num_kinds * parts)
    orders: Orders = [[] for _ in range(nodes.num_stages)]
    own = [-1.0] * nodes.num_nodes  # when a node ends on its own stage
    left, seconds = nodes.num_nodes, nodes.seconds

    def next_backward(stage_id: int) -> tuple[float, int] | None:
        found: tuple[float, int] | None = None
        for part in parts_of[stage_id]:
            if done[1][part] < units:
                unit = back[done[1][part]]
                node, ended = (parts + part) * units + unit, own[part * units + unit]
                came = arrivals[nodes.inputs[node]]
                if ended >= 0 and came >= 0 and (found is None or max(came, ended) < found[0]):
                    found = max(came, ended), node
        return found

    def next_forward(stage_id: int) -> tuple[float, int] | None:
        if live[stage_id] >= policy.limits[stage_id]:
            return None
        for place, part in enumerate(parts_of[stage_id]):
            room = policy.limits[stage_id] - reserve * place
            if done[0][part] < units and live_of[part] < room:
                node = part * units + ahead[done[0][part]]
                if arrivals[nodes.inputs[node]] >= 0 and arrivals[nodes.inputs[node]] <= now:
                    return arrivals[nodes.inputs[node]], node
        return None

    def choose(stage_id: int) -> int:
        backward, forward = next_backward(stage_id), next_forward(stage_id)
        if forward is not None and live[stage_id] < policy.keen[stage_id]:
            return forward[1]
        if backward is not None and backward[0] <= now:
            return backward[1]
        node = forward[1] if forward is not None else -1
        if node < 0 and last == 2:
            pending = [p for p in parts_of[stage_id] if done[2][p] < done[1][p]]
            if pending:
                part = max(pending, key=lambda p: (done[1][p] - done[2][p], p))
                node = (2 * parts + part) * units + back[done[2][part]]
        if node >= 0 and backward is not None and backward[0] < now + policy.patience[stage_id] * seconds[node]:
            return -1
        return node

    moments = [(0.0, k) for k in range(nodes.num_stages)]
    while moments:
        now, stage_id = heapq.heappop(moments)
        if free[stage_id] > now or (node := choose(stage_id)) < 0:
            continue
        kind, part, _ = nodes.split(node)
        free[stage_id] = own[node] = end = now + seconds[node]
        link = kind * parts + part
        arrivals[node] = link_free[link] = max(end, link_free[link]) + nodes.sends[node]
        orders[stage_id].append(node)
        done[kind][part] += 1
        change = (kind == 0) - (kind == last)
        live[stage_id] += change
        live_of[part] += change
        left -= 1
        heapq.heappush(moments, (end, stage_id))
        other = part + 1 - 2 * kind
        if kind < 2 and 0 <= other < parts:
            heapq.heappush(moments, (arrivals[node], stages[other]))
    return None if left else (max(free), orders)
