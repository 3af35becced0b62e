"""Put what all ranks found into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from terapipe_ds.attention import PlainAttentionError
from terapipe_ds.runtime.verify.cut import Cut

_SHOWN = 5


class VerifyError(ValueError):
    """Slices give another result than whole sequences; the text names the first layer that differs."""


@dataclass(frozen=True, order=True)
class Finding:
    """A layer, or the loss, that differs; or one that `raised` an error of that class."""

    layer_id: int
    layer: str
    problem: str
    raised: str = ""

    @property
    def is_of_the_cut(self) -> bool:
        """Whether it may be that the layer cannot run on so few tokens, and is right where it can."""
        return self.raised not in ("", PlainAttentionError.__name__)

    def __str__(self) -> str:
        return f"{self.layer}: {self.problem}"


@dataclass
class Findings:
    """What one rank found, or all ranks.

    Args:
        without_dropout: how many layers draw random numbers and were compared in evaluation mode.
        loss_waits: the loss could not be compared on this batch, but may be on another.
        cut: what was looked at; None where every sequence runs in one slice.
    """

    num_layers: int = 0
    num_losses: int = 0
    without_dropout: int = 0
    loss_waits: bool = False
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cut: Cut | None = None

    @classmethod
    def of_all(cls, ranks: Sequence[Findings], copies: int) -> Findings:
        """Join the findings of all ranks, of which `copies` (replicas, tensor-parallel peers) have the same layers."""
        num_losses = max(rank.num_losses for rank in ranks)
        by_layer = {(one.layer_id, one.layer): one for rank in reversed(ranks) for one in reversed(rank.findings)}
        return cls(
            sum(rank.num_layers for rank in ranks) // copies,
            num_losses,
            sum(rank.without_dropout for rank in ranks) // copies,
            not num_losses and any(rank.loss_waits for rank in ranks),
            sorted(by_layer.values()),
            list(dict.fromkeys(note for rank in ranks for note in rank.notes)),
            next((rank.cut for rank in ranks if rank.cut is not None), None),
        )


@dataclass(frozen=True)
class Report:
    """What was looked at and what was found; `only_loss`: layers had their turn with an earlier batch."""

    found: Findings
    with_layers: bool = True
    only_loss: bool = False
    took_s: float = 0.0

    def __str__(self) -> str:
        """One finding a line; one line where there are none."""
        found, cut = self.found, self.found.cut
        if cut is None:
            return "verify: nothing to compare, every sequence runs in one slice"
        if not found.findings:
            return "; ".join([self._covered(cut), *found.notes])
        counted = f" (tokens count from {cut.start} on)" if cut.start else ""
        lines = [f"verify: {cut} do not give what the whole sequence gives{counted}:"]
        lines += [f"  {finding}" for finding in found.findings[:_SHOWN]]
        if len(found.findings) > _SHOWN:
            lines.append(f"  and {len(found.findings) - _SHOWN} more layers")
        return "\n".join([*lines, *(f"  {note}" for note in found.notes)])

    def _covered(self, cut: Cut) -> str:
        compared = [f"{self.found.num_layers} layers"] * self.with_layers + ["the loss"] * bool(self.found.num_losses)
        gives = "agree" if self.with_layers else "agrees"
        what = f"{' and '.join(compared)} {gives} on {cut} with the whole, " if compared else ""
        text = f"verify: {what}{self.took_s:.2g} s"
        if self.found.without_dropout:
            text += f"; {self.found.without_dropout} layers that draw random numbers were compared in evaluation mode"
        return text if self.with_layers or self.only_loss else f"{text}; layers were not compared"
