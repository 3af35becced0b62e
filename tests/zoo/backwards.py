"""Layers whose forward is right and whose backward, or whose memory of former calls, is not one of slices."""

from __future__ import annotations

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.distributed.engines import VOCAB_SIZE
from tests.distributed.faulty_layers import GradientByTokens
from tests.zoo.layers import WIDTH, Embedding, Head, Mlp, Weighted, seeded, weight
from tests.zoo.members import EARLY, add, checkpointed, layer, stack, updates


@layer("gain differs")
class MeanGradient(Weighted, gain=(WIDTH, 100)):
    def forward(self, x: Tensor) -> Tensor:
        return GradientByTokens.apply(x, self.gain)


@updates("input gradient")
def normalised_gradient(x: Tensor) -> Tensor:
    """The gradient of the activations has norm one."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm())
    return x.tanh()


@updates("input gradient")
def centred_gradient(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad - grad.mean((0, 1)))
    return x.tanh()


@layer("inner differs")
class NormalisedWeightGradient(nn.Module):
    """A hook of the weight scales its gradient to norm one: of a micro-batch in stock, of a slice here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight(WIDTH, WIDTH, seed=101)
        self.inner.register_hook(lambda grad: grad / grad.norm())

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.inner).tanh()


@layer(EARLY)
class SpectralNorm(nn.Module):
    """Each call in training does one more step of the power iteration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = spectral_norm(seeded(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@layer(EARLY)
class RunningScale(nn.Module):
    """Divides by the running mean size of what former calls were given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.size = 0.9 * self.size + 0.1 * x.abs().mean()
        return x / self.size


@layer(EARLY)
class CountsCalls(nn.Module):
    """Warms up over the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 + 0.1 * self.calls)


class Recomputed(Weighted, inner=(WIDTH, WIDTH, 102)):
    """Under activation checkpointing its second forward is another one: it counts."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.inner).tanh() * (x.shape[1] / 23)


add(
    "ScaledByLengthAndRecomputed",
    lambda: [LayerSpec(Embedding), LayerSpec(Mlp), LayerSpec(Recomputed), LayerSpec(Head)],
    EARLY,
    engine=checkpointed(Recomputed),
)


class FrequencyEmbedding(nn.Module):
    """The gradient of a word is divided by how often it comes in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.words = seeded(nn.Embedding(VOCAB_SIZE, WIDTH, scale_grad_by_freq=True))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


add("FrequencyEmbedding", lambda: [LayerSpec(FrequencyEmbedding), *stack()[1:]], "words.weight differs")
