"""Losses of one's own, some of which cannot add up over slices. `tests/zoo/losses.py` has many more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.faulty_layers import mean_loss, root_loss, shifting_loss
from tests.distributed.tuple_models import WeightedLoss


def advantages(logits: Tensor, labels: Tensor) -> Tensor:
    """A policy's loss, whose weights cancel out over the batch: next to zero, with gradients that are not."""
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    sign = torch.ones_like(chosen)
    sign[1::2] = -1
    return (sign * (chosen - chosen.detach())).mean()


class Plain(nn.Module):
    """Cross entropy as a module of one's own."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def masked_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Megatron's labels: (labels, loss_mask)."""
    target, mask = labels
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


# name -> (loss_fn, loss_reduction or None, with labels masked)
REFUSED: dict[str, tuple[Any, str | None, bool]] = {
    "root": (root_loss, None, True),
    "shifting": (shifting_loss, None, True),
    "mean over all": (mean_loss, None, True),
    "mean over valid called mean": (Plain(), "mean", True),
    "mean over valid called sum": (Plain(), "sum", True),
}
RIGHT: dict[str, tuple[Any, str | None, bool]] = {
    "module": (Plain(), None, True),
    "mean over all, said": (mean_loss, "mean", True),
    "weights": (WeightedLoss(), None, False),
    "advantages": (advantages, "mean", False),
}
