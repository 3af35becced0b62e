"""List scheduling by simulated time: what a stage can run, it runs; B before F before W, looking a little ahead.

F and B of all parts come in one order over the batch, so that links keep theirs. An order that was played cannot
deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.planner.orders.holdings import Holdings
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


class _Room:
    """Say whether a stage has room for an F.

    What B needs is kept free, and of the chunks of a stage the earlier ones leave room for a micro-batch of the later.
    """

    def __init__(self, holdings: Holdings) -> None:
        nodes = holdings.nodes
        self._holdings, self.pending = holdings, [0.0] * nodes.num_stages
        self._for_backward = [0.0] * nodes.num_stages
        self._of_micro_batch = [0.0] * nodes.num_stages
        owners = [m for m, _ in nodes.units]
        for part, stage_id in enumerate(nodes.stage_of_part):
            self.pending[stage_id] += holdings.with_first_backward[part]
            first, backward = part * nodes.num_units, (nodes.num_parts + part) * nodes.num_units
            needs = [holdings.gain[backward + unit] + holdings.working[backward + unit] for unit in range(len(owners))]
            self._for_backward[stage_id] = max(self._for_backward[stage_id], *needs)
            sums = [0.0] * len(nodes.plans)
            for unit, m in enumerate(owners):
                sums[m] += holdings.gain[first + unit]
            self._of_micro_batch[stage_id] = max(self._of_micro_batch[stage_id], *sums)

    def fits(self, stage_id: int, part: int, place: int, node: int, held: float, held_of_part: float) -> bool:
        holdings = self._holdings
        needs = self.pending[stage_id] + max(self._for_backward[stage_id], holdings.working[node])
        most = holdings.limits[stage_id] - needs
        if held + holdings.gain[node] > most:
            return False
        of_chunk = most - holdings.base[stage_id] - place * self._of_micro_batch[stage_id]
        return place == 0 or held_of_part + holdings.gain[node] <= of_chunk


def play(
    nodes: PricedNodes, holdings: Holdings, policy: Policy, ahead: Sequence[int], back: Sequence[int]
) -> tuple[float, Orders] | None:
    """Return makespan and orders of a policy; None where a limit leaves no stage anything to run.

    `ahead` and `back` are the orders of the units' F and B on every part. An F runs where `holdings` leave room for it
    and for any B.
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
    gain, after, held = holdings.gain, holdings.after, list(holdings.base)
    held_of, room = [0.0] * parts, _Room(holdings)

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
            most = policy.limits[stage_id] - reserve * place
            if done[0][part] < units and live_of[part] < most:
                node = part * units + ahead[done[0][part]]
                if not room.fits(stage_id, part, place, node, held[stage_id], held_of[part]):
                    continue
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
        held[stage_id] += gain[node] + after[node]
        held_of[part] += gain[node] + after[node]
        if kind == 1 and done[1][part] == 1:
            held[stage_id] += holdings.with_first_backward[part]
            room.pending[stage_id] -= holdings.with_first_backward[part]
        left -= 1
        heapq.heappush(moments, (end, stage_id))
        other = part + 1 - 2 * kind
        if kind < 2 and 0 <= other < parts:
            heapq.heappush(moments, (arrivals[node], stages[other]))
    return None if left else (max(free), orders)
