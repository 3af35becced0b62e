"""Layouts that change on the way."""

from __future__ import annotations

from typing import Any

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import Embedding, Head, Mlp
from tests.zoo.members import add


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()


class ChannelMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class TokensFirst(ChannelsFirst):
    """[B, T, C] -> [T, B, C], as Megatron has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()


class FlatRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class FlatHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(0, (2, -1))


def between(*kinds: type[nn.Module]) -> Any:
    return lambda: [LayerSpec(Embedding), LayerSpec(Sliced, 0), *map(LayerSpec, kinds)]


add("ChannelsFirst", between(ChannelsFirst, ChannelMlp, ChannelsFirst, Head), ())
add("TokensFirst", between(TokensFirst, Mlp, TokensFirst, Head), ())
add("FlatRows", between(FlatRows, Mlp, FlatHead), ())


class Streams(nn.Module):
    """x -> (x, a second stream)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class TwoStreams(nn.Module):
    """Reversible layers: each stream adds to the other."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = Sliced(index), Mlp()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = inputs
        a = a + self.attention(b)
        return a, b + self.mlp(a)


class Joined(Head):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(inputs[0] - inputs[1])


def reversible() -> list[LayerSpec]:
    return [
        LayerSpec(Embedding),
        LayerSpec(Streams),
        LayerSpec(TwoStreams, 0),
        LayerSpec(TwoStreams, 1),
        LayerSpec(Joined),
    ]


add("ReversibleStreams", reversible, ())
