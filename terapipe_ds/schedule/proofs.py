"""Prove that a schedule can run: check every rule for all computations at once.

A stage may have a limited number of messages in flight over each link, its budget; beyond it, the stage waits for the
oldest one. This module proves, for the schedule at hand, that no budget closes a circle of waiting stages.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from terapipe_ds.schedule.clock import BACKWARD, FORWARD
from terapipe_ds.schedule.nodes import Nodes, Numbers
from terapipe_ds.schedule.schedule import Schedule

OUTSTANDING_SENDS = 8
"""Messages that may be on their way over each link in each direction, unless a schedule needs more of them."""


def can_run(schedule: Schedule) -> bool:
    """Return whether a schedule keeps all rules that `validate` names."""
    return (
        is_ordered(schedule)
        and _keeps_link_orders(schedule.nodes)
        and len(schedule.nodes.run_order()) == schedule.nodes.num_nodes
    )


def is_ordered(schedule: Schedule) -> bool:
    """Return whether all computations are there, in an order that each part by itself allows."""
    return _is_complete(schedule) and _keeps_stage_orders(schedule.nodes)


def _is_complete(schedule: Schedule) -> bool:
    """Return whether every F and B is there once, and no W twice, each at a place of its part."""
    num_parts, places = schedule.num_parts, {*np.ndindex(schedule.num_stages, schedule.chunks_per_stage)}
    if (
        len(schedule.orders) != schedule.num_stages
        or len(schedule.num_slices) != schedule.num_micro_batches
        or set(schedule.placement) != places
        or set(schedule.placement.values()) != set(range(num_parts))
        or not schedule.nodes.are_in_range
    ):
        return False
    nodes = schedule.nodes
    chunks = range(schedule.chunks_per_stage)
    part_at = np.array([[schedule.placement[k, c] for c in chunks] for k in range(schedule.num_stages)])
    in_chunks = (nodes.chunk >= 0) & (nodes.chunk < schedule.chunks_per_stage)
    if not in_chunks.all() or (part_at[nodes.stage, nodes.chunk] != nodes.part).any():
        return False
    is_there = nodes.at < nodes.num_nodes
    kinds_alone = not schedule.forward_only or not is_there[BACKWARD:].any()
    all_there = is_there[FORWARD].all() and (schedule.forward_only or is_there[BACKWARD].all())
    is_once = is_there.sum() == nodes.num_nodes
    return bool(kinds_alone and all_there and is_once and _has_one_place(nodes))


def _has_one_place(nodes: Nodes) -> bool:
    """Return whether the units of a micro-batch run at one place of each part."""
    place = nodes.stage * (nodes.chunk.max(initial=0) + 1) + nodes.chunk
    first = np.full((nodes.num_parts, len(nodes.slices_of)), -1)
    first[nodes.part, nodes.micro_batch] = place
    return bool((first[nodes.part, nodes.micro_batch] == place).all())


def _keeps_stage_orders(nodes: Nodes) -> bool:
    """Return whether F come before B before W, F in slice order, B in reverse; all of a unit are on one stage."""
    forward, backward, weight = nodes.at
    within = np.diff(np.repeat(np.arange(len(nodes.slices_of)), nodes.slices_of)) == 0  # of one micro-batch
    has_backward, has_weight = backward < nodes.num_nodes, weight < nodes.num_nodes
    return bool(
        (np.diff(forward, axis=1) > 0)[:, within].all()
        and ((np.diff(backward, axis=1) < 0) | ~has_backward[:, 1:])[:, within].all()
        and (backward > forward)[has_backward].all()
        and (weight > backward)[has_weight].all()
    )


def _keeps_link_orders(nodes: Nodes) -> bool:
    """Return whether each link's messages are awaited in the order in which they are sent."""
    return all((np.diff(nodes.outputs[senders]) > 0).all() for senders in senders_by_link(nodes))


def senders_by_link(nodes: Nodes) -> list[Numbers]:
    """Return, for each link, the nodes whose results go over it, in the order in which they send.

    A link is a kind of computation, a part and two stages.
    """
    senders = np.flatnonzero(nodes.peers >= 0)
    link = np.stack([nodes.kind[senders], nodes.part[senders], nodes.stage[senders], nodes.peers[senders]])
    by_link = np.lexsort((senders, *link))
    ends = np.flatnonzero((np.diff(link[:, by_link], axis=1) != 0).any(axis=0)) + 1
    return np.split(senders[by_link], ends) if len(senders) else []


# -- budgets of messages in flight


def budget_of_sends(schedule: Schedule, wanted: int = OUTSTANDING_SENDS) -> int:
    """Return the least budget per link, at least `wanted`, with which a valid schedule can still run.

    If the budget is the number of messages on the busiest link, no stage ever waits. A larger budget only removes
    waits. So the answer exists, and bisection yields it.
    """
    most = max(map(len, senders_by_link(schedule.nodes)), default=0)
    if wanted >= most or can_run_within(schedule, wanted):
        return wanted
    return bisect_left(range(most), True, lo=wanted + 1, key=lambda budget: can_run_within(schedule, budget))


def can_run_within(schedule: Schedule, budget: int) -> bool:
    """Return whether all stages reach their ends if each waits while more than `budget` messages are on a link.

    The proof assumes the least of the receiver that the engine does: it takes a message in once it has reached the
    computation that needs it, and has finished the one before with all its own waits. Messages that travel earlier make
    no other computation wait. So each wait is for a computation, and a stage is stuck exactly if it waits for one that
    never comes, whatever the times.
    """
    nodes = schedule.nodes
    return len(nodes.run_order(_awaited_after(nodes, budget).tolist())) == nodes.num_nodes


def _awaited_after(nodes: Nodes, budget: int) -> Numbers:
    """Return per node the node that must be over before its stage goes on, once its own message is sent; or none.

    The receiver must have taken in the message `budget` places earlier. It reaches that point when the computation
    before the taker is over.
    """
    awaited = np.full(nodes.num_nodes, nodes.num_nodes)
    for senders in senders_by_link(nodes):
        takers = nodes.outputs[senders[: max(0, len(senders) - budget)]]
        is_first = takers == nodes.first[nodes.stage[takers]]
        awaited[senders[budget:]] = np.where(is_first, nodes.num_nodes, takers - 1)
    return awaited
