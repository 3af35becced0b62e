"""Compute the losses of transformers' Trainer and TRL's SFTTrainer on the last stage, with the sums that TRL logs."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from terapipe_ds.attention import SliceStore, active_slice
from terapipe_ds.losses.deferred import Watch
from terapipe_ds.losses.linear_cross_entropy import Labels, LinearCrossEntropy

IGNORED = -100
Sums = dict[int, list[float]]
"""By micro-batch: the sum of entropies, the labels with the largest logit, and the labels that count."""


class TokenLoss(LinearCrossEntropy):
    """Return the mean loss of the labels that count: cross entropy, smoothed or not, or DFT (arXiv 2508.05629).

    Args:
        smoothing: the share of the loss that all tokens of the vocabulary get, as in `label_smoothing_factor`.
        is_dft: weigh each label's loss by the probability of the label, which counts as a constant.
        keeps_sums: keep what TRL logs, for `take_sums`.
    """

    def __init__(self, smoothing: float = 0.0, is_dft: bool = False, keeps_sums: bool = False) -> None:
        super().__init__(ignore_index=IGNORED)
        self.label_smoothing, self.is_of_model = smoothing, not (smoothing or is_dft)
        self.factors = (lambda losses: torch.exp(-losses)) if is_dft else None  # probabilities of the labels
        self._keeps_sums, self._sums = keeps_sums, defaultdict[int, list[Tensor]](list)
        self.store: SliceStore | None = None  # the engine's: checks and measurements have others, and do not count

    def _watch_of(self, labels: Labels) -> Watch | None:
        """Return a function that keeps the sums of the active slice; None if nobody wants them."""
        active = active_slice()
        is_counted = active is not None and active.store is self.store and active.mode != "probe"
        if active is None or not torch.is_tensor(labels) or not (self._keeps_sums and is_counted):
            return None
        target, parts = labels.flatten(), self._sums[active.micro_batch_id]

        def keep(span: slice, entropies: Tensor, top: Tensor) -> None:
            counts = target[span] != IGNORED
            is_top = (top == target[span]) & counts
            parts.append(torch.stack([entropies.masked_fill(~counts, 0.0).sum(), is_top.sum(), counts.sum()]).double())

        return keep

    def take_sums(self) -> Sums:
        """Return the sums of each micro-batch whose loss this rank computed since the last call."""
        sums = {index: torch.stack(parts).sum(0).tolist() for index, parts in self._sums.items() if parts}
        self._sums.clear()
        return sums
