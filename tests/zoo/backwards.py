"""Layers whose backward, or whose memory of former calls, is not one of slices; experts that look at all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.distributed.engines import LENGTH, VOCAB_SIZE, MicroBatch, micro_batch
from tests.small_models.faulty import AddAuxiliary, GradientByTokens
from tests.small_models.parts import WIDTH, Embedding, Head, Mlp, Weighted, cross_entropy, seeded, using
from tests.zoo.members import ADDED, EARLY, ONE_VALUE, add, checkpointed, layer, stack, update

layer("gain differs")(MeanGradient=using(lambda it, x: GradientByTokens.apply(x, it.gain), gain=(WIDTH, 100)))


@update("input gradient")
def normalised_gradient(x: Tensor) -> Tensor:
    """The gradient of the activations has norm one."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm())
    return x.tanh()


@layer("inner differs")
class NormalisedWeightGradient(Weighted, inner=(WIDTH, WIDTH, 101)):
    """A hook of the weight scales its gradient to norm one: of a micro-batch in stock, of a slice here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.register_hook(lambda grad: grad / grad.norm())

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.inner).tanh()


@layer("inner.parametrizations.weight.0._u")
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


class Recomputed(Weighted, inner=(WIDTH, WIDTH, 102)):
    """Under activation checkpointing its second forward is another one: it counts."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.inner).tanh() * (x.shape[1] / 23)


add("ScaledByLengthAndRecomputed", [Embedding, Mlp, Recomputed, Head], EARLY, engine=checkpointed(Recomputed))


# The gradient of a word is divided by how often it comes in the call.
by_frequency = using(
    lambda it, tokens: it.words(tokens), words=lambda: nn.Embedding(VOCAB_SIZE, WIDTH, scale_grad_by_freq=True)
)
add("FrequencyEmbedding", [by_frequency, *stack()[1:]], "words.weight differs")


# -- experts ---------------------------------------------------------------------------------------------------------


class Experts(Weighted, router=(WIDTH, 4, 80), experts=(4, WIDTH, WIDTH, 81)):
    """Four experts; each token goes where the router likes it best."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares(x)
        return x + torch.einsum("bte,btc,ecd->btd", shares, x, self.experts)

    def liking(self, x: Tensor) -> Tensor:
        return (2.5 * x @ self.router).softmax(-1)

    def shares(self, x: Tensor) -> Tensor:
        """[B, T, 4]: how much of a token's output comes from each expert."""
        liking = self.liking(x)
        return liking * F.one_hot(liking.argmax(-1), 4)


@layer(EARLY)
class LimitedExperts(Experts):
    """An expert takes at most so many tokens of a row, those that come first."""

    def shares(self, x: Tensor) -> Tensor:
        shares = super().shares(x)
        place = (shares > 0).cumsum(1)
        return shares * (place <= x.shape[1] // 6)


@layer(EARLY)
class ChoosingExperts(Experts):
    """Each expert chooses a fourth of the tokens."""

    def shares(self, x: Tensor) -> Tensor:
        liking = self.liking(x)
        chosen = liking.topk(max(1, x.shape[1] // 4), dim=1).indices
        return torch.zeros_like(liking).scatter(1, chosen, 1.0) * liking


@layer(ADDED)
class BalancingLoss(Experts):
    """The squared mean share of each expert, added in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return AddAuxiliary.apply(super().forward(x), self.liking(x).mean((0, 1)).square().sum())


class FaintBalancingLoss(Experts):
    """In a layer that is recomputed, and small beside other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        balance = self.liking(x).mean((0, 1)).square().sum()
        return AddAuxiliary.apply(super().forward(x), 1e-3 * balance)


layer(ADDED, engine=checkpointed(FaintBalancingLoss))(FaintBalancingLoss=FaintBalancingLoss)


class CarriedLoss(Experts):
    """Hands its balancing loss on, as Switch Transformers has it: share of tokens times mean liking."""

    def forward(self, x: Tensor) -> Any:
        liking = self.liking(x)
        shares = F.one_hot(liking.argmax(-1), 4).to(x.dtype).mean((0, 1))
        return super().forward(x), (shares * liking.mean((0, 1))).sum() * 4


class HeadBesideLoss(Head):
    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs[0]), inputs[1]


def loss_with_balance(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[0], labels) + 0.1 * outputs[1]


def masked_later(seed: int) -> MicroBatch:
    """All labels count in the first micro-batch."""
    return micro_batch(seed, masked=seed != 0)


class CarriedZ(Experts):
    """Hands on the mean over the tokens of a call."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x @ self.router).logsumexp(-1).square().mean()


class CarriedSum(Experts):
    """Hands on a sum over the tokens of a call."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x @ self.router).logsumexp(-1).square().sum()


class SharesHandedOn(Experts):
    """Hands on what each token adds to a z-loss."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x @ self.router).logsumexp(-1).square()


def loss_with_shares(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    each = F.cross_entropy(outputs[0].flatten(0, 1), labels.flatten(), reduction="none")
    return (each.sum() + outputs[1].sum()) / (2 * LENGTH)


add("ZHandedOn", [Embedding, Mlp, CarriedZ, HeadBesideLoss], ONE_VALUE, loss_fn=loss_with_balance)
add(
    "ZHandedOn, labels later",
    [Embedding, Mlp, CarriedZ, HeadBesideLoss],
    "loss_fn: the loss differs",
    loss_fn=loss_with_balance,
    data=masked_later,
)
add(
    "ZHandedOnAsTheLossIs",
    [Embedding, Mlp, CarriedZ, HeadBesideLoss],
    loss_fn=lambda outputs, labels: (
        F.cross_entropy(outputs[0].flatten(0, 1), labels.flatten(), reduction="none").mean() + outputs[1]
    ),
    terapipe={"loss_reduction": "mean"},
)
for kind in (SharesHandedOn, CarriedSum):
    handing_on = [Embedding, Mlp, kind, HeadBesideLoss]
    add(kind.__name__, handing_on, loss_fn=loss_with_shares, terapipe={"loss_reduction": "sum"})
add("BalanceHandedOn", [Embedding, Mlp, CarriedLoss, HeadBesideLoss], ONE_VALUE, loss_fn=loss_with_balance)
