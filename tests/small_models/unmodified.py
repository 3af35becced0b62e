"""Define pipeline models as people have them: plain torch, and optionally one line of positions.

Torch's attention has no biases here: the keys' bias has a gradient of zero, and Adam turns its rounding into a step.
"""

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice

VOCABULARY, WIDTH, HEADS = 61, 16, 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Positions(nn.Module):
    """Add learned positions; `from_slice` is the one line that a model changes."""

    def __init__(self, from_slice: bool) -> None:
        super().__init__()
        self.from_slice, self.table = from_slice, nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        active = active_slice() if self.from_slice else None
        start = 0 if active is None else active.start
        return x + self.table(torch.arange(start, start + x.shape[1], device=x.device))


class CausalSelfAttention(nn.Module):
    def __init__(self, num_calls: int = 1) -> None:
        super().__init__()
        self.num_calls, self.qkv = num_calls, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        for call in range(self.num_calls):
            v = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / (1 + call))
        return v.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, num_calls: int = 1) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), CausalSelfAttention(num_calls)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(inplace=True), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.mlp(x)
        y += x
        return y


class MultiheadBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return x + self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class EncoderBlock(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


def logits(head: Embedding, x: Tensor) -> Tensor:
    return x @ head.weight.t()


def layers_of(block: str = "sdpa", from_slice: bool = True) -> list[Any]:
    """Return a small GPT with a tied head, in fp64."""
    blocks: dict[str, tuple[Any, ...]] = {
        "sdpa": (Block,), "two calls": (Block, 2), "multihead": (MultiheadBlock,), "encoder": (EncoderBlock,)
    }  # fmt: skip
    return [
        TiedLayerSpec("embedding", _double(Embedding)),
        LayerSpec(_double(Positions), from_slice),
        *(LayerSpec(_double(blocks[block][0]), *blocks[block][1:]) for _ in range(4)),
        LayerSpec(_double(nn.LayerNorm), WIDTH),
        TiedLayerSpec("embedding", _double(Embedding), forward_fn=logits),
    ]


def _double(layer: type[nn.Module]) -> type[nn.Module]:
    """Return the class with parameters in fp64, under its own name."""

    def build(self: nn.Module, *args: Any) -> None:
        layer.__init__(self, *args)
        self.double()

    return type(layer.__name__, (layer,), {"__init__": build, "__module__": layer.__module__})
