"""Convolutions, shifts, pooling and other windows over tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.zoo.layers import WIDTH, fixed, seeded, weight
from tests.zoo.members import AFTER, EARLY, FIRST, layer, layers, update, updates

BY_TYPE = "layers that mix the tokens of a sequence"


def over_tokens(x: Tensor, function: object) -> Tensor:
    """`function` of [B, C, T]."""
    return function(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[operator]


update(FIRST)(
    causal_convolution=lambda x: over_tokens(x, lambda y: F.conv1d(F.pad(y, (2, 0)), fixed(WIDTH, WIDTH, 3, seed=20))),
    depthwise_convolution=lambda x: over_tokens(
        x, lambda y: F.conv1d(F.pad(y, (3, 0)), fixed(WIDTH, 1, 4, seed=21), groups=WIDTH)
    ),
    dilated_convolution=lambda x: over_tokens(
        x, lambda y: F.conv1d(F.pad(y, (4, 0)), fixed(WIDTH, WIDTH, 2, seed=22), dilation=4)
    ),
    transposed_convolution=lambda x: over_tokens(
        x, lambda y: F.conv_transpose1d(y, fixed(WIDTH, WIDTH, 3, seed=25))[..., : y.shape[-1]]
    ),
    windows_by_unfold=lambda x: (
        F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1) * torch.tensor([0.2, 0.5, 0.3], dtype=x.dtype)
    ).sum(-1),
    largest_of_three=lambda x: over_tokens(x, lambda y: F.max_pool1d(F.pad(y, (2, 0), value=-1e3), 3, stride=1)),
    mean_of_three=lambda x: over_tokens(x, lambda y: F.avg_pool1d(F.pad(y, (2, 0)), 3, stride=1)),
    shift_by_joining=lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    shift_by_index=lambda x: x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)],
    difference_of_neighbours=lambda x: torch.diff(x, dim=1, prepend=torch.zeros_like(x[:, :1])),
)


update(EARLY)(
    centered_convolution=lambda x: over_tokens(x, lambda y: F.conv1d(y, fixed(WIDTH, WIDTH, 3, seed=23), padding=1)),
    coarse_and_fine=lambda x: over_tokens(
        x, lambda y: F.interpolate(F.interpolate(y, scale_factor=0.5), size=y.shape[-1])
    ),
    rolled_around=lambda x: torch.roll(x, 2, 1),
    next_token=lambda x: F.pad(x, (0, 0, -1, 1)),
    last_token=lambda x: x - x[:, -1:],
    sorted_tokens=lambda x: x.sort(dim=1).values,
)


@updates(FIRST)
def convolution_of_two_dimensions(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 2, 0))[:, None]
    return F.conv2d(padded, fixed(1, 1, 3, 3, seed=24))[:, 0]


@updates(AFTER)
def convolution_by_fourier(x: Tensor) -> Tensor:
    tokens = x.shape[1]
    kernel = 0.9 ** torch.arange(tokens, dtype=x.dtype)[:, None]
    spectrum = torch.fft.rfft(x, 2 * tokens, dim=1) * torch.fft.rfft(kernel, 2 * tokens, dim=0)
    return torch.fft.irfft(spectrum, 2 * tokens, dim=1)[:, :tokens]


@updates(FIRST)
def windows_of_images(x: Tensor) -> Tensor:
    columns = F.unfold(F.pad(x, (0, 0, 2, 0))[:, None], (3, WIDTH))  # [B, 3 * WIDTH, T]
    return columns.transpose(1, 2).unflatten(-1, (3, WIDTH)).sum(2)


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


@updates(FIRST)
def shift_by_gather(x: Tensor) -> Tensor:
    places = (torch.arange(x.shape[1]) - 3).clamp(min=0)[None, :, None]
    return x.gather(1, places.expand_as(x))


@updates(AFTER)
def first_token(x: Tensor) -> Tensor:
    return x + x[:, :1]


@updates(AFTER)
def fours(x: Tensor) -> Tensor:
    """The tokens of a group of four add up."""
    tokens = x.shape[1]
    groups = F.pad(x, (0, 0, 0, -tokens % 4)).unflatten(1, (-1, 4))
    return groups.cumsum(2).flatten(1, 2)[:, :tokens]


# -- layers of torch's own -------------------------------------------------------------------------------------------


class OfTorch(nn.Module):
    """x + a causal layer of [B, C, T]."""

    def __init__(self, make: Callable[[], nn.Module], pad: int = 2) -> None:
        super().__init__()
        self.inner, self.pad = seeded(make()), pad

    def forward(self, x: Tensor) -> Tensor:
        return x + over_tokens(x, lambda y: self.inner(F.pad(y, (self.pad, 0))))[:, : x.shape[1]]


class OfImages(OfTorch):
    """The same of [B, 1, C, T]."""

    def forward(self, x: Tensor) -> Tensor:
        return x + over_tokens(x, lambda y: self.inner(F.pad(y, (2, 0))[:, None])[:, 0])


START = {"error": "TeraPipeConfigError"}


def by_type(name: str, kind: str, spec: LayerSpec) -> None:
    """Add a layer of torch's own that is refused by its type, when the engine starts."""
    layers(BY_TYPE, kind, **START)(**{name: spec})


by_type("Convolution1d", "Conv1d", LayerSpec(OfTorch, lambda: nn.Conv1d(WIDTH, WIDTH, 3)))
by_type("Convolution2d", "Conv2d", LayerSpec(OfImages, lambda: nn.Conv2d(1, 1, 3, padding=(1, 0))))
by_type("TransposedConvolution", "ConvTranspose1d", LayerSpec(OfTorch, lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3), 0))
by_type("MaximumPooling", "MaxPool1d", LayerSpec(OfTorch, lambda: nn.MaxPool1d(3, stride=1)))
by_type("MeanPooling", "AvgPool1d", LayerSpec(OfTorch, lambda: nn.AvgPool1d(3, stride=1)))


@layer(BY_TYPE, "Unfold", **START)
class Unfold(nn.Module):
    """Windows by nn.Unfold."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = nn.Unfold((3, WIDTH))
        self.weight = weight(3 * WIDTH, WIDTH, seed=30)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.windows(F.pad(x, (0, 0, 2, 0))[:, None]).transpose(1, 2) @ self.weight
