"""Time orders without arrays, so that a schedule is generated without numpy."""

from __future__ import annotations

from collections.abc import Sequence

from terapipe_ds.schedule.action import Kind

FORWARD, BACKWARD, WEIGHT = range(3)
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
CODES = {kind: code for code, kind in enumerate(KINDS)}
"""Computation -> its number in `Nodes.kind`."""


def end_of_orders(
    orders: Sequence[Sequence[int]],
    inputs: Sequence[int],
    seconds: Sequence[float],
    sends: Sequence[float],
    links: Sequence[int],
) -> float:
    """Return the end of the last node of some orders; infinity where stages wait for one another for ever.

    Per node: the node whose result it takes (`len(seconds)`: none), its seconds, the seconds of its message, and the
    link that carries the message, one at a time (-1: none).
    """
    arrivals = [-1.0] * len(seconds) + [0.0]
    link_free = [0.0] * (1 + max(links))
    free, at = [0.0] * len(orders), [0] * len(orders)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        stage_id = ready.pop()
        order, now = orders[stage_id], free[stage_id]
        index = at[stage_id]
        while index < len(order):
            node = order[index]
            arrival = arrivals[inputs[node]]
            if arrival < 0:  # the stage waits until another one has run that node
                waiting.setdefault(inputs[node], []).append(stage_id)
                break
            now = (arrival if arrival > now else now) + seconds[node]
            link = links[node]
            if link >= 0:
                link_free[link] = arrivals[node] = max(now, link_free[link]) + sends[node]
            else:
                arrivals[node] = now
            if node in waiting:
                ready += waiting.pop(node)
            index += 1
        free[stage_id], at[stage_id] = now, index
    return max(free) if at == list(map(len, orders)) else float("inf")
