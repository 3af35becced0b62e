"""Proof that a schedule can run: every rule, checked for all computations at once."""

from __future__ import annotations

import numpy as np

from .nodes import BACKWARD, FORWARD, Nodes
from .schedule import Schedule


def can_run(schedule: Schedule) -> bool:
    """Return whether a schedule keeps all rules that `validate` names."""
    return (
        is_ordered(schedule)
        and _keeps_link_orders(schedule.nodes)
        and len(schedule.nodes.run_order()) == schedule.nodes.num_nodes
    )


def is_ordered(schedule: Schedule) -> bool:
    """Return whether all computations are there, in an order that stages can run as far as each part is concerned."""
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
    senders = np.flatnonzero(nodes.peers >= 0)  # in the order in which they send
    takers = nodes.outputs[senders]
    # a link: computation, part and both stages; within it, the takers of what is sent must come in rising order
    link = np.stack([nodes.kind[senders], nodes.part[senders], nodes.stage[senders], nodes.peers[senders]])
    by_link = np.lexsort((senders, *link))
    same_link = (np.diff(link[:, by_link], axis=1) == 0).all(axis=0)
    return bool((np.diff(takers[by_link]) > 0)[same_link].all())
