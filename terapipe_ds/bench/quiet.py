"""How quiet the machine was: figures by which a reader tells what a difference of a few per cent is worth.

Without torch, as ``figures``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terapipe_ds.bench.figures import StepTrace

WORTH_SAYING = 0.02
"""Shares and drifts up to this are in every run."""


def off_core_s(trace: StepTrace) -> float:
    """Seconds of a step in which F, B or W ran and another program had the core: wall less processor time of the
    process, of the stage that lost most. Pinned processes of one thread each; on accelerators it means nothing."""
    return max(
        (sum(max(e[5] - e[4] - e[6], 0.0) for e in trace.computations(k)) for k in range(len(trace.stages))),
        default=0.0,
    )


def drift(unsliced_s: Sequence[float], costs: Sequence[Any], sequence_length: int) -> float:
    """How many times as long the F and B of an unsliced micro-batch took in the turns as when costs were measured.

    Args:
        unsliced_s: per stage, in the turns; see ``figures.unsliced_s``.
        costs: per stage, as measured at the start.
    """
    whole_s = sum(c.forward_s(sequence_length, 0) + c.backward_s(sequence_length, 0) for c in costs)
    return sum(unsliced_s) / float(whole_s)


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What of this a reader of the table has to know; nothing where the machine was quiet."""
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
