"""Define layers that cannot be sliced, each with one fault, and the text that `verify` must report for it."""

from typing import Any

import torch
from torch import Tensor, nn

from terapipe_ds.attention import active_slice, sliced_attention
from tests.small_models.parts import causal, scores_of

WIDTH, HEADS = 16, 2


def linear(width_in: int, width_out: int, seed: int) -> nn.Linear:
    layer = nn.Linear(width_in, width_out)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(width_out, width_in, generator=generator) * 0.3)
        layer.bias.copy_(torch.randn(width_out, generator=generator) * 0.1)
    return layer


def heads(x: Tensor) -> Tensor:
    """Reshape [B, T, H * D] -> [B, H, T, D]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Base(nn.Module):
    """Apply a residual layer [B, T, WIDTH] -> the same, by `update`."""

    def __init__(self, index: int = 90) -> None:
        super().__init__()
        self.index = index
        self.qkv = linear(WIDTH, 3 * WIDTH, 1)
        self.out = linear(WIDTH, WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.update(x))
        y += x
        return y

    def heads(self, x: Tensor) -> list[Tensor]:
        return [heads(part) for part in self.qkv(x).chunk(3, -1)]

    def update(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, k, v, self.index)


class OwnLengthTable(Base):
    """Add learned positions [:T]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(4)))

    def update(self, x: Tensor) -> Tensor:
        return super().update(x + self.table[: x.shape[1]])


class HiddenPlainAttention(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)


class Bidirectional(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).softmax(-1) @ v


class RunningSum(Base):
    def update(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * 0.1


class AddAuxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=grad.dtype)


class BalancedExperts(nn.Module):
    """Route to two experts without capacity; a balancing loss over the tokens of the call joins in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.router = linear(WIDTH, 2, 7)
        self.experts = nn.ModuleList([linear(WIDTH, WIDTH, 8), linear(WIDTH, WIDTH, 9)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        mixed = sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        balance = (shares.mean((0, 1)) ** 2).sum()
        return AddAuxiliary.apply(x + mixed, balance)


class DetachedPrefix(Base):
    """Keep a cache of its own whose prefix gets no gradient."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        active = active_slice()
        if active is None or active.is_whole:
            return causal(q, k, v)
        if active.start == 0:
            self.kept: list[tuple[Tensor, Tensor]] = []
        keys, values = (torch.cat([*(pair[i].detach() for pair in self.kept), own], 2) for i, own in ((0, k), (1, v)))
        if len(self.kept) == active.slice_id:
            self.kept.append((k, v))
        return causal(q, keys, values)


class _Dropped(torch.autograd.Function):
    """Return the gradients of keys and values as sliced attention does, but without the share of later slices."""

    @staticmethod
    def forward(ctx: Any, k: Tensor) -> Tensor:
        return k.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        active = active_slice()
        return grad if active is None or active.stop == active.sequence_length else 0 * grad


class WrongOwnBackward(Base):
    """Drop the gradients of keys and values of all slices but the last."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliced_attention(q, _Dropped.apply(k), _Dropped.apply(v), self.index)


class GradientByTokens(torch.autograd.Function):
    """Compute x * gain, whose gradient of the gain is a mean over the tokens of the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).mean((0, 1))


class Pooled(nn.Module):
    """Hand on a mean over the tokens, beside the hidden states."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.mean(1).square()


LAYERS: dict[type[nn.Module], tuple[str, str]] = {  # the difference, and what it shows
    OwnLengthTable: ("output of tokens 8..", "their positions start at 0"),
    HiddenPlainAttention: ("output of tokens 8..", "they see no tokens before them"),
    Bidirectional: ("output of tokens 0..", "early outputs change with later tokens"),
    RunningSum: ("output of tokens 8..", "slices after the first differ"),
    BalancedExperts: ("input gradient of tokens 0..", "the layer adds a loss of its own in the backward"),
    DetachedPrefix: ("input gradient of tokens 0..", "gradients from later slices to earlier tokens are lost"),
    WrongOwnBackward: ("input gradient of tokens 0..", "an autograd.Function"),
    Pooled: ("output without tokens", "loss to train on needs labels that are shifted in the data; an auxiliary loss"),
}
