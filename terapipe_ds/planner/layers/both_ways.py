"""Time the work that a bidirectional pipeline (Chimera) does per batch on top of its makespan and a plain one does not.

Stages k and K-1-k hold the same two parts, k and K-1-k. After its last backward

    the two sum the gradients of both parts: each sends and receives all their bytes, at the same time
    each steps both parts, and reduces both over its replicas; a stage of a plain pipeline has one part

A batch waits for the slowest pair; a plain pipeline waits for the slowest part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from terapipe_ds.costs.profile import LinkSample
from terapipe_ds.planner.model_memory import ITEMSIZE


def both_ways_s(gradient_bytes: Sequence[float], bytes_per_s: float, step_s: Sequence[float] = ()) -> float:
    """Return the extra seconds per batch of a bidirectional pipeline over a plain one, without the makespans.

    Args:
        gradient_bytes: of each part, on one rank.
        bytes_per_s: of a link in one direction, while the other direction is as busy.
        step_s: of each part, the optimizer step and the reduction over replicas; empty: not known, and not counted.
    """
    # stage k and its mirror image hold the same two parts, and wait for each other
    steps = step_s or [0.0] * len(gradient_bytes)
    pairs = zip(gradient_bytes, reversed(gradient_bytes), steps, reversed(steps), strict=True)
    return max((g + h) / bytes_per_s + a + b for g, h, a, b in pairs) - max(steps)


def link_bytes_per_s(links: Iterable[LinkSample]) -> float | None:
    """Return bytes per second of the slowest measured link; None where samples have no sizes in bytes."""
    by_part: dict[int | None, list[LinkSample]] = {}
    for link in links:
        if link.num_bytes is not None:
            by_part.setdefault(link.part_id, []).append(link)
    return min((line_of(samples)[0] for samples in by_part.values()), default=None)


def line_of(links: Iterable[LinkSample]) -> tuple[float, float]:
    """Return bytes per second and the latency of a straight line through the smallest message and the largest.

    Where seconds fall as bytes grow, or the line would start below zero, it goes from zero to the largest message.
    """
    points = sorted((link.num_bytes, link.send_s) for link in links if link.num_bytes is not None)
    (low_bytes, low_s), (high_bytes, high_s) = points[0], points[-1]
    # a noisy small message must not make the link slower than its largest message
    rises = high_bytes > low_bytes and high_s > low_s
    rate = max(high_bytes / high_s, (high_bytes - low_bytes) / (high_s - low_s) if rises else 0.0)
    return rate, max(0.0, high_s - high_bytes / rate)


def gradient_itemsize(dtype: str) -> int:
    """Return the bytes of a parameter's gradient. DeepSpeed accumulates the gradients of bfloat16 in fp32."""
    return 4 if dtype == "bfloat16" else ITEMSIZE.get(dtype, 4)
