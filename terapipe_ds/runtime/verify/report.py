"""What all ranks found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.verify.stage import Finding, StageFindings

_SHOWN = 5


class VerifyError(ValueError):
    """Slices give another result than whole sequences; the text names the first layer that differs."""


@dataclass(frozen=True)
class Told:
    """What one rank tells the others. ``counts``: layers that were checked, in fp32 too, without dropout; losses."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    counts: tuple[int, int, int, int]
    plan: SlicePlan | None

    @classmethod
    def of(cls, stage: StageFindings, plan: SlicePlan | None) -> Told:
        counts = stage.num_layers, stage.in_fp32_too, stage.without_dropout, stage.num_losses
        return cls(tuple(stage.findings), tuple(stage.notes), counts, plan)


@dataclass(frozen=True)
class Report:
    """The findings of all ranks, in the order of the layers, and what was checked."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    num_layers: int
    in_fp32_too: int
    without_dropout: int
    num_losses: int
    plan: SlicePlan | None

    @classmethod
    def of(cls, told: Sequence[Told], copies: int = 1) -> Report:
        """``copies``: ranks with the same layers, replicas and tensor-parallel peers; they count once."""
        first: dict[tuple[int, str], Finding] = {}
        for finding in (finding for one in told for finding in one.findings):
            first.setdefault((finding.layer_id, finding.layer), finding)
        notes = tuple(dict.fromkeys(note for one in told for note in one.notes))
        layers, fp32, still, losses = (sum(one.counts[i] for one in told) // copies for i in range(4))
        plan = next((one.plan for one in told if one.plan is not None), None)
        return cls(tuple(first[key] for key in sorted(first)), notes, layers, fp32, still, losses, plan)

    def __str__(self) -> str:
        if self.plan is None:
            return "verify: nothing to compare, every sequence runs in one slice"
        slices = f"{self.plan.num_slices} slices of a sequence of {self.plan.sequence_length} tokens"
        if self.findings:
            lines = [f"verify: {slices} do not give what the whole sequence gives:"]
            lines += [f"  {finding}" for finding in self.findings[:_SHOWN]]
            if len(self.findings) > _SHOWN:
                lines.append(f"  and {len(self.findings) - _SHOWN} more layers")
        else:
            compared = f"{self.num_layers} layers" + " and the loss" * bool(self.num_losses)
            lines = [f"verify: {compared} give on {slices} what they give on the whole"]
            if self.in_fp32_too:
                lines.append(f"  {self.in_fp32_too} layers in half precision were compared in fp32 as well")
        if self.without_dropout:
            lines.append(f"  {self.without_dropout} layers that draw random numbers were compared in evaluation mode")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
