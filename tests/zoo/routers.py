"""Experts whose router looks at all tokens of the call, and losses of routers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.faulty_layers import AddAuxiliary
from tests.zoo.layers import WIDTH, Embedding, Head, Mlp, Weighted, cross_entropy, weight
from tests.zoo.members import BACKWARD, EARLY, ONE_VALUE, add, layer


class Experts(nn.Module):
    """Four experts; each token goes where the router likes it best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = weight(WIDTH, 4, seed=80, std=1.0)
        self.experts = weight(4, WIDTH, WIDTH, seed=81)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares(x)
        return x + torch.einsum("bte,btc,ecd->btd", shares, x, self.experts)

    def liking(self, x: Tensor) -> Tensor:
        return (x @ self.router).softmax(-1)

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


@layer(EARLY)
class BalancedRouting(Experts):
    """A few turns of Sinkhorn's algorithm give every expert as many tokens."""

    def liking(self, x: Tensor) -> Tensor:
        shares = (x @ self.router).exp()
        for _ in range(3):
            shares = shares / shares.sum(1, keepdim=True)
            shares = shares / shares.sum(-1, keepdim=True)
        return shares


@layer(EARLY)
class SkippingLayer(Weighted, gate=(WIDTH, 82), inner=(WIDTH, WIDTH, 83)):
    """Mixture of depths: half of the tokens go through the layer."""

    def forward(self, x: Tensor) -> Tensor:
        liking = x @ self.gate
        taken = liking >= liking.median(1, keepdim=True).values
        return x + (taken * liking.sigmoid())[..., None] * (x @ self.inner)


@layer(BACKWARD)
class BalancingLoss(Experts):
    """The squared mean share of each expert, added in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return AddAuxiliary.apply(super().forward(x), self.liking(x).mean((0, 1)).square().sum())


@layer(BACKWARD)
class RouterZLoss(Experts):
    """A mean over the tokens of the call, added in the backward: slices would add it once each."""

    def forward(self, x: Tensor) -> Tensor:
        return AddAuxiliary.apply(super().forward(x), (x @ self.router).logsumexp(-1).square().mean())


class CarriedLoss(Experts):
    """Hands its balancing loss on, for `loss_with_balance`."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.balance(x)

    def balance(self, x: Tensor) -> Tensor:
        """As Switch Transformers: share of tokens times mean liking."""
        liking = self.liking(x)
        return (F.one_hot(liking.argmax(-1), 4).to(x.dtype).mean((0, 1)) * liking.mean((0, 1))).sum() * 4


class HeadBesideLoss(Head):
    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs[0]), inputs[1]


def loss_with_balance(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[0], labels) + 0.1 * outputs[1]


add(
    "BalanceHandedOn",
    lambda: [LayerSpec(Embedding), LayerSpec(Mlp), LayerSpec(CarriedLoss), LayerSpec(HeadBesideLoss)],
    ONE_VALUE,
    loss_fn=loss_with_balance,
)
