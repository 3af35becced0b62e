"""Convolutions, shifts, pooling and other windows over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.layers import WIDTH, fixed, seeded, weight
from tests.zoo.members import AFTER, EARLY, FIRST, layer, updates

BY_TYPE = "layers that mix the tokens of a sequence"


def over_tokens(x: Tensor, function: object) -> Tensor:
    """`function` of [B, C, T]."""
    return function(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[operator]


@updates(FIRST)
def causal_convolution(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.conv1d(F.pad(y, (2, 0)), fixed(WIDTH, WIDTH, 3, seed=20)))


@updates(FIRST)
def depthwise_convolution(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.conv1d(F.pad(y, (3, 0)), fixed(WIDTH, 1, 4, seed=21), groups=WIDTH))


@updates(FIRST)
def dilated_convolution(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.conv1d(F.pad(y, (4, 0)), fixed(WIDTH, WIDTH, 2, seed=22), dilation=4))


@updates(EARLY)
def centered_convolution(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.conv1d(y, fixed(WIDTH, WIDTH, 3, seed=23), padding=1))


@updates(FIRST)
def convolution_of_two_dimensions(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 2, 0))[:, None]
    return F.conv2d(padded, fixed(1, 1, 3, 3, seed=24))[:, 0]


@updates(FIRST)
def transposed_convolution(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.conv_transpose1d(y, fixed(WIDTH, WIDTH, 3, seed=25))[..., : y.shape[-1]])


@updates(AFTER)
def convolution_by_fourier(x: Tensor) -> Tensor:
    tokens = x.shape[1]
    kernel = 0.9 ** torch.arange(tokens, dtype=x.dtype)[:, None]
    spectrum = torch.fft.rfft(x, 2 * tokens, dim=1) * torch.fft.rfft(kernel, 2 * tokens, dim=0)
    return torch.fft.irfft(spectrum, 2 * tokens, dim=1)[:, :tokens]


@updates(FIRST)
def windows_by_unfold(x: Tensor) -> Tensor:
    return (F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1) * torch.tensor([0.2, 0.5, 0.3], dtype=x.dtype)).sum(-1)


@updates(FIRST)
def windows_of_images(x: Tensor) -> Tensor:
    columns = F.unfold(F.pad(x, (0, 0, 2, 0))[:, None], (3, WIDTH))  # [B, 3 * WIDTH, T]
    return columns.transpose(1, 2).unflatten(-1, (3, WIDTH)).sum(2)


@updates(FIRST)
def largest_of_three(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.max_pool1d(F.pad(y, (2, 0), value=-1e3), 3, stride=1))


@updates(FIRST)
def mean_of_three(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.avg_pool1d(F.pad(y, (2, 0)), 3, stride=1))


@updates(EARLY)
def coarse_and_fine(x: Tensor) -> Tensor:
    return over_tokens(x, lambda y: F.interpolate(F.interpolate(y, scale_factor=0.5), size=y.shape[-1]))


# -- shifts ----------------------------------------------------------------------------------------------------------


@updates(FIRST)
def token_shift(x: Tensor) -> Tensor:
    """As RWKV mixes a token with the one before."""
    mix = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
    return x * mix + F.pad(x, (0, 0, 1, -1)) * (1 - mix)


@updates(FIRST)
def rolled(x: Tensor) -> Tensor:
    shifted = x.roll(1, dims=1)
    return x + shifted * (torch.arange(x.shape[1]) > 0)[:, None]


@updates(EARLY)
def rolled_around(x: Tensor) -> Tensor:
    return torch.roll(x, 2, 1)


@updates(FIRST)
def shift_by_joining(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


@updates(FIRST)
def shift_by_index(x: Tensor) -> Tensor:
    return x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)]


@updates(FIRST)
def shift_by_gather(x: Tensor) -> Tensor:
    places = (torch.arange(x.shape[1]) - 3).clamp(min=0)[None, :, None]
    return x.gather(1, places.expand_as(x))


@updates(FIRST)
def difference_of_neighbours(x: Tensor) -> Tensor:
    return torch.diff(x, dim=1, prepend=torch.zeros_like(x[:, :1]))


@updates(EARLY)
def next_token(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, -1, 1))


@updates(AFTER)
def first_token(x: Tensor) -> Tensor:
    return x + x[:, :1]


@updates(EARLY)
def last_token(x: Tensor) -> Tensor:
    return x - x[:, -1:]


@updates(AFTER)
def fours(x: Tensor) -> Tensor:
    """The tokens of a group of four add up."""
    tokens = x.shape[1]
    groups = F.pad(x, (0, 0, 0, -tokens % 4)).unflatten(1, (-1, 4))
    return groups.cumsum(2).flatten(1, 2)[:, :tokens]


@updates(EARLY)
def sorted_tokens(x: Tensor) -> Tensor:
    return x.sort(dim=1).values


# -- layers of torch's own -------------------------------------------------------------------------------------------


class _OfTorch(nn.Module):
    """x + a causal layer of [B, C, T]."""

    def __init__(self, inner: nn.Module, pad: int = 2) -> None:
        super().__init__()
        self.inner, self.pad = seeded(inner), pad

    def forward(self, x: Tensor) -> Tensor:
        return x + over_tokens(x, lambda y: self.inner(F.pad(y, (self.pad, 0))))[:, : x.shape[1]]


START = {"error": "TeraPipeConfigError"}


@layer(BY_TYPE, "Conv1d", **START)
class Convolution1d(_OfTorch):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(WIDTH, WIDTH, 3))


@layer(BY_TYPE, "Conv2d", **START)
class Convolution2d(_OfTorch):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 1, 3, padding=(1, 0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + over_tokens(x, lambda y: self.inner(F.pad(y, (2, 0))[:, None])[:, 0])


@layer(BY_TYPE, "ConvTranspose1d", **START)
class TransposedConvolution(_OfTorch):
    def __init__(self) -> None:
        super().__init__(nn.ConvTranspose1d(WIDTH, WIDTH, 3), pad=0)


@layer(BY_TYPE, "MaxPool1d", **START)
class MaximumPooling(_OfTorch):
    def __init__(self) -> None:
        super().__init__(nn.MaxPool1d(3, stride=1))


@layer(BY_TYPE, "AvgPool1d", **START)
class MeanPooling(_OfTorch):
    def __init__(self) -> None:
        super().__init__(nn.AvgPool1d(3, stride=1))


@layer(BY_TYPE, "Unfold", **START)
class Unfold(nn.Module):
    """Windows by nn.Unfold."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = nn.Unfold((3, WIDTH))
        self.weight = weight(3 * WIDTH, WIDTH, seed=30)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.windows(F.pad(x, (0, 0, 2, 0))[:, None]).transpose(1, 2) @ self.weight
