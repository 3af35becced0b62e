"""Compute the mean cross entropy of logits whose vocabulary the tensor-parallel ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from terapipe_ds.models.gpt import IGNORE_INDEX, gpt_loss
from terapipe_ds.models.hugging_face.tensor_parallel.divide import TensorRanks


class VocabParallelLoss:
    """Return what `gpt_loss` returns for logits of the whole vocabulary; `ranks` tells the ranks once they exist."""

    def __init__(self, ranks: Callable[[], TensorRanks | None]) -> None:
        self._ranks = ranks

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        ranks = self._ranks()
        if ranks is None or logits.shape[-1] == ranks.vocab_size:
            return gpt_loss(logits, labels)
        losses = _CrossEntropy.apply(logits, labels, ranks.first_token, ranks.group)
        return losses.sum() / (labels != IGNORE_INDEX).sum()


class _CrossEntropy(torch.autograd.Function):
    """Use two collectives: the maximum, then the sum of exponentials with the label's logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Any) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.amax(-1)
        torch_dist.all_reduce(largest, op=torch_dist.ReduceOp.MAX, group=group)
        softmax = wide - largest.unsqueeze(-1)
        # labels counted from the first of this rank's share; each belongs to one rank
        is_valid, here = labels != IGNORE_INDEX, labels - first
        is_here = is_valid & (here >= 0) & (here < logits.shape[-1])
        here = here.where(is_here, torch.zeros_like(here)).unsqueeze(-1)
        label_logit = softmax.gather(-1, here).squeeze(-1) * is_here
        sums = torch.stack([softmax.exp_().sum(-1), label_logit, is_here.to(softmax.dtype)])
        torch_dist.all_reduce(sums, group=group)
        if labels.device.type == "cpu" and not torch.equal(sums[2] == 1, is_valid):
            raise ValueError("labels outside of the vocabulary: give -100 where a label does not count")
        softmax.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, here, is_here, is_valid)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]) * is_valid

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, here, is_here, is_valid = ctx.saved_tensors
        grad = (grad * is_valid).unsqueeze(-1)
        logits_grad = softmax * grad
        logits_grad.scatter_add_(-1, here, -grad * is_here.unsqueeze(-1))
        return logits_grad.to(ctx.dtype), None, None, None
