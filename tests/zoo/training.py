"""Layers that do in training what they do not do in evaluation, or that keep something from call to call."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.layers import WIDTH, Weighted, scores_of
from tests.zoo.members import BACKWARD, EARLY, layer

RARE = 1e-13  # such a share of dropout draws its random numbers and drops none
ONCE = "draws random numbers once per call"
LATE = 6  # calls: more than two steps of whole micro-batches make, and fewer than those of slices


class Mixed(Weighted, inner=(WIDTH, WIDTH, 140)):
    """x + inner(x), where subclasses change x before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.before(x) @ self.inner

    def before(self, x: Tensor) -> Tensor:
        return x.tanh()


@layer(EARLY)
class BatchNormBesideDropout(Mixed):
    """Batch statistics in training alone, and dropout."""

    def before(self, x: Tensor) -> Tensor:
        if self.training:
            x = (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-3).sqrt()
        return F.dropout(x, RARE, self.training)


@layer(EARLY)
class MixingBesideDropout(Mixed, drop=lambda: nn.Dropout(RARE)):
    def before(self, x: Tensor) -> Tensor:
        return self.drop(x - x.mean(1, keepdim=True) if self.training else x)


@layer(EARLY)
class AttentionWithDropout(Mixed):
    """Attention by hand to all tokens, with dropout of its weights."""

    def before(self, x: Tensor) -> Tensor:
        return F.dropout(scores_of(x, x).softmax(-1), RARE, self.training) @ x if self.training else x


@layer("buffer mean differs")
class RunningMeanOfLater(Mixed):
    """A running mean, which outputs show after some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def before(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        return x * self.mean if self.calls > LATE else x


@layer("buffer calls differs")
class WarmedUp(Mixed):
    """A buffer counts calls, after some of which the layer does more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh() if self.calls > LATE else x


@layer("slices after the first differ")
class EveryOtherCall(Mixed):
    calls = 0

    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (self.calls % 2)


class CountedInPython(Mixed):
    """After some calls, which an attribute counts, the layer does more. The outputs of the check do not show it."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh() if self.calls > LATE else x


@layer(ONCE)
class DroppedLayer(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand((), generator=self.own) < 0.5 else super().forward(x)


@layer(ONCE)
class DroppedByPython(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.own.random() < 0.5 else super().forward(x)


@layer(ONCE)
class StochasticDepth(DroppedLayer):
    """Drops rows."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.5, generator=self.own)
        return x + kept * x.tanh() @ self.inner


@layer(ONCE)
class OneMaskForAllTokens(DroppedLayer):
    """Variational dropout."""

    def before(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, WIDTH, dtype=x.dtype).bernoulli_(0.5, generator=self.own)

    forward = Mixed.forward


def clipped(gradient: Tensor, most: float = 1e-3) -> Tensor:
    return gradient * (most / gradient.norm()).clamp(max=1.0)


@layer("inner differs")
class ClippedWeightGradient(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_hook(clipped)


@layer("inner differs")
class ClampedInPlace(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_hook(lambda gradient: gradient.clamp_(-1e-4, 1e-4))


@layer(BACKWARD)
class ClippedActivations(Mixed):
    def before(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(clipped)
        return x


def step(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.sub_(0.1 * parameter.grad)


@layer("register_post_accumulate_grad_hook", "takes a step per slice", error="TeraPipeConfigError")
class StepsInTheBackward(Mixed):
    """An optimizer step as soon as the gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.register_post_accumulate_grad_hook(step)
