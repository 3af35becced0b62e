"""Define layers whose backward or memory of earlier calls does not work per slice; experts that look at all tokens."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.distributed.engines import LENGTH, VOCAB_SIZE, micro_batch
from tests.small_models.faulty import AddAuxiliary, GradientByTokens
from tests.small_models.parts import WIDTH, Embedding, Head, Mlp, Weighted, cross_entropy, seeded, using
from tests.zoo.members import ADDED, EARLY, ONE_VALUE, add, checkpointed, layer, stack, update

layer("gain differs")(MeanGradient=using(lambda it, x: GradientByTokens.apply(x, it.gain), gain=(WIDTH, 100)))


@update("input gradient")
def normalised_gradient(x: Tensor) -> Tensor:
    """Scale the gradient of the activations to norm one."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm())
    return x.tanh()


@layer("inner differs")
class NormalisedWeightGradient(Weighted, inner=(WIDTH, WIDTH, 101)):
    """Scale the weight's gradient to norm one in a hook: per micro-batch in the stock engine, per slice here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.register_hook(lambda grad: grad / grad.norm())

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.inner).tanh()


def with_spectral_norm() -> nn.Module:
    """Return a layer that makes one more step of the power iteration in each training call."""
    torch.manual_seed(3)
    return spectral_norm(seeded(nn.Linear(WIDTH, WIDTH)))


layer("inner.parametrizations.weight.0._u")(SpectralNorm=using(lambda it, x: x + it.inner(x), inner=with_spectral_norm))


@layer(EARLY)
class SeededNoise(nn.Module):
    """Add the same noise in each call, by place in the call."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return x + torch.randn(x.shape, dtype=x.dtype, generator=generator)


@layer(EARLY)
class RunningScale(nn.Module):
    """Divide by the running mean size of the inputs of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.size = 0.9 * self.size + 0.1 * x.abs().mean()
        return x / self.size


class Recomputed(Weighted, inner=(WIDTH, WIDTH, 102)):
    """Scale by the length. Under activation checkpointing, the second forward is a further one: it counts."""

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
    """Send each token to one of four experts, the one with the router's largest score."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares(x)
        return x + torch.einsum("bte,btc,ecd->btd", shares, x, self.experts)

    def liking(self, x: Tensor) -> Tensor:
        return (2.5 * x @ self.router).softmax(-1)

    def shares(self, x: Tensor) -> Tensor:
        """Return [B, T, 4]: how much of a token's output comes from each expert."""
        liking = self.liking(x)
        return liking * F.one_hot(liking.argmax(-1), 4)


@layer(EARLY)
class LimitedExperts(Experts):
    """Limit the tokens of a row that an expert takes to the first ones."""

    def shares(self, x: Tensor) -> Tensor:
        shares = super().shares(x)
        place = (shares > 0).cumsum(1)
        return shares * (place <= x.shape[1] // 6)


@layer(EARLY)
class ChoosingExperts(Experts):
    """Let each expert choose a fourth of the tokens."""

    def shares(self, x: Tensor) -> Tensor:
        liking = self.liking(x)
        chosen = liking.topk(max(1, x.shape[1] // 4), dim=1).indices
        return torch.zeros_like(liking).scatter(1, chosen, 1.0) * liking


@layer(ADDED)
class BalancingLoss(Experts):
    """Add the squared mean share of each expert in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return AddAuxiliary.apply(super().forward(x), self.liking(x).mean((0, 1)).square().sum())


class FaintBalancingLoss(Experts):
    """Add a balancing loss in a recomputed layer, small beside other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        balance = self.liking(x).mean((0, 1)).square().sum()
        return AddAuxiliary.apply(super().forward(x), 1e-3 * balance)


layer(ADDED, engine=checkpointed(FaintBalancingLoss))(FaintBalancingLoss=FaintBalancingLoss)


class CarriedLoss(Experts):
    """Hand on its balancing loss, as Switch Transformers has it: share of tokens times mean router probability."""

    def forward(self, x: Tensor) -> Any:
        liking = self.liking(x)
        shares = F.one_hot(liking.argmax(-1), 4).to(x.dtype).mean((0, 1))
        return super().forward(x), (shares * liking.mean((0, 1))).sum() * 4


class HeadBesideLoss(Head):
    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs[0]), inputs[1]


def loss_with_balance(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[0], labels) + 0.1 * outputs[1]


class CarriedZ(Experts):
    """Hand on `joined` of the tokens' shares of a z-loss."""

    def __init__(self, joined: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.joined = joined

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.joined((x @ self.router).logsumexp(-1).square())


def loss_with_shares(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    each = F.cross_entropy(outputs[0].flatten(0, 1), labels.flatten(), reduction="none")
    return (each.sum() + outputs[1].sum()) / (2 * LENGTH)


MEAN_HANDED_ON = [Embedding, Mlp, LayerSpec(CarriedZ, Tensor.mean), HeadBesideLoss]
add("ZHandedOn", MEAN_HANDED_ON, ONE_VALUE, loss_fn=loss_with_balance)
add(
    "ZHandedOn, labels later",
    MEAN_HANDED_ON,
    "loss_fn: the loss differs",
    loss_fn=loss_with_balance,
    data=lambda seed: micro_batch(seed, masked=seed != 0),  # all labels of the first one count
)
add(
    "ZHandedOnAsTheLossIs",
    MEAN_HANDED_ON,
    loss_fn=lambda outputs, labels: (
        F.cross_entropy(outputs[0].flatten(0, 1), labels.flatten(), reduction="none").mean() + outputs[1]
    ),
    terapipe={"loss_reduction": "mean"},
)
for name, joined in (("SharesHandedOn", Tensor.clone), ("CarriedSum", Tensor.sum)):
    handing_on = [Embedding, Mlp, LayerSpec(CarriedZ, joined), HeadBesideLoss]
    add(name, handing_on, loss_fn=loss_with_shares, terapipe={"loss_reduction": "sum"})
add("BalanceHandedOn", [Embedding, Mlp, CarriedLoss, HeadBesideLoss], ONE_VALUE, loss_fn=loss_with_balance)
