"""Replace torchvision for other projects where it is not installed: random images, the same in every process."""

import sys
from typing import Any

import torch

__version__ = "0.5.0"  # the oldest that the tests take
datasets = transforms = sys.modules[__name__]
sys.modules.update({f"{__name__}.datasets": datasets, f"{__name__}.transforms": transforms})


class FakeData(torch.utils.data.Dataset):
    """Give noise of `image_size` with random labels, each from a generator that is seeded by its index."""

    def __init__(
        self, size: int, image_size: tuple[int, ...], num_classes: int, transform: Any, random_offset: int = 0
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


VisionDataset = FakeData  # Megatron-DeepSpeed imports its vision models with everything else
ToTensor = torch.nn.Identity  # an image is a tensor already


def Compose(steps: list[Any]) -> Any:
    return torch.nn.Sequential(*steps)


class Normalize(torch.nn.Module):
    """Give (image - mean) / std, by channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std
