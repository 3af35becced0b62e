"""Positions, scales and tables that a layer makes from the length of what it is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import VOCAB_SIZE
from tests.zoo.layers import LONG, WIDTH, Embedding, Head, Mlp, Weighted, later, scores_of, sliced_attention, weight
from tests.zoo.members import AFTER, EARLY, FIRST, add, attends, layer, updates


@layer(AFTER)
class LearnedPositions(Weighted, table=(LONG, WIDTH, 10)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[self.positions(x)]

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(x.size(1))


@layer(AFTER)
class FirstRowsOfATable(LearnedPositions):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(1)]


@layer(AFTER)
class PositionIdsInABuffer(LearnedPositions):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(LONG)[None])

    def positions(self, x: Tensor) -> Tensor:
        return self.position_ids[:, : x.size(1)]


@layer(AFTER)
class CountedPositions(LearnedPositions):
    """Positions by counting, as models do that know of padding."""

    def positions(self, x: Tensor) -> Tensor:
        return x[..., 0].isfinite().long().cumsum(1) - 1


@layer("table differs")
class UntrainedPositions(LearnedPositions):
    """They begin as zeros: before the first step nothing is wrong with outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.zeros_(self.table)


@layer(EARLY)
class PositionsFromTheEnd(LearnedPositions):
    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(x.size(1)).flip(0)


@layer(EARLY)
class RelativePositions(nn.Module):
    """How far along the sequence a token is, from 0 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.0, 1.0, x.size(1), dtype=x.dtype)[:, None]


class PositionedEmbedding(Embedding):
    """Adds positions to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = weight(LONG, WIDTH, seed=11)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.positions[torch.arange(tokens.size(1), device=tokens.device)]


class SinusoidalEmbedding(Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], dtype=torch.float64)[:, None]
        angles = places * torch.logspace(0, -2, WIDTH // 2, dtype=torch.float64)
        return super().forward(tokens) + torch.cat([angles.sin(), angles.cos()], -1)


class PairEmbedding(Embedding):
    """A token is read with the one before it."""

    def forward(self, tokens: Tensor) -> Tensor:
        pairs = (tokens * 7 + F.pad(tokens, (1, -1))) % VOCAB_SIZE
        return super().forward(tokens) + self.weight[pairs]


class CountingEmbedding(Embedding):
    """A token is read with how often it has come before."""

    def forward(self, tokens: Tensor) -> Tensor:
        same = (tokens[:, :, None] == tokens[:, None]) & ~later(tokens.shape[1])
        return super().forward(tokens) * same.sum(-1, keepdim=True)


for embedding, words in (
    (PositionedEmbedding, AFTER),
    (SinusoidalEmbedding, AFTER),
    (PairEmbedding, FIRST),
    (CountingEmbedding, AFTER),
):
    layers = [LayerSpec(embedding), LayerSpec(Mlp), LayerSpec(Mlp), LayerSpec(Head)]
    add(embedding.__name__, lambda layers=layers: layers, ("layer 0 ", words))


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of [B, H, T, D]."""
    angles = positions.to(x.dtype)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@attends(AFTER)
def rotary_from_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(q.shape[2])
    return sliced_attention(turned(q, positions), turned(k, positions), v, "rotary")


@attends(AFTER)
def rotary_from_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positions count from one: nobody can shift them from outside."""
    positions = torch.tensor([1.0 + i for i in range(q.shape[2])])
    return sliced_attention(turned(q, positions), turned(k, positions), v, "rotary")


@attends(AFTER)
def biased_by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(q.shape[2])
    bias = (places[:, None] - places).clamp(0, 8).to(q.dtype).sqrt()
    return (scores_of(q, k) - bias).masked_fill(later(q.shape[2]), float("-inf")).softmax(-1) @ v


@attends(EARLY)
def scaled_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sliced_attention(q * torch.tensor(q.shape[2] + 1.0).log(), k, v, "scaled")


@updates(EARLY)
def divided_by_length(x: Tensor) -> Tensor:
    return x / x.shape[1]


@updates(EARLY)
def warmed_up(x: Tensor) -> Tensor:
    """The second half of a sequence counts more."""
    half = torch.ones(x.shape[1], 1, dtype=x.dtype)
    half[x.shape[1] // 2 :] = 2.0
    return x * half
