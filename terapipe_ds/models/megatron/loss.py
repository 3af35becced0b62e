"""Compute the loss of logits whose vocabulary tensor-parallel ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from torch import Tensor

from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.losses.deferred import weighted_sum
from terapipe_ds.losses.linear_cross_entropy import Labels


class VocabParallelLoss(LinearCrossEntropy):
    """Compute the loss of a `MegatronGPT`: the mean over the tokens that count, as Megatron-LM's GPT has it.

    Labels are [B, T] int64 with -100 for tokens that do not count, or (labels, loss_mask) with a float mask [B, T] that
    weighs each token. The loss is sum(mask * cross entropy) / sum(mask) over a micro-batch; `slice_weight` tells the
    engine the share of a slice in it.

    Args:
        cross_entropy: "exact": computed in the dtype of fp64 logits, in fp32 otherwise. "megatron": megatron-core's
            own, always in fp32.
    """

    def __init__(self, cross_entropy: str = "exact") -> None:
        if cross_entropy not in ("exact", "megatron"):
            raise ValueError(f'cross_entropy={cross_entropy!r}: give "exact" or "megatron"')
        super().__init__()
        self.cross_entropy = cross_entropy
        self.group: Callable[[], Any] = lambda: None  # of the ranks that share logits, once the module has it

    @property
    def needs_logits(self) -> str:
        """Return why the engine must pass logits, or ""."""
        if type(self).__call__ is not VocabParallelLoss.__call__:
            return f"{type(self).__name__} has a __call__() of its own"
        return 'VocabParallelLoss("megatron") takes them' if self.cross_entropy == "megatron" else ""

    def __call__(self, logits: Tensor, labels: Labels) -> Tensor:
        """Return the loss of logits [B, T, V / tp]."""
        if self.cross_entropy == "megatron":
            targets, weights = self._targets_and_weights(labels, logits.dtype)
            # megatron-core has tokens first; it works in place, and somebody may have asked for the logits
            first = logits.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            losses = vocab_parallel_cross_entropy(first, targets.view(logits.shape[:2]).t().contiguous())
            return weighted_sum(losses.t().flatten(), weights)
        group = self.group()
        whole = logits if group is None else gather_from_tensor_model_parallel_region(logits, group)
        return super().__call__(whole, labels)
