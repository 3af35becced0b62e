"""Shared, frozen and otherwise treated weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import Embedding, Head, Mlp
from tests.zoo.members import add, stack


def logits_of(tied: Embedding, x: Tensor) -> Tensor:
    return x @ tied.weight.T


def tied_layers() -> list[Any]:
    return [
        TiedLayerSpec("words", Embedding),
        LayerSpec(Sliced, 0),
        LayerSpec(Mlp),
        TiedLayerSpec("words", Embedding, forward_fn=logits_of),
    ]


class FrozenEmbedding(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class UsedTwice(Mlp):
    """The same weights for two layers, as ALBERT has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


add("TiedEmbedding", tied_layers, ())
add("FrozenEmbedding", lambda: [LayerSpec(FrozenEmbedding), *stack(LayerSpec(Sliced, 0))[1:]], ())
add("UsedTwice", lambda: stack(LayerSpec(Sliced, 0), LayerSpec(UsedTwice)), ())


def activation(x: Tensor) -> Tensor:
    """A layer that is a plain function."""
    return F.softplus(x)


add("PlainFunctions", lambda: [LayerSpec(Embedding), activation, LayerSpec(Sliced, 0), torch.tanh, LayerSpec(Head)], ())
