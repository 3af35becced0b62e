"""Join the last layer of a model and its cross entropy, so that a slice keeps no logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe_ds.losses.deferred import Add, Tokens, Watch, deferred_cross_entropy, require_known, weighted_sum
from terapipe_ds.losses.head import Head

Labels = Tensor | tuple[Tensor, Tensor] | list[Tensor]


class LinearCrossEntropy:
    """Compute the mean cross entropy of a model whose last layer is linear: the `loss_fn` of a `PipelineModule`.

    Labels are integers [B, T], already shifted, or (labels, mask) with a float mask [B, T] that weighs each token. The
    loss is sum(mask * cross entropy) / sum(mask) over tokens whose label is not `ignore_index`, in fp32 or fp64.

    terapipe_ds leaves the product of the last layer to this loss unless somebody asks for logits. Any other engine
    passes logits.

    Args:
        label_smoothing: the share of the label's weight that is spread evenly over the vocabulary.
        scale: a factor of the logits.
        softcap: logits become softcap * tanh(logits / softcap), after `scale`.

    Raises:
        ValueError: for an option that no loss can have.
    """

    factors: Callable[[Tensor], Tensor] | None = None  # for subclasses, as in `Tokens`

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing = {label_smoothing}: give a number of at least 0 and below 1")
        if not (math.isfinite(scale) and scale != 0.0):
            raise ValueError(f"scale = {scale}: give a finite number other than 0")
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ValueError(f"softcap = {softcap}: give a number above 0, or None")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.scale, self.softcap = scale, softcap

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"

    @property
    def needs_logits(self) -> str:
        """Return why the engine must pass logits, or ""."""
        changed = type(self).__call__ is not LinearCrossEntropy.__call__
        return f"{type(self).__name__} has a __call__() of its own" if changed else ""

    def __call__(self, logits: Tensor, labels: Labels) -> Tensor:
        """Return the loss of logits [B, T, V]. Raises ValueError for labels outside of the vocabulary."""
        targets, weights = self._targets_and_weights(labels, logits.dtype)
        require_known(targets, logits.shape[-1])
        logits = logits.flatten(0, -2).to(weights.dtype) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        if (watch := self._watch_of(labels)) is not None:
            with torch.no_grad():
                log_probs = F.log_softmax(logits, dim=-1)
                watch(slice(None), -(log_probs.exp() * log_probs).sum(-1), log_probs.argmax(-1))
        if self.factors is not None:
            losses = losses * self.factors(losses.detach())
        return weighted_sum(losses, weights)

    def of_hidden(
        self,
        hidden: Tensor,
        labels: Labels,
        head: Head,
        share: float = 1.0,
        add: Add | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Return `share` times the loss of hidden states [B, T, H] before `head`, without logits.

        The value is NaN until the backward has run. `add` takes the gradient of the head's weight, chunk by chunk, in
        place of autograd; `around` is entered for the work in the backward.

        Raises:
            ValueError: head and loss both change the logits.
        """
        if self.scale != 1.0 or self.softcap is not None:
            if head.softcap is not None:
                raise ValueError(f"{self} and the last layer (softcap {head.softcap}) both change the logits: let one")
            head = replace(head, scale=head.scale * self.scale, softcap=self.softcap)
        targets, weights = self._targets_and_weights(labels, hidden.dtype)
        watch = self._watch_of(labels)
        tokens = Tokens(targets, weights * share, self.label_smoothing, add, around, self.factors, watch)
        return deferred_cross_entropy(hidden, head, tokens)

    def _watch_of(self, labels: Labels) -> Watch | None:
        """Return the function of a subclass that gets entropies and largest logits of these labels' tokens."""

    def slice_weight(self, labels: Labels) -> float:
        """Return how much the labels of a slice count in the loss of their sequence."""
        _, mask = targets_and_mask(labels, self.ignore_index)
        return float(mask.sum(dtype=torch.float64))

    def _targets_and_weights(self, labels: Labels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a label in the vocabulary and the share in the loss for each token, flat."""
        targets, mask = targets_and_mask(labels, self.ignore_index)
        weights = mask.flatten().to(torch.promote_types(dtype, torch.float32))
        return targets.flatten(), weights / weights.sum()


def targets_and_mask(labels: Labels, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return labels that are in the vocabulary everywhere, and the weight of each token.

    Raises:
        ValueError: the labels have another form than `LinearCrossEntropy` takes.
    """
    if torch.is_tensor(labels):
        targets = labels.long()  # in uint8 the index -100 would be the label 156
        valid = targets != ignore_index
        return targets * valid, valid
    if len(labels) != 2 or labels[0].shape != labels[1].shape:
        shapes = [tuple(each.shape) for each in labels]
        raise ValueError(f"labels must be [B, T], or (labels, mask) of one shape, got {shapes}")
    targets, mask = labels[0].long(), labels[1]
    valid = (mask != 0) & (targets != ignore_index)
    return targets * valid, mask.where(valid, 0)
