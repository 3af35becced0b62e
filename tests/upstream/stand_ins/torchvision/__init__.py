"""Replace torchvision for DeepSpeed's tests where it is not installed: random images, the same in every process."""

from torchvision import datasets, transforms  # noqa: F401

__version__ = "0.5.0"  # the oldest that the tests take
