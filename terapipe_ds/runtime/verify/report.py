"""What all ranks found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terapipe_ds.runtime.verify.cut import Cut
from terapipe_ds.runtime.verify.stage import Finding, StageFindings

_SHOWN = 5


class VerifyError(ValueError):
    """Slices give another result than whole sequences; the text names the first layer that differs."""


@dataclass(frozen=True)
class Told:
    """What one rank tells the others. ``counts``: layers that were checked, in fp32 too, without dropout; losses.
    ``loss_waits``: another batch may tell more of the loss."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    counts: tuple[int, int, int, int]
    cut: Cut | None
    loss_waits: bool = False

    @classmethod
    def of(cls, stage: StageFindings, cut: Cut | None) -> Told:
        counts = stage.num_layers, stage.in_fp32_too, stage.without_dropout, stage.num_losses
        return cls(tuple(stage.findings), tuple(stage.notes), counts, cut, stage.loss_waits)


@dataclass(frozen=True)
class Report:
    """The findings of all ranks, in the order of the layers, and what was looked at."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    num_layers: int
    in_fp32_too: int
    without_dropout: int
    num_losses: int
    cut: Cut | None
    with_layers: bool = True
    took_s: float = 0.0
    only_loss: bool = False  # layers had their turn with an earlier batch
    loss_waits: bool = False  # no rank could compare it on this batch; another may do

    @classmethod
    def of(cls, told: Sequence[Told], copies: int = 1, with_layers: bool = True, took_s: float = 0.0) -> Report:
        """``copies``: ranks with the same layers, replicas and tensor-parallel peers; they count once."""
        first: dict[tuple[int, str], Finding] = {}
        for finding in (finding for one in told for finding in one.findings):
            first.setdefault((finding.layer_id, finding.layer), finding)
        notes = tuple(dict.fromkeys(note for one in told for note in one.notes))
        layers, fp32, still = (sum(one.counts[i] for one in told) // copies for i in range(3))
        losses = max((one.counts[3] for one in told), default=0)
        waits = not losses and any(one.loss_waits for one in told)
        cut = next((one.cut for one in told if one.cut is not None), None)
        findings = tuple(first[key] for key in sorted(first))
        return cls(findings, notes, layers, fp32, still, losses, cut, with_layers, took_s, loss_waits=waits)

    @property
    def fell_short(self) -> bool:
        """Whether something was not compared that should be."""
        return bool(self.notes)

    def __str__(self) -> str:
        """Findings one a line; one line where there are none."""
        if self.cut is None:
            return "verify: nothing to compare, every sequence runs in one slice"
        if not self.findings:
            return "; ".join([self._covered(), *self.notes])
        counted = f" (tokens count from {self.cut.start} on)" if self.cut.start else ""
        lines = [f"verify: {self.cut} do not give what the whole sequence gives{counted}:"]
        lines += [f"  {finding}" for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"  and {len(self.findings) - _SHOWN} more layers")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _covered(self) -> str:
        compared = [f"{self.num_layers} layers"] * self.with_layers + ["the loss"] * bool(self.num_losses)
        gives = "agree" if self.with_layers else "agrees"
        what = f"verify: {' and '.join(compared)} {gives} on {self.cut} with the whole, " if compared else "verify: "
        said = [f"{what}{self.took_s:.2g} s"]
        if self.in_fp32_too:
            said.append(f"{self.in_fp32_too} layers in half precision were compared in fp32 as well")
        if self.without_dropout:
            said.append(f"{self.without_dropout} layers that draw random numbers were compared in evaluation mode")
        if not self.with_layers and not self.only_loss:
            said.append("layers were not compared")
        return "; ".join(said)
