"""Attention that is sliced."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor

from terapipe_ds.attention import active_slice
from tests.distributed.engines import gpt_layers
from tests.zoo.layers import WIDTH, Attention, Mlp, sliced_attention
from tests.zoo.members import add, checkpointed, stack
from tests.zoo.positions import turned


def first_position() -> int:
    active = active_slice()
    return 0 if active is None else active.start


class Sliced(Attention):
    """Sliced attention, with positions that begin where the slice does."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(self.sliced)
        self.index = index

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = first_position() + torch.arange(q.shape[2])
        return sliced_attention(turned(q, positions), turned(k, positions), v, self.index)


class Alibi(Sliced):
    """ALiBi by one more number in keys and queries: softmax does not see what is the same for all keys."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = first_position() + torch.arange(q.shape[2], dtype=q.dtype)
        slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        far = (places * q.shape[-1] ** 0.5)[:, None].expand(*k.shape[:3], 1)
        wide = torch.cat([q, slopes], -1), torch.cat([k, far], -1), F.pad(v, (0, 1))
        return sliced_attention(*wide, self.index, scale=q.shape[-1] ** -0.5)[..., :-1]


class NormedQueries(Sliced):
    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1) * 3, v, self.index, scale=1.0)


class GatedHeads(Sliced):
    """One head of keys for all queries, and a gate on what comes out."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k[:, :1], v[:, :1], self.index) * q.sigmoid()


class TwiceSliced(Sliced):
    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k, v, (self.index, 1)) - sliced_attention(k, q, v, (self.index, 2))


class ParallelBlock(Sliced):
    """Parallel attention and feed-forward."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mlp(F.layer_norm(x, (WIDTH,)))


for kind in (Sliced, Alibi, NormedQueries, GatedHeads, TwiceSliced):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(kind, 0), LayerSpec(Mlp), LayerSpec(kind, 1)), ())
add("ParallelBlocks", lambda: stack(LayerSpec(ParallelBlock, 0), LayerSpec(ParallelBlock, 1)), ())
add("Checkpointed", lambda: stack(LayerSpec(Sliced, 0), LayerSpec(Sliced, 1)), (), engine=checkpointed(Sliced, Mlp))
add("WholeDecoder", gpt_layers, ())
add("TiedDecoder", lambda: gpt_layers(tied_embedding=True), ())
