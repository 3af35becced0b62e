"""Count the holdings of a stage's computations under a limit: live slices, live tokens, or bytes.

A node gains an amount when it starts, needs an amount while it runs, and gives an amount back once it has run. So one
walk over an order yields its peak, as in `simulator.peak_memory`; with a memory model the bytes are the same, except
for keys and values, whose memory the simulator keeps when a micro-batch is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.planner.orders.priced_nodes import Orders, PricedNodes
from terapipe_ds.schedule import Schedule, ScheduleError
from terapipe_ds.schedule.proofs import OUTSTANDING_SENDS
from terapipe_ds.simulator import Replay
from terapipe_ds.simulator.peak_memory import Memory, changes_of, needed_by


@dataclass(frozen=True)
class Holdings:
    """Hold, per node, the amounts that it gains, gives back, and needs as it runs; `limits` and `base` are per stage.

    A node has gained its `late` amount before it gives back. `with_first_backward` comes with the first B of a part,
    and stays (the gradients of its parameters).
    """

    nodes: PricedNodes
    limits: tuple[float, ...]
    base: tuple[float, ...]
    gain: list[float]
    after: list[float]
    late: list[float]
    working: list[float]
    with_first_backward: tuple[float, ...]
    limit: str  # in words
    memory: Memory | None = None  # of a limit in bytes

    def peak(self, stage_id: int, order: Sequence[int]) -> float:
        """Return the largest amount that the order of a stage holds."""
        gain, after, late, working = self.gain, self.after, self.late, self.working
        now = peak = self.base[stage_id]
        begun = [not more for more in self.with_first_backward]
        per_part, parts = self.nodes.num_units, self.nodes.num_parts
        for node in order:
            now += gain[node]
            change = after[node]
            place = node // per_part - parts
            if 0 <= place < parts and not begun[place]:
                begun[place] = True
                change += self.with_first_backward[place]
            top = now + (change if change > late[node] else late[node]) + working[node]
            if top > peak:
                peak = top
            now += change
        return peak

    def fits(self, stage_id: int, order: Sequence[int]) -> bool:
        return self.peak(stage_id, order) <= self.limits[stage_id]

    def fit(self, orders: Orders) -> bool:
        return all(self.fits(stage_id, order) for stage_id, order in enumerate(orders))

    def keeps(self, schedule: Schedule, orders: Orders) -> bool:
        """Return whether a whole schedule keeps the limit; bytes count the messages that are in flight.

        `peak` counts `OUTSTANDING_SENDS` messages, and a schedule may have more or fewer.
        """
        if self.memory is None:
            return self.fit(orders)
        return max(Replay.of(schedule).peak_bytes(self.nodes.plans, self.memory)) <= self.limits[0]


def limited(
    nodes: PricedNodes,
    live_slices: int | Sequence[int] | None = None,
    live_sequences: float | None = None,
    memory: Memory | None = None,
    num_bytes: float | None = None,
) -> Holdings:
    """Return the holdings under a limit of slices, tokens or bytes that a stage may hold at once.

    `live_slices` is one number, or one per stage: slices between F and the last of B and W, over all chunks.
    `live_sequences` counts tokens, so that slices of any length compare; tokens of a part count by its share of the
    stage. `num_bytes` goes with a `memory`. Without all of them, a stage may hold as many sequences as unsliced 1F1B on
    its fullest stage: one per stage. Raises ScheduleError where a limit is not one per stage.
    """
    stages = nodes.num_stages
    if num_bytes is not None:
        if memory is None:
            raise ScheduleError("a limit of bytes needs memory: give a MemoryModel, or leave the limit out")
        return _live_bytes(nodes, memory, num_bytes)
    if live_slices is not None:
        limits = (live_slices,) * stages if isinstance(live_slices, int) else tuple(live_slices)
        if len(limits) != stages:
            raise ScheduleError(f"{len(limits)} limits of live slices for {stages} stages: give one, or one per stage")
        return _held_from_forward(nodes, [1.0] * nodes.num_units, limits, f"{live_slices} live slices")
    text = "unsliced 1F1B" if live_sequences is None else f"{live_sequences:.4g} live sequences"
    sequences = min(stages, len(nodes.plans)) if live_sequences is None else live_sequences
    tokens = [stages / nodes.num_parts * length for plan in nodes.plans for length in plan.lengths]
    limit = sequences * max(plan.sequence_length for plan in nodes.plans) * (1 + 1e-9)  # shares add up to it
    return _held_from_forward(nodes, tokens, (limit,) * stages, text)


def _held_from_forward(nodes: PricedNodes, amounts: list[float], limits: Sequence[float], text: str) -> Holdings:
    nothing = [0.0] * (nodes.num_parts * nodes.num_units)
    of_parts = amounts * nodes.num_parts
    between = [0.0] * (len(nothing) * (nodes.num_kinds - 2))
    gain = of_parts + between + nothing
    after = nothing + between + [-amount for amount in of_parts]
    zeros = (0.0,) * nodes.num_stages
    none = [0.0] * len(gain)
    return Holdings(nodes, tuple(limits), zeros, gain, after, none, none, (0.0,) * nodes.num_parts, text)


def _live_bytes(nodes: PricedNodes, memory: Memory, limit_bytes: float) -> Holdings:
    """Count the bytes of a memory model as the simulator does, except for messages in flight.

    Their number depends on the orders of other stages. Here it is always `OUTSTANDING_SENDS`, of the largest message.
    """
    gain, after, late, working = ([0.0] * nodes.num_nodes for _ in range(4))
    spans = [plan.spans() for plan in nodes.plans]
    for part in range(nodes.num_parts):
        # F and B of a part have one order in every schedule; W are counted in the order of their B
        order = [nodes.node(kind, part, unit) for kind in range(nodes.num_kinds) for unit in nodes.order_of_kind[kind]]
        actions = [nodes.action(node) for node in order]
        gained, changed, before, twice = changes_of(actions, needed_by(actions, False, spans), spans, memory)
        for index, (node, action) in enumerate(zip(order, actions, strict=True)):
            start, stop = spans[action.micro_batch_id][action.slice_id]
            is_whole = len(spans[action.micro_batch_id]) == 1
            gain[node], after[node], late[node] = gained[index], changed[index], before[index]
            working[node] = memory.working_bytes(part, stop - start, start, is_whole) - twice[index]
    # parameters, and the messages of each link to another stage
    owners = nodes.stage_of_part
    of_stages = [[part for part, k in enumerate(owners) if k == stage_id] for stage_id in range(nodes.num_stages)]
    base = [float(memory.process_bytes + memory.static_bytes(*parts)) for parts in of_stages]
    for part, stage_id in enumerate(owners):
        if part > 0 and owners[part - 1] != stage_id:
            largest = max(length for plan in nodes.plans for length in plan.lengths)
            base[stage_id] += OUTSTANDING_SENDS * memory.sent_bytes(part, largest)
    gradients_of = [float(memory.gradient_bytes(part)) for part in range(nodes.num_parts)]
    if owners[0] == owners[-1]:  # one stage has both ends, and a tied matrix once
        gradients_of[0] += memory.gradient_bytes(0, nodes.num_parts - 1) - gradients_of[0] - gradients_of[-1]
    limits, text = (limit_bytes,) * nodes.num_stages, f"{limit_bytes:.4g} bytes"
    return Holdings(nodes, limits, tuple(base), gain, after, late, working, tuple(gradients_of), text, memory)
