"""Transform tensors of shape [channels, height, width]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Transform = Callable[[torch.Tensor], torch.Tensor]


class Compose:
    """Apply one transform after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Return the image, which is a tensor already."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image


class Normalize:
    """Return (image - mean) / std, by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std
