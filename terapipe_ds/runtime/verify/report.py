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
    """Name a layer, or the loss, that differs; or one that `raised` an error of that class."""

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
    """Collect what one rank found, or all ranks, and put it into words."""

    with_layers: bool = True  # layers are compared, not the loss alone
    cut: Cut | None = None  # None where every sequence runs in one slice
    num_layers: int = 0
    num_losses: int = 0
    without_dropout: int = 0  # layers that draw random numbers, compared in evaluation mode
    loss_waits: bool = False  # the loss could not be compared on this batch, but may be on another
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_all(cls, ranks: Sequence[Findings], copies: int) -> Findings:
        """Join the findings of all ranks, of which `copies` (replicas, tensor-parallel peers) have the same layers."""
        num_losses = max(rank.num_losses for rank in ranks)
        by_layer = {(one.layer_id, one.layer): one for rank in reversed(ranks) for one in reversed(rank.findings)}
        return cls(
            ranks[0].with_layers,
            next((rank.cut for rank in ranks if rank.cut is not None), None),
            sum(rank.num_layers for rank in ranks) // copies,
            num_losses,
            sum(rank.without_dropout for rank in ranks) // copies,
            not num_losses and any(rank.loss_waits for rank in ranks),
            sorted(by_layer.values()),
            list(dict.fromkeys(note for rank in ranks for note in rank.notes)),
        )

    def text(self, took_s: float, only_loss: bool = False) -> str:
        """Return one finding a line; one line of what was covered where there are none."""
        cut = self.cut
        if cut is None:
            return "verify: nothing to compare, every sequence runs in one slice"
        if not self.findings:
            compared = [f"{self.num_layers} layers"] * self.with_layers + ["the loss"] * bool(self.num_losses)
            verb = "agree" if self.with_layers else "agrees"
            what = f"{' and '.join(compared)} {verb} on {cut} with the whole, " if compared else ""
            random = f"{self.without_dropout} layers that draw random numbers were compared in evaluation mode"
            facts = [f"verify: {what}{took_s:.2g} s", *[random] * bool(self.without_dropout)]
            facts += ["layers were not compared"] * (not self.with_layers and not only_loss)
            return "; ".join([*facts, *self.notes])
        counted = f" (tokens count from {cut.start} on)" if cut.start else ""
        head = f"verify: {cut} do not give what the whole sequence gives{counted}:"
        hidden = len(self.findings) - _SHOWN
        more = [f"and {hidden} more layers"] * (hidden > 0)
        return "\n  ".join([head, *map(str, self.findings[:_SHOWN]), *more, *self.notes])
