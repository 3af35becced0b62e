"""What all ranks found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.verify.stage import Finding

_SHOWN = 5


class VerifyError(ValueError):
    """Slices give another result than whole sequences; the text names the first layer that differs."""


@dataclass(frozen=True)
class Report:
    """The findings of all ranks, in the order of the layers, and what was checked."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    num_layers: int
    in_fp32_too: int
    plan: SlicePlan | None

    @classmethod
    def of(cls, told: Sequence[tuple[list[Finding], list[str], int, int, SlicePlan | None]], replicas: int = 1) -> Report:
        """Args:
        told: by each rank: findings, notes, layers that were checked, of these in fp32 too, the plan.
        replicas: ranks with the same layers: replicas and tensor-parallel peers.
        """
        first: dict[tuple[int, str], Finding] = {}
        for findings, *_ in told:
            for finding in findings:
                first.setdefault((finding.layer_id, finding.layer), finding)
        ordered = tuple(first[key] for key in sorted(first))
        notes = tuple(dict.fromkeys(note for _, notes, *_ in told for note in notes))
        plan: Any = next((one[4] for one in told if one[4] is not None), None)
        return cls(ordered, notes, sum(t[2] for t in told) // replicas, sum(t[3] for t in told) // replicas, plan)

    def __str__(self) -> str:
        if self.plan is None:
            return "verify: nothing to compare, every sequence runs in one slice"
        slices = f"{self.plan.num_slices} slices of a sequence of {self.plan.sequence_length} tokens"
        if self.findings:
            head = f"verify: {slices} do not give what the whole sequence gives:"
            lines = [str(finding) for finding in self.findings[:_SHOWN]]
            if len(self.findings) > _SHOWN:
                lines.append(f"and {len(self.findings) - _SHOWN} more layers")
            tail = ["the first layer is the one to mend; the loss of such a run is not that of the model"]
            return "\n  ".join([head, *lines, *self.notes]) + f"\n{tail[0]}"
        wide = f" ({self.in_fp32_too} of them in fp32 as well)" if self.in_fp32_too else ""
        head = f"verify: {self.num_layers} layers{wide} and the loss agree, {slices} against the whole"
        return "\n  ".join([head, *self.notes])
