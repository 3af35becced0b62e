"""Play orders with the costs at hand: a stage runs whatever it can, B before F before W, and looks a little ahead.

F and B of all parts come in one order over the batch, so that links keep their order. A played order cannot deadlock.
The clock is the one in `schedule.greedy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.planner.orders.holdings import Holdings
from terapipe_ds.planner.orders.priced_nodes import Orders, PricedNodes
from terapipe_ds.schedule import greedy
from terapipe_ds.schedule.clock import BACKWARD, FORWARD, WEIGHT
from terapipe_ds.schedule.greedy import Choice, Lane


@dataclass(frozen=True)
class Policy:
    """Hold the choices of the stages: per stage the limit of live slices, and how long it prefers to wait for a B.

    `patience[k]` is a share of the computation that stage k could start: where a B comes within that share of its
    time, the stage waits. `keen[k]`: F before B while the stage holds fewer live slices than this.
    """

    limits: tuple[int, ...]
    patience: tuple[float, ...]
    keen: tuple[int, ...]


class _Room:
    """Say whether a stage has room for an F.

    It keeps free the room that B needs. The earlier chunks of a stage leave room for a micro-batch of the later ones.
    """

    def __init__(self, holdings: Holdings) -> None:
        nodes = holdings.nodes
        self._holdings, self.pending = holdings, [0.0] * nodes.num_stages
        self._for_backward = [0.0] * nodes.num_stages
        self._of_micro_batch = [0.0] * nodes.num_stages
        owners = [m for m, _ in nodes.units]
        # the largest need of a B of the stage, and the largest holding of its share of a micro-batch
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


class _Player:
    """Choose the stages' computations by a policy; keep their holdings and the times when their links are free."""

    def __init__(self, nodes: PricedNodes, holdings: Holdings, policy: Policy) -> None:
        self.nodes, self.holdings, self.policy = nodes, holdings, policy
        self.room = _Room(holdings)
        self.held, self.held_of = list(holdings.base), [0.0] * nodes.num_parts
        self.link_free = [0.0] * (2 * nodes.num_parts)
        self.end_s = 0.0
        self._reserve = max(plan.num_slices for plan in nodes.plans)

    def choose(self, places: list[Lane[int]], now: float) -> Choice[int] | None:
        """Return the computation that a stage starts: a B that is ready, else an F or a W unless a B comes soon."""
        stage_id = places[0].stage_id
        came = [(found[0], lane, found[1]) for lane in places if (found := lane.next_backward()) is not None]
        backward = min(came, key=lambda ready: ready[0], default=None)
        choice = self._forward(stage_id, places, now)
        if choice is not None and self._live(places) < self.policy.keen[stage_id]:
            return choice
        if backward is not None and backward[0] <= now:
            return Choice(BACKWARD, *backward[1:])
        # W fills a wait
        pending = [lane for lane in places if self.nodes.is_split and lane.pending_weights]
        if choice is None and pending:
            lane = max(pending, key=lambda lane: (lane.pending_weights, lane.part_id))
            choice = Choice(WEIGHT, lane, lane.next_weight)
        # a B that comes soon is worth a short wait
        if choice is None or backward is None:
            return choice
        patience_s = self.policy.patience[stage_id] * self.nodes.seconds[self._node(choice)]
        return None if backward[0] < now + patience_s else choice

    def run(self, choice: Choice[int], now: float) -> tuple[float, float]:
        """Return when a computation ends and when its message arrives; update the holdings of the stage."""
        kind, lane, _ = choice
        node, holdings = self._node(choice), self.holdings
        end = arrival = now + self.nodes.seconds[node]
        if (link := self.nodes.links[node]) >= 0:
            arrival = self.link_free[link] = max(end, self.link_free[link]) + self.nodes.sends[node]
        self.end_s = max(self.end_s, end)
        change = holdings.gain[node] + holdings.after[node]
        self.held_of[lane.part_id] += change
        if kind == BACKWARD and lane.done[BACKWARD] == 0:  # the gradients of the parameters come, and stay
            change += holdings.with_first_backward[lane.part_id]
            self.room.pending[lane.stage_id] -= holdings.with_first_backward[lane.part_id]
        self.held[lane.stage_id] += change
        return end, arrival

    def _forward(self, stage_id: int, places: list[Lane[int]], now: float) -> Choice[int] | None:
        """Return the F of the latest part that has its input and room; earlier parts leave room for later ones."""
        limit = self.policy.limits[stage_id]
        if self._live(places) >= limit:
            return None
        for place, lane in enumerate(places):
            unit = lane.next_forward(now)
            if unit is None or lane.live >= limit - self._reserve * place:
                continue
            choice = Choice(FORWARD, lane, unit)
            held = self.held[stage_id], self.held_of[lane.part_id]
            if self.room.fits(stage_id, lane.part_id, place, self._node(choice), *held):
                return choice
        return None

    def _live(self, places: list[Lane[int]]) -> int:
        return sum(lane.live for lane in places)

    def _node(self, choice: Choice[int]) -> int:
        return self.nodes.node(choice.kind, choice.lane.part_id, choice.unit)


def play(
    nodes: PricedNodes, holdings: Holdings, policy: Policy, ahead: Sequence[int], back: Sequence[int]
) -> tuple[float, Orders] | None:
    """Return makespan and orders of a policy; None where the limits let no stage go on.

    `ahead` and `back` are the orders of the units' F and B on every part. An F runs where `holdings` leave room for it
    and for any B.
    """
    lanes = {
        (0, part): Lane(stage_id, nodes.place_of_part[part][1], part, ahead, back)
        for part, stage_id in enumerate(nodes.stage_of_part)
    }
    greedy.connect(lanes)
    of_stages: list[list[Lane[int]]] = [[] for _ in range(nodes.num_stages)]
    for lane in reversed(lanes.values()):  # the later parts of a stage come first
        of_stages[lane.stage_id].append(lane)
    player = _Player(nodes, holdings, policy)
    orders = greedy.play(of_stages, player.choose, player.run, nodes.num_kinds)
    if orders is None:
        return None
    return player.end_s, [[nodes.node(kind, lane.part_id, unit) for kind, lane, unit in order] for order in orders]
