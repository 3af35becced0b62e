"""Compute cross entropy over a vocabulary that tensor-parallel ranks share (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as torch_dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.losses.deferred import require_known
from terapipe_ds.losses.linear_cross_entropy import Labels, targets_and_mask
from terapipe_ds.models.megatron.refusals import MegatronConfigError

IGNORE_INDEX = -100
WHOLE_LOGITS = (
    'VocabParallelLoss("megatron") takes logits whose vocabulary is split over the ranks, and with '
    'parallel_output=False each rank has all of it: use VocabParallelLoss("exact"), or leave parallel_output on'
)
_OF_HIDDEN = LinearCrossEntropy(ignore_index=IGNORE_INDEX)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
    """Return the cross entropy per token, in fp32, or in fp64 for fp64 logits.

    It takes two collectives: the maximum, then the sum of exponentials with the label's logit.

    logits: [..., V / tp], this rank's share of the vocabulary in the order of `group` (None: one rank); labels: [...]
    int64 in [0, V).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.detach().amax(dim=-1, keepdim=True)
    if group is not None and group.size() > 1:
        torch_dist.all_reduce(largest, op=torch_dist.ReduceOp.MAX, group=group)
    shifted = wide - largest
    # labels counted from the first of this rank's share
    here = labels.unsqueeze(-1) - logits.shape[-1] * (0 if group is None else torch_dist.get_rank(group))
    inside = (here >= 0) & (here < logits.shape[-1])
    of_label = shifted.gather(-1, here.where(inside, 0)) * inside
    # one collective for both; each rank gets the gradient of its own share
    sums = torch.cat([shifted.exp().sum(dim=-1, keepdim=True), of_label], -1)
    if group is not None:
        sums = tensor_parallel.reduce_from_tensor_model_parallel_region(sums, group)
    total, of_label = sums.unbind(-1)
    return total.log() - of_label


class VocabParallelLoss:
    """Compute the loss of a `MegatronGPT`: the mean over the tokens that count, as Megatron-LM's GPT has it.

    Labels are [B, T] int64 with `IGNORE_INDEX` for tokens that do not count, or (labels, loss_mask) with a float
    mask [B, T] that weighs each token. The loss is sum(mask * cross entropy) / sum(mask) over a micro-batch;
    `slice_weight` tells the engine the share of a slice in it.

    Args:
        cross_entropy: "exact": computed in the dtype of fp64 logits, in fp32 otherwise. "megatron": megatron-core's
            own, always in fp32. It takes the ranks' logits for shares of the vocabulary, and refuses whole ones.
    """

    # by a rank's logits of a token, as the last layers that ran have them; None: those are of the whole vocabulary
    groups: ClassVar[dict[int, Any]] = {}
    of_hidden, slice_weight = staticmethod(_OF_HIDDEN.of_hidden), staticmethod(_OF_HIDDEN.slice_weight)

    def __init__(self, cross_entropy: str = "exact") -> None:
        if cross_entropy not in ("exact", "megatron"):
            raise ValueError(f'cross_entropy={cross_entropy!r}: give "exact" or "megatron"')
        self.cross_entropy = cross_entropy

    @property
    def needs_logits(self) -> str:
        """Return why the engine must pass logits, or ""."""
        if type(self).__call__ is not VocabParallelLoss.__call__:
            return f"{type(self).__name__} has a __call__() of its own"
        return 'VocabParallelLoss("megatron") takes them' if self.cross_entropy == "megatron" else ""

    def __call__(self, logits: Tensor, labels: Labels) -> Tensor:
        """Return the loss of logits [B, T, V / tp]. Raises ValueError for labels outside of the vocabulary."""
        targets, mask = targets_and_mask(labels, IGNORE_INDEX)
        theirs = parallel_state.get_tensor_model_parallel_group(False)  # megatron-core's looks its group up by itself
        group = self.groups.get(logits.shape[-1], theirs if self.cross_entropy == "megatron" else None)
        require_known(targets, logits.shape[-1] * (1 if group is None else group.size()))
        if self.cross_entropy == "megatron":
            if group is None and theirs is not None and theirs.size() > 1:
                raise MegatronConfigError(WHOLE_LOGITS)
            # megatron-core has tokens first; it works in place, and somebody may have asked for the logits
            first = logits.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            losses = tensor_parallel.vocab_parallel_cross_entropy(first, targets.t().contiguous()).t()
        else:
            losses = vocab_parallel_cross_entropy(logits, targets, group)
        mask = mask.to(losses.dtype)
        return (losses * mask).sum() / mask.sum()
