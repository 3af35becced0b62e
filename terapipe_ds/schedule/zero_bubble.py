"""Zero bubble: each backward in two, B for the input gradients, which the stage before waits for, and W for the weight
gradients, which no stage waits for and which therefore fill waits.

The tables are those of `generate`, with one slot for each of F, B and W.
"""

from __future__ import annotations

from collections import deque

from .action import Kind
from .one_f_one_b import Unit, one_f_one_b, seq1f1b, slices_of


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 B0.0 W0.1 W0.0 B1.1 B1.0 W1.1 W1.0
# stage 1  .    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 W0.1 W0.0 B1.1 B1.0 W1.1 W1.0 .
# stage 2  .    .    F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0 W0.1 W0.0 W1.1 W1.0
def zb_h1(num_stages: int, num_slices: tuple[int, ...]) -> list[list[Unit]]:
    """1F1B by whole micro-batches, with W (ZB-H1 of Qi et al., arXiv 2401.10241, figure 3).

    No stage holds more than K micro-batches between their F and their W, as many as stage 0 of `1f1b`:
    before a forward that would be one more, the oldest W runs. After the last forward one W follows each B,
    and the rest stands at the end. Sliced micro-batches run as `1f1b` runs them: each F, B and W is expanded
    to the slices, in reverse for B and W, so that the W of a micro-batch stand in a row.
    """
    whole = one_f_one_b(num_stages, (1,) * len(num_slices))
    return [
        [(kind, m, s) for kind, m, _ in with_weights(order, num_stages) for s in slices_of(kind, num_slices[m])]
        for order in whole
    ]


# stage 0  F0.0 F0.1 F1.0 F1.1 .    .    B0.1 W0.1 B0.0 W0.0 B1.1 W1.1 B1.0 W1.0
# stage 1  .    F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 W0.1 B1.1 W0.0 B1.0 W1.1 W1.0
# stage 2  .    .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 W0.1 B1.0 W0.0 W1.1 W1.0
def seq1f1b_zb(num_stages: int, num_slices: tuple[int, ...]) -> list[list[Unit]]:
    """`seq1f1b` with W (the rule behind the zero-bubble figure of the Seq1F1B authors, arXiv 2406.03488).

    No stage holds more than K + s - 1 slices between their F and their W, as many as stage 0 of `seq1f1b`
    (s of the micro-batch that has most); where `seq1f1b` itself holds more, because a longer micro-batch
    comes, every W that can runs before a forward.
    """
    limit = num_stages + max(num_slices) - 1
    return [with_weights(order, limit) for order in seq1f1b(num_stages, num_slices)]


def with_weights(order: list[Unit], limit: int) -> list[Unit]:
    """Return `order` (F and B) with a W for each B, first in first out.

    Before a forward the oldest ones, until fewer than `limit` units are between F and W; after the last
    forward one after each B; at the end those that are left.
    """
    found: list[Unit] = []
    pending: deque[Unit] = deque()
    live = 0
    ahead = sum(kind is Kind.FORWARD for kind, _, _ in order)
    for kind, m, s in order:
        if kind is Kind.FORWARD:
            while live >= limit and pending:
                found.append(pending.popleft())
                live -= 1
            live, ahead = live + 1, ahead - 1
        found.append((kind, m, s))
        if kind is Kind.BACKWARD:
            pending.append((Kind.WEIGHT, m, s))
            if ahead == 0:
                found.append(pending.popleft())
                live -= 1
    return found + list(pending)
