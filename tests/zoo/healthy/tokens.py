"""Each token for itself, whatever the sizes are alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.engines import LENGTH, micro_batch
from tests.zoo.healthy.attention import Sliced
from tests.zoo.layers import WIDTH, Mlp, Residual, Weighted, scores_of, seeded
from tests.zoo.members import add, layer, stack, updates
from tests.zoo.routers import Experts


class GatedMlp(nn.Module):
    """SwiGLU after a norm over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = seeded(nn.LayerNorm(WIDTH))
        self.gate_proj, self.up_proj = (seeded(nn.Linear(WIDTH, 20, bias=False), seed) for seed in (110, 111))
        self.down_proj = seeded(nn.Linear(20, WIDTH), 112)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class RootMeanSquare(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class InPlace(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.up
        y += 0.5
        y[:, -1:] *= 1.0
        return y.tanh_() @ self.down


class NarrowConvolution(nn.Module):
    """Convolutions of width one are linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(nn.Conv1d(WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class WideAsSlices(Weighted, down=(WIDTH, 6, 113), up=(6, WIDTH, 114)):
    """Six features, as many as a slice has tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.down
        return x + (y - y.mean(-1, keepdim=True)).softmax(-1) @ self.up


for kind in (GatedMlp, RootMeanSquare, InPlace, NarrowConvolution, WideAsSlices, Experts):
    add(kind.__name__, lambda kind=kind: stack(LayerSpec(Sliced, 0), LayerSpec(kind)), ())


@updates()
def own_norms(x: Tensor) -> Tensor:
    """Over groups of features, one token after the other."""
    grouped = F.group_norm(x.flatten(0, 1), 3).view_as(x)
    return F.normalize(grouped - x.mean(-1, keepdim=True), dim=-1)


@updates()
def over_features(x: Tensor) -> Tensor:
    """What mixes features and no tokens: running sums, shifts, choices, transforms."""
    chosen = torch.zeros_like(x).scatter(-1, x.topk(3, -1).indices, 1.0)
    return x.cumsum(-1) + x.roll(1, -1) * x.softmax(-1) + chosen + torch.fft.fft(x, dim=-1).real + x.sort(-1).values


class WidthOfTheText(Weighted, up=(WIDTH, LENGTH, 115), down=(LENGTH, WIDTH, 116)):
    """As many features as a sequence has tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.up).tanh() @ self.down


class Widened(Weighted, up=(WIDTH, LENGTH, 117)):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up


class Narrowed(Weighted, down=(LENGTH, WIDTH, 118)):
    def forward(self, x: Tensor) -> Tensor:
        return (x / x.norm(dim=-1, keepdim=True)) @ self.down


add("AsWideAsLong", lambda: stack(LayerSpec(Widened), LayerSpec(Narrowed), LayerSpec(WidthOfTheText)), ())
add(
    "AsManyRowsAsTokens",
    lambda: stack(LayerSpec(Sliced, 0)),
    (),
    data=lambda seed: micro_batch(seed, rows=LENGTH),
    engine={"train_micro_batch_size_per_gpu": LENGTH},
)
add(
    "AsManyRowsAsASlice",
    lambda: stack(LayerSpec(Sliced, 0)),
    (),
    data=lambda seed: micro_batch(seed, rows=6),
    engine={"train_micro_batch_size_per_gpu": 6},
)
add(
    "OneRow",
    lambda: stack(LayerSpec(Sliced, 0)),
    (),
    data=lambda seed: micro_batch(seed, rows=1),
    engine={"train_micro_batch_size_per_gpu": 1},
)
add("Dropped", lambda: stack(LayerSpec(Residual, nn.Dropout(0.0)), LayerSpec(Sliced, 0)), ())


@layer()
class LearnedSlots(Weighted, slots=(6, WIDTH, 124)):
    """Attention of each token to learned slots: a softmax over keys that are no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + scores_of(x, self.slots).softmax(-1) @ self.slots
