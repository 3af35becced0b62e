"""Draw images of noise with random labels, each from a generator that is seeded by its index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FakeData(torch.utils.data.Dataset):
    """Give what torchvision's class of this name gives, with a tensor in place of an image."""

    def __init__(
        self,
        size: int,
        image_size: tuple[int, ...],
        num_classes: int,
        transform: Callable[[torch.Tensor], torch.Tensor],
        random_offset: int = 0,
    ) -> None:
        self.size, self.image_size, self.num_classes = size, image_size, num_classes
        self.transform, self.random_offset = transform, random_offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.random_offset + index)
        image = torch.rand(self.image_size, generator=generator)
        return self.transform(image), int(torch.randint(self.num_classes, (1,), generator=generator))
