"""Norms, means and products over all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.convolutions import BY_TYPE, START, over_tokens
from tests.zoo.layers import LONG, WIDTH, fixed, seeded, weight
from tests.zoo.members import AFTER, EARLY, layer, updates


@updates(EARLY)
def layer_norm_over_tokens(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.layer_norm(y, (y.shape[-1],)))


@updates(EARLY)
def group_norm(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.group_norm(y, 3))


@updates(EARLY)
def batch_norm_by_hand(x: Tensor) -> Tensor:
    return (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-3).sqrt()


@updates(EARLY)
def without_mean(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


@updates(EARLY)
def softmax_over_tokens(x: Tensor) -> Tensor:
    return x * x.softmax(1)


@updates(EARLY)
def divided_by_largest(x: Tensor) -> Tensor:
    return x / x.abs().amax(1, keepdim=True)


@updates(EARLY)
def unit_columns(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


@updates(EARLY)
def standardised_scale(x: Tensor) -> Tensor:
    """One scale for the whole tensor, as some quantisations have it."""
    return (x / x.abs().max() * 3).tanh()


@updates(EARLY)
def squeeze_and_excitation(x: Tensor) -> Tensor:
    return x * (x.mean(1, keepdim=True) @ fixed(WIDTH, WIDTH, seed=60)).sigmoid()


@updates(EARLY)
def centred_products(x: Tensor) -> Tensor:
    """Decorrelated features: by the covariance over tokens."""
    centred = x - x.mean(1, keepdim=True)
    return x @ (centred.mT @ centred / x.shape[1])


@updates(EARLY)
def fourier_mixing(x: Tensor) -> Tensor:
    return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real


@updates(AFTER)
def toeplitz(x: Tensor) -> Tensor:
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    return (fixed(LONG, seed=61)[distance.clamp(min=0)] * (distance >= 0)) @ x


class _OverTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = weight(LONG, LONG, seed=62)

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


@layer(BY_TYPE, "GroupNorm", **START)
class GroupNormLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = self.make()

    def make(self) -> nn.Module:
        return seeded(nn.GroupNorm(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + over_tokens(x, self.norm)


@layer(BY_TYPE, "BatchNorm1d", **START)
class BatchNormLayer(GroupNormLayer):
    def make(self) -> nn.Module:
        return seeded(nn.BatchNorm1d(WIDTH, track_running_stats=False))


@layer(BY_TYPE, "InstanceNorm1d", **START)
class InstanceNormLayer(GroupNormLayer):
    def make(self) -> nn.Module:
        return seeded(nn.InstanceNorm1d(WIDTH))
