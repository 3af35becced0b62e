"""How noisy the machine was: figures that tell what a difference of a few per cent is worth. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terapipe_ds.bench.metrics import StepTrace

WORTH_SAYING = 0.02
"""Shares and drifts up to this are in every run."""


def off_core_s(trace: StepTrace) -> float:
    """Return the seconds of a step in which F, B or W ran and another program had the core, of the worst stage.

    That is wall less processor time of pinned processes of one thread each; on accelerators it means nothing.
    """
    lost_s = (sum(max(event.seconds - event.cpu_s, 0.0) for event in events) for events in trace.computations())
    return max(lost_s, default=0.0)


def drift(unsliced_s: Sequence[float], costs: Sequence[Any], sequence_length: int) -> float:
    """Return how many times as long F and B of an unsliced micro-batch took in the turns as when costs were measured.

    Args:
        unsliced_s: per stage, in the turns; see `metrics.unsliced_s`.
        costs: per stage, as measured at the start.
    """
    whole_s = sum(c.forward_s(sequence_length, 0) + c.backward_s(sequence_length, 0) for c in costs)
    return sum(unsliced_s) / float(whole_s)


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the table has to know of this; nothing where the machine was quiet."""
    rows = [row for row in result["runs"] if "error" not in row and not row["replayed"]]
    drifts = {row["accumulation"]: row["drift"] for row in rows if row.get("drift") is not None}
    said = []
    if any(abs(factor - 1) > WORTH_SAYING for factor in drifts.values()):
        each = ", ".join(f"{factor:.3f} with m = {m}" for m, factor in drifts.items())
        said.append(
            "drift: an unsliced micro-batch took so many times as long in the turns as when the costs were measured "
            f"that predictions come from: {each}"
        )
    shares = {row["label"]: row["off_core_s"] / row["step_s"] for row in rows if row.get("off_core_s") is not None}
    worst = max(shares, key=shares.__getitem__, default=None)
    if worst is not None and shares[worst] > WORTH_SAYING:
        said.append(f"busy: other programs had a core for up to {shares[worst]:.1%} of a step ({worst})")
    return said
