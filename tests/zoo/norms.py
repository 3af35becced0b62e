"""Norms, means and products over all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.zoo.convolutions import by_type, over_tokens
from tests.zoo.layers import LONG, WIDTH, Weighted, fixed, seeded
from tests.zoo.members import AFTER, EARLY, layer, update, updates

update(EARLY)(
    layer_norm_over_tokens=lambda x: over_tokens(x, lambda y: F.layer_norm(y, (y.shape[-1],))),
    batch_norm_by_hand=lambda x: (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-3).sqrt(),
    without_mean=lambda x: x - x.mean(1, keepdim=True),
    softmax_over_tokens=lambda x: x * x.softmax(1),
    divided_by_largest=lambda x: x / x.abs().amax(1, keepdim=True),
    unit_columns=lambda x: F.normalize(x, dim=1),
    # One scale for the whole tensor, as some quantisations have it.
    standardised_scale=lambda x: (x / x.abs().max() * 3).tanh(),
    squeeze_and_excitation=lambda x: x * (x.mean(1, keepdim=True) @ fixed(WIDTH, WIDTH, seed=60)).sigmoid(),
    fourier_mixing=lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real,
)


@updates(EARLY)
def group_norm(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.group_norm(y, 3))


@updates(EARLY)
def centred_products(x: Tensor) -> Tensor:
    """Decorrelated features: by the covariance over tokens."""
    centred = x - x.mean(1, keepdim=True)
    return x @ (centred.mT @ centred / x.shape[1])


@updates(AFTER)
def toeplitz(x: Tensor) -> Tensor:
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    return (fixed(LONG, seed=61)[distance.clamp(min=0)] * (distance >= 0)) @ x


class _OverTokens(Weighted, tokens=(LONG, LONG, 62)):
    def matrix(self, length: int) -> Tensor:
        return self.tokens[:length, :length]


@layer(EARLY)
class TokenMixer(_OverTokens):
    """A linear layer over tokens, as MLP-Mixer has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.matrix(x.shape[1]) @ x


@layer(AFTER)
class SpatialGate(_OverTokens):
    """As gMLP: a causal matrix over tokens gates."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + self.matrix(x.shape[1]).tril() @ x)


class NormLayer(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = seeded(make())

    def forward(self, x: Tensor) -> Tensor:
        return x + over_tokens(x, self.norm)


by_type("GroupNormLayer", "GroupNorm", LayerSpec(NormLayer, lambda: nn.GroupNorm(3, WIDTH)))
by_type("BatchNormLayer", "BatchNorm1d", LayerSpec(NormLayer, lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)))
by_type("InstanceNormLayer", "InstanceNorm1d", LayerSpec(NormLayer, lambda: nn.InstanceNorm1d(WIDTH)))
