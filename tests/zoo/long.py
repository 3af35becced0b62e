"""Some members again with longer texts, of which the check looks at a window."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.distributed.engines import MicroBatch, micro_batch
from tests.zoo.layers import LONG, fixed
from tests.zoo.members import ZOO


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
    "softmax_by_hand", "plain_attention", "bidirectional", "LearnedPositions", "PositionedEmbedding",
    "causal_convolution", "last_token", "without_mean", "running_sum", "LimitedExperts", "BalancingLoss", "PooledState",
    "MeanGradient", "summed", "by_root_of_count", "class_weights", "shifting", "root_mean_square",
    "with_z_loss_of_all_tokens", "PositionIdsWithoutRows",
)  # fmt: skip
HEALTHY = (
    "Sliced", "Alibi", "Checkpointed", "Experts", "own_norms", "MemoryByTorch", "PositionIds",
    "ReversibleStreams", "declared_sum", "declared_mean", "label_smoothing", "ClassWeights", "TiedEmbedding",
)  # fmt: skip


def add_all() -> None:
    """When all others are there."""
    for name in (*UNHEALTHY, *HEALTHY):
        ZOO[f"long_{name}"] = replace(ZOO[name], name=f"long_{name}", data=DATA.get(name, text))
