"""What else a layer may do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import allow_attention_within_slice
from tests.distributed.engines import VOCAB_SIZE, micro_batch
from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import WIDTH, Mlp, Weighted, seeded
from tests.zoo.members import add, stack


class NormedEmbedding(nn.Module):
    """Words are brought to a length when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = seeded(nn.Embedding(VOCAB_SIZE, WIDTH, padding_idx=0, max_norm=1.2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


class OwnCheckpoint(Sliced):
    """Recomputes its attention by torch's own checkpointing."""

    def __init__(self, index: int, reentrant: bool) -> None:
        super().__init__(index)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class NormedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(seeded(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class MaskedWeights(Mlp):
    """A hook keeps some weights as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_hook(lambda grad: grad * (torch.arange(2 * WIDTH) % 2))


class ScaledGradient(Mlp):
    """The gradient of each token is halved."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


class BlocksOfFour(Weighted, inner=(4, 4, 125)):
    """Four tokens that stand together are mixed; slices hold whole blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner @ x.unflatten(1, (-1, 4))).flatten(1, 2)


class AttentionInBlocks(Sliced):
    """Attention among four tokens that stand together, which is meant so."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = [each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (q, k, v)]
        with allow_attention_within_slice():
            return F.scaled_dot_product_attention(*blocks).transpose(1, 2).flatten(2, 3)


class AttentionOverHeads(Sliced):
    """Heads of one token attend to each other: there are as many as slices have tokens, or not."""

    def sliced(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with allow_attention_within_slice():
            mixed = F.scaled_dot_product_attention(*[each.transpose(1, 2) for each in (q, k, v)])
        return super().sliced(mixed.transpose(1, 2), k, v)


add("NormedEmbedding", lambda: [LayerSpec(NormedEmbedding), *stack(LayerSpec(Sliced, 0))[1:]], ())
add("OwnCheckpoint", lambda: stack(LayerSpec(OwnCheckpoint, 0, False), LayerSpec(OwnCheckpoint, 1, False)), ())
add("OwnReentrantCheckpoint", lambda: stack(LayerSpec(OwnCheckpoint, 0, True), LayerSpec(OwnCheckpoint, 1, True)), ())
for kind in (NormedWeights, MaskedWeights, ScaledGradient, nn.Identity):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(Sliced, 0), LayerSpec(kind)), ())
add("AttentionOverHeads", lambda: stack(LayerSpec(AttentionOverHeads, 0)), ())
for kind in (BlocksOfFour, AttentionInBlocks):
    add(
        kind.__name__,
        lambda kind=kind: stack(LayerSpec(kind), LayerSpec(Sliced, 1)),
        (),
        data=lambda seed: micro_batch(seed, length=24),
        terapipe={"granularity_tokens": 4},
    )
