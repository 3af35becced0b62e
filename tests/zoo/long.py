"""Repeat some members with longer texts; the check looks at a window of them."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from tests.distributed.engines import MicroBatch, micro_batch
from tests.small_models.parts import LONG, fixed
from tests.zoo.members import ZOO, add, stack


def text(seed: int) -> MicroBatch:
    return micro_batch(seed, length=LONG)


def extended(seed: int, extra: Tensor) -> MicroBatch:
    tokens, labels = text(seed)
    return (tokens, extra), labels


DATA = {
    "MemoryByTorch": lambda seed: extended(seed, fixed(2, 5, 12, seed=seed)),
    "PositionIds": lambda seed: extended(seed, torch.arange(LONG).flip(0).expand(2, -1).clone()),
    "PositionIdsWithoutRows": lambda seed: extended(seed, torch.arange(LONG)),
}
UNHEALTHY = (
    "softmax_by_hand", "plain_attention_by_another_name", "bidirectional", "LearnedPositions", "PositionedEmbedding",
    "causal_convolution", "last_token", "without_mean", "running_sum", "LimitedExperts", "BalancingLoss",
    "PooledState", "MeanGradient", "summed", "by_root_of_count", "class_weights", "shifting", "root_mean_square",
    "with_z_loss_of_all_tokens", "PositionIdsWithoutRows",
)  # fmt: skip
HEALTHY = (
    "Sliced", "Alibi", "Checkpointed", "Experts", "own_norms", "MemoryByTorch", "PositionIds", "ReversibleStreams",
    "declared_sum", "declared_mean", "label_smoothing", "ClassWeights", "TiedEmbedding",
)  # fmt: skip


class CachesOnFirstUse(nn.Module):
    """Compute positions by the share of the sequence, whose length is read once; the check's window is shorter."""

    length: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        active = active_slice()
        start, length = (0, x.shape[1]) if active is None else (active.start, active.sequence_length)
        if self.length is None:
            self.length = length
            self.register_buffer("places", torch.arange(length) / length)
        assert isinstance(self.places, Tensor)
        return x * (1 + self.places[start : start + x.shape[1], None])


add("long_CachesOnFirstUse", stack(CachesOnFirstUse), data=text)
for name in (*UNHEALTHY, *HEALTHY):
    ZOO[f"long_{name}"] = replace(ZOO[name], name=f"long_{name}", data=DATA.get(name, text))
