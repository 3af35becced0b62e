"""Layouts that change on the way."""

from __future__ import annotations

from typing import Any

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import Calls, Embedding, Head, Mlp
from tests.zoo.members import add


class ChannelMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class FlatHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(0, (2, -1))


def between(*kinds: type[nn.Module] | LayerSpec) -> Any:
    specs = [kind if isinstance(kind, LayerSpec) else LayerSpec(kind) for kind in kinds]
    return lambda: [LayerSpec(Embedding), LayerSpec(Sliced, 0), *specs]


CHANNELS_FIRST = LayerSpec(Calls, lambda x: x.transpose(1, 2).contiguous())
TOKENS_FIRST = LayerSpec(Calls, lambda x: x.transpose(0, 1).contiguous())  # [T, B, C], as Megatron has it
FLAT_ROWS = LayerSpec(Calls, lambda x: x.flatten(0, 1))


add("ChannelsFirst", between(CHANNELS_FIRST, ChannelMlp, CHANNELS_FIRST, Head), ())
add("TokensFirst", between(TOKENS_FIRST, Mlp, TOKENS_FIRST, Head), ())
add("FlatRows", between(FLAT_ROWS, Mlp, FlatHead), ())


class TwoStreams(nn.Module):
    """Reversible layers: each stream adds to the other."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = Sliced(index), Mlp()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = inputs
        a = a + self.attention(b)
        return a, b + self.mlp(a)


add(
    "ReversibleStreams",
    lambda: [
        *[LayerSpec(Embedding), LayerSpec(Calls, lambda x: (x, x.tanh())), LayerSpec(TwoStreams, 0)],
        *[LayerSpec(TwoStreams, 1), LayerSpec(Calls, lambda streams: streams[0] - streams[1]), LayerSpec(Head)],
    ],
    (),
)
