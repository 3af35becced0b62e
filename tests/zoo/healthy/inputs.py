"""Further inputs beside the tokens, and inputs that are no tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import LENGTH, MicroBatch, micro_batch
from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import HEADS, LONG, WIDTH, Head, Mlp, Weighted, fixed
from tests.zoo.members import add
from tests.zoo.shapes import ReadsMemory, reading, tuples, with_input


def memory(seed: int) -> MicroBatch:
    return with_input(seed, fixed(2, 7, WIDTH, seed=seed, std=1.0))


class FusedMemory(Weighted, inner=(WIDTH, WIDTH, 120)):
    """Attention to another text, by torch's own function: there is nothing of it in the slices."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        x, other = inputs
        q, k = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (x @ self.inner, other))
        return x + F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


class PositionIds(Weighted, table=(LONG, WIDTH, 121)):
    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] + self.table[inputs[1]]


class Weighed(nn.Module):
    """(x, a number or a mask for each token)."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * inputs[1][..., None]


class Conditioned(Weighted, inner=(WIDTH, WIDTH, 122)):
    """(x, one vector for each row)."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * (1 + inputs[1] @ self.inner)


def with_sliced(kind: type[nn.Module]) -> Any:
    return lambda: reading(kind, LayerSpec(Sliced, 0))


def position_ids(seed: int) -> MicroBatch:
    return with_input(seed, torch.arange(LENGTH).flip(0).expand(2, -1).clone())


def padding(seed: int) -> MicroBatch:
    return with_input(seed, torch.arange(LENGTH) < torch.tensor([[19], [23]]))


add("MemoryByHand", with_sliced(ReadsMemory), (), data=memory)
add("MemoryByTorch", with_sliced(FusedMemory), (), data=memory)
add("PositionIds", with_sliced(PositionIds), (), data=position_ids)
add("PositionIdsOfOneRow", with_sliced(PositionIds), (), data=lambda seed: with_input(seed, torch.arange(LENGTH)[None]))


class Guided(nn.Module):
    """(x, position ids) -> the same: every layer adds its own positions."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.positions, self.attention = PositionIds(), Sliced(index)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.attention(self.positions(inputs)), inputs[1]


add("PositionIdsForEveryLayer", lambda: tuples(LayerSpec(Guided, 0), LayerSpec(Guided, 1)), (), data=position_ids)
add("PaddingMask", with_sliced(Weighed), (), data=padding)
add("ConditionOfEachRow", with_sliced(Conditioned), (), data=lambda s: with_input(s, fixed(2, 1, WIDTH, seed=s)))
add(
    "NumberOfEachToken",
    with_sliced(Weighed),
    (),
    data=lambda s: with_input(s, fixed(2, LENGTH, seed=s)),
    terapipe={"sliced_inputs": [0, 1]},
)


class Projection(Weighted, inner=(7, WIDTH, 123)):
    """Of continuous inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner


def features(seed: int) -> MicroBatch:
    return fixed(2, LENGTH, 7, seed=seed, std=1.0), micro_batch(seed)[1]


add(
    "ContinuousInputs",
    lambda: [LayerSpec(Projection), LayerSpec(Sliced, 0), LayerSpec(Mlp), LayerSpec(Head)],
    (),
    data=features,
)
