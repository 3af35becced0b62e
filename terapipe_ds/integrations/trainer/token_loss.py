"""Compute the losses of transformers' Trainer and TRL's SFTTrainer on the last stage, with the sums that TRL logs."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe_ds.attention import SliceStore, active_slice

IGNORED = -100
Sums = dict[int, list[float]]
"""By micro-batch: the sum of entropies, the labels with the largest logit, and the labels that count."""


class TokenLoss:
    """Return the mean loss of the labels that count: cross entropy, smoothed or not, or DFT (arXiv 2508.05629).

    Args:
        smoothing: the share of the loss that all tokens of the vocabulary get, as in `label_smoothing_factor`.
        is_dft: weigh each label's loss by the probability of the label, which counts as a constant.
        keeps_sums: keep what TRL logs, for `take_sums`.
    """

    def __init__(self, smoothing: float = 0.0, is_dft: bool = False, keeps_sums: bool = False) -> None:
        self._smoothing, self._is_dft, self._keeps_sums = smoothing, is_dft, keeps_sums
        self._sums: dict[int, list[Tensor]] = defaultdict(list)
        self.store: SliceStore | None = None  # the engine's: checks and measurements have others, and do not count

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a slice: logits [B, T, vocabulary], labels [B, T] already shifted."""
        flat, target = logits.flatten(0, -2), labels.flatten()
        log_probs = F.log_softmax(flat, dim=-1, dtype=torch.promote_types(flat.dtype, torch.float32))
        counts = target != IGNORED
        losses = F.nll_loss(log_probs, target, ignore_index=IGNORED, reduction="none")
        if self._keeps_sums:
            self._keep(log_probs.detach(), target, counts)
        if self._is_dft:
            losses = losses * torch.exp(-losses).detach()
        elif self._smoothing:
            of_all = -log_probs.mean(-1).masked_fill(~counts, 0.0)
            losses = (1.0 - self._smoothing) * losses + self._smoothing * of_all
        return losses.sum() / counts.sum()

    @torch.no_grad()
    def _keep(self, log_probs: Tensor, target: Tensor, counts: Tensor) -> None:
        active = active_slice()
        if active is None or active.store is not self.store or active.mode == "probe":
            return
        entropy = -(log_probs.exp() * log_probs).sum(-1).masked_fill(~counts, 0.0).sum()
        is_top = (log_probs.argmax(-1) == target) & counts
        self._sums[active.micro_batch_id].append(torch.stack([entropy, is_top.sum(), counts.sum()]).double())

    def take_sums(self) -> Sums:
        """Return the sums of each micro-batch whose loss this rank computed since the last call."""
        sums = {index: torch.stack(parts).sum(0).tolist() for index, parts in self._sums.items() if parts}
        self._sums.clear()
        return sums
