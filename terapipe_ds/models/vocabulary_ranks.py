"""Let tensor-parallel ranks that divide a vocabulary compute a loss without logits together."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist
from torch import Tensor


class VocabularyRanks:
    """Be the `losses.head.VocabularyRanks` of a group; with `shares_tokens` they divide the tokens of a slice too."""

    def __init__(self, group: Any, shares_tokens: bool) -> None:
        self.size, self.rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)
        self.group, self._shares_tokens = group, shares_tokens

    def span(self, share: int) -> tuple[int, int]:
        return share * self.rank, share * self.size

    def largest(self, of_tokens: Tensor) -> None:
        torch_dist.all_reduce(of_tokens, torch_dist.ReduceOp.MAX, self.group)

    def sum(self, of_tokens: Tensor) -> None:
        torch_dist.all_reduce(of_tokens, group=self.group)

    def gather(self, hidden: Tensor) -> Tensor:
        if not self._shares_tokens:
            return hidden
        own = hidden.transpose(0, 1).contiguous()
        whole = own.new_empty((own.shape[0] * self.size, *own.shape[1:]))
        torch_dist.all_gather_into_tensor(whole, own, group=self.group)
        return whole.transpose(0, 1)

    def own_sum(self, gradient: Tensor) -> Tensor:
        if not self._shares_tokens:
            self.sum(gradient)
            return gradient
        whole = gradient.transpose(0, 1).contiguous()
        own = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        torch_dist.reduce_scatter_tensor(own, whole, group=self.group)
        return own.transpose(0, 1)
