"""Compute cross entropy over a vocabulary that tensor-parallel ranks share (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from megatron.core import tensor_parallel
from torch import Tensor

from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.losses.linear_cross_entropy import Labels, targets_and_mask

IGNORE_INDEX = -100
_OF_HIDDEN = LinearCrossEntropy(ignore_index=IGNORE_INDEX)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Use two collectives in the forward pass: the maximum, then the sum of exponentials with the label's logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.max(dim=-1).values
        _all_reduce(largest, group, torch_dist.ReduceOp.MAX)
        shifted = wide - largest.unsqueeze(-1)
        # labels counted from the first of this rank's share
        here = labels - logits.shape[-1] * (0 if group is None else torch_dist.get_rank(group))
        inside = (here >= 0) & (here < logits.shape[-1])
        here = here.where(inside, torch.zeros_like(here))
        label_logit = shifted.gather(-1, here.unsqueeze(-1)).squeeze(-1) * inside
        softmax = shifted.exp_()
        # one collective for all three
        sums = torch.stack([softmax.sum(dim=-1), label_logit, inside.to(softmax.dtype)])
        _all_reduce(sums, group, torch_dist.ReduceOp.SUM)
        _require_known_labels(sums[2])
        softmax.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, here, inside)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, here, inside = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        logits_grad = softmax * grad
        logits_grad.scatter_add_(-1, here.unsqueeze(-1), -grad * inside.unsqueeze(-1))
        return logits_grad.to(ctx.dtype), None, None


def _require_known_labels(ranks_with_label: Tensor) -> None:
    """Refuse labels that are not in the share of exactly one rank, on all ranks alike; do not wait for a GPU."""
    is_inside = (ranks_with_label == 1).all()
    if is_inside.device.type != "cpu":
        torch._assert_async(is_inside)
    elif not is_inside:
        raise ValueError(
            f"labels outside of the vocabulary, for {int((ranks_with_label != 1).sum())} tokens that count: mask them "
            f"(label {IGNORE_INDEX}, or 0 in the loss mask), or give the model the tokenizer's vocab_size"
        )


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
    """Return the cross entropy per token, in fp32, or in fp64 for fp64 logits.

    logits: [..., V / tp], this rank's share of the vocabulary in the order of `group` (None: one rank); labels: [...]
    int64 in [0, V).
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group)


def _all_reduce(tensor: Tensor, group: Any, op: Any) -> None:
    if group is not None and torch_dist.get_world_size(group) > 1:
        torch_dist.all_reduce(tensor, op=op, group=group)


class VocabParallelLoss:
    """Compute the loss of a `MegatronGPT`: the mean over the tokens that count, as Megatron-LM's GPT has it.

    Labels are [B, T] int64 with `IGNORE_INDEX` for tokens that do not count, or (labels, loss_mask) with a float
    mask [B, T] that weighs each token. The loss is sum(mask * cross entropy) / sum(mask) over a micro-batch;
    `slice_weight` tells the engine the share of a slice in it.

    Args:
        cross_entropy: "exact": computed in the dtype of fp64 logits, in fp32 otherwise. "megatron": megatron-core's
            own, always in fp32.
    """

    of_hidden, slice_weight = staticmethod(_OF_HIDDEN.of_hidden), staticmethod(_OF_HIDDEN.slice_weight)

    def __init__(self, cross_entropy: str = "exact") -> None:
        if cross_entropy not in ("exact", "megatron"):
            raise ValueError(f'cross_entropy={cross_entropy!r}: give "exact" or "megatron"')
        self.cross_entropy = cross_entropy
        self._group: Callable[[], Any] = lambda: None

    def use_group(self, group: Callable[[], Any]) -> None:
        """Take a function that returns the tensor-parallel group once it exists; the module calls this."""
        self._group = group

    @property
    def needs_logits(self) -> str:
        """Return why the engine must pass logits, or ""."""
        if type(self).__call__ is not VocabParallelLoss.__call__:
            return f"{type(self).__name__} has a __call__() of its own"
        return 'VocabParallelLoss("megatron") takes them' if self.cross_entropy == "megatron" else ""

    def __call__(self, logits: Tensor, labels: Labels) -> Tensor:
        """Return the loss of logits [B, T, V / tp]."""
        targets, mask = targets_and_mask(labels, IGNORE_INDEX)
        if self.cross_entropy == "megatron":
            # megatron-core has tokens first; it works in place, and somebody may have asked for the logits
            first = logits.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            losses = tensor_parallel.vocab_parallel_cross_entropy(first, targets.t().contiguous()).t()
        else:
            losses = vocab_parallel_cross_entropy(logits, targets, self._group())
        mask = mask.to(losses.dtype)
        return (losses * mask).sum() / mask.sum()
