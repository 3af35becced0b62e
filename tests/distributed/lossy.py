"""Losses of one's own: some that add up over slices when they say how, and many that cannot."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engines import IGNORE_INDEX, VOCAB_SIZE
from tests.distributed.faulty_layers import mean_loss, root_loss, shifting_loss
from tests.distributed.tuple_models import WeightedLoss


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp_min(0), VOCAB_SIZE).double()


def rmse(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - one_hot(labels)).square().mean().sqrt()


def batch_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, less the entropy of the mean prediction of the batch."""
    mean = logits.softmax(-1).mean((0, 1))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.5 * (mean * mean.log()).sum()


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token against all others of its row."""
    similar = logits @ logits.transpose(1, 2) / logits.shape[-1]
    places = torch.arange(logits.shape[1]).expand(logits.shape[0], -1)
    return F.cross_entropy(similar.flatten(0, 1), places.flatten())


def centred(logits: Tensor, labels: Tensor) -> Tensor:
    """Mixes tokens: each against the mean over the sequence."""
    return F.cross_entropy((logits - logits.mean(1, keepdim=True)).flatten(0, 1), labels.flatten())


def per_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Another denominator: the mean of the rows' means, with rows masked unlike."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    valid = labels != IGNORE_INDEX
    return (losses.sum(1) / valid.sum(1)).mean()


def smooth(logits: Tensor, labels: Tensor) -> Tensor:
    """Adds how much neighbours differ."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + (logits[:, 1:] - logits[:, :-1]).square().mean()


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
    "rmse": (rmse, None, False),
    "rmse, mean": (rmse, "mean", False),
    "batch entropy": (batch_entropy, None, True),
    "batch entropy, mean": (batch_entropy, "mean", False),
    "contrastive": (contrastive, "mean", False),
    "centred": (centred, None, True),
    "per row": (per_row, None, True),
    "smooth": (smooth, None, True),
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
