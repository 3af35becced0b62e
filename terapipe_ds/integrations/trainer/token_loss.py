"""Compute the losses of transformers' Trainer and TRL's SFTTrainer on the last stage, with the sums that TRL logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe_ds.attention import SliceStore, active_slice
from terapipe_ds.losses import Head
from terapipe_ds.losses.deferred import Add, Tokens, Watch, deferred_cross_entropy

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
        keep = self._keep_of(target)
        if keep is not None:
            with torch.no_grad():
                keep(slice(None), -(log_probs.exp() * log_probs).sum(-1), log_probs.argmax(-1))
        if self._is_dft:
            losses = losses * _confidence(losses.detach())
        elif self._smoothing:
            of_all = -log_probs.mean(-1).masked_fill(~counts, 0.0)
            losses = (1.0 - self._smoothing) * losses + self._smoothing * of_all
        return losses.sum() / counts.sum()

    def of_hidden(
        self,
        hidden: Tensor,
        labels: Tensor,
        head: Head,
        share: float = 1.0,
        add: Add | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Return `share` times the same loss, of hidden states before `head`, without logits (`LinearCrossEntropy`)."""
        target = labels.flatten()
        counts = target != IGNORED
        weights = counts.to(torch.promote_types(hidden.dtype, torch.float32))
        tokens = Tokens(
            target.where(counts, 0),
            weights * (share / weights.sum()),
            self._smoothing,
            add,
            around,
            factors=_confidence if self._is_dft else None,
            watch=self._keep_of(target),
        )
        return deferred_cross_entropy(hidden, head, tokens)

    def _keep_of(self, target: Tensor) -> Watch | None:
        """Return a function that keeps the sums of the active slice; None if nobody wants them."""
        active = active_slice()
        is_counted = active is not None and active.store is self.store and active.mode != "probe"
        if active is None or not (self._keeps_sums and is_counted):
            return None
        parts, counts = self._sums[active.micro_batch_id], target != IGNORED

        def keep(span: slice, entropies: Tensor, top: Tensor) -> None:
            entropy = entropies.masked_fill(~counts[span], 0.0).sum()
            is_top = (top == target[span]) & counts[span]
            parts.append(torch.stack([entropy, is_top.sum(), counts[span].sum()]).double())

        return keep

    def take_sums(self) -> Sums:
        """Return the sums of each micro-batch whose loss this rank computed since the last call."""
        sums = {index: torch.stack(parts).sum(0).tolist() for index, parts in self._sums.items() if parts}
        self._sums.clear()
        return sums


def _confidence(losses: Tensor) -> Tensor:
    """Return the probabilities of labels with these losses."""
    return torch.exp(-losses)
