"""Define layers that mix tokens without attention: convolutions, shifts, norms, products, and running states."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.small_models.parts import LONG, WIDTH, Weighted, fixed, seeded, using
from tests.zoo.members import AFTER, EARLY, FIRST, layer, update

BY_TYPE = "on rank 1: layers that mix the tokens of a sequence"


def over_tokens(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of [B, C, T]."""
    return function(x.transpose(1, 2)).transpose(1, 2)


# -- windows and shifts ----------------------------------------------------------------------------------------------

update(FIRST)(
    causal_convolution=lambda x: over_tokens(x, lambda y: F.conv1d(F.pad(y, (2, 0)), fixed(WIDTH, WIDTH, 3, seed=20))),
    dilated_convolution=lambda x: over_tokens(
        x, lambda y: F.conv1d(F.pad(y, (4, 0)), fixed(WIDTH, WIDTH, 2, seed=22), dilation=4)
    ),
    largest_of_three=lambda x: over_tokens(x, lambda y: F.max_pool1d(F.pad(y, (2, 0), value=-1e3), 3, stride=1)),
    difference_of_neighbours=lambda x: torch.diff(x, dim=1, prepend=torch.zeros_like(x[:, :1])),
)
update(EARLY)(
    centered_convolution=lambda x: over_tokens(x, lambda y: F.conv1d(y, fixed(WIDTH, WIDTH, 3, seed=23), padding=1)),
    coarse_and_fine=lambda x: over_tokens(
        x, lambda y: F.interpolate(F.interpolate(y, scale_factor=0.5), size=y.shape[-1])
    ),
    rolled_around=lambda x: torch.roll(x, 2, 1),
    next_token=lambda x: F.pad(x, (0, 0, -1, 1)),
    last_token=lambda x: x - x[:, -1:],
    sorted_tokens=lambda x: x.sort(dim=1).values,
)
update(AFTER)(first_token=lambda x: x + x[:, :1])


@update(FIRST)
def token_shift(x: Tensor) -> Tensor:
    """Mix a token with the one before, as RWKV does."""
    mix = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
    return x * mix + F.pad(x, (0, 0, 1, -1)) * (1 - mix)


@update(AFTER)
def fours(x: Tensor) -> Tensor:
    """Add up the tokens of a group of four."""
    tokens = x.shape[1]
    groups = F.pad(x, (0, 0, 0, -tokens % 4)).unflatten(1, (-1, 4))
    return groups.cumsum(2).flatten(1, 2)[:, :tokens]


# -- norms, means and products over all tokens -----------------------------------------------------------------------

update(EARLY)(
    layer_norm_over_tokens=lambda x: over_tokens(x, lambda y: F.layer_norm(y, (y.shape[-1],))),
    batch_norm_by_hand=lambda x: (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-3).sqrt(),
    without_mean=lambda x: x - x.mean(1, keepdim=True),
    softmax_over_tokens=lambda x: x * x.softmax(1),
    # One scale for the whole tensor, as some quantisations have it.
    standardised_scale=lambda x: (x / x.abs().max() * 3).tanh(),
    squeeze_and_excitation=lambda x: x * (x.mean(1, keepdim=True) @ fixed(WIDTH, WIDTH, seed=60)).sigmoid(),
    fourier_mixing=lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real,
)


layer(EARLY)(
    # A linear layer over tokens, as MLP-Mixer has it.
    TokenMixer=using(lambda it, x: x + it.tokens[: x.shape[1], : x.shape[1]] @ x, tokens=(LONG, LONG, 62))
)


# -- states that run along the sequence ------------------------------------------------------------------------------

update(AFTER)(
    running_sum=lambda x: x.cumsum(1),
    running_mean=lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None],
    running_maximum=lambda x: x.cummax(1).values,
)


@update(AFTER)
def fast_weights(x: Tensor) -> Tensor:
    """Apply the delta rule: a matrix per row that each token reads and corrects."""
    memory, out = x.new_zeros(x.shape[0], WIDTH, WIDTH), []
    for token in F.normalize(x, dim=-1).unbind(1):
        read = torch.einsum("bc,bcd->bd", token, memory)
        memory = memory + torch.einsum("bc,bd->bcd", token, token.roll(1, -1) - read)
        out.append(read)
    return torch.stack(out, 1)


@layer(AFTER)
class StateSpace(Weighted, decay=(WIDTH, 70), inner=(WIDTH, WIDTH, 71)):
    """Run a diagonal state space model with gates from the input."""

    def forward(self, x: Tensor) -> Tensor:
        rates = (F.softplus(x @ self.inner) * -self.decay.exp()).exp()
        state, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
        for t in range(x.shape[1]):
            state = rates[:, t] * state + x[:, t]
            out[:, t] = state
        return x + out


# -- layers of torch's own, which are refused by their types when the engine starts ----------------------------------


class OfTorch(nn.Module):
    """Compute x plus the result of `use` for a layer of torch's own and x."""

    def __init__(self, make: Callable[[], nn.Module], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = seeded(make()), use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.use(self.inner, x)


def windows(inner: nn.Module, x: Tensor, pad: int = 2) -> Tensor:
    return over_tokens(x, lambda y: inner(F.pad(y, (pad, 0))))[:, : x.shape[1]]


def by_cell(inner: nn.Module, x: Tensor) -> Tensor:
    state, states = None, []
    for token in x.unbind(1):
        state = inner(token, state)
        states.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(states, 1)


def recurrent(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x)[0]


def norm(inner: nn.Module, x: Tensor) -> Tensor:
    return over_tokens(x, inner)


for make, use in (
    (partial(nn.Conv1d, WIDTH, WIDTH, 3), windows),
    (partial(nn.ConvTranspose1d, WIDTH, WIDTH, 3), partial(windows, pad=0)),
    (partial(nn.MaxPool1d, 3, stride=1), windows),
    (partial(nn.GroupNorm, 3, WIDTH), norm),
    (partial(nn.BatchNorm1d, WIDTH, track_running_stats=False), norm),
    (partial(nn.InstanceNorm1d, WIDTH), norm),
    (partial(nn.GRU, WIDTH, WIDTH, batch_first=True), recurrent),
    (partial(nn.LSTM, WIDTH, WIDTH, batch_first=True), recurrent),
    (partial(nn.LSTMCell, WIDTH, WIDTH), by_cell),
):
    kind = make.func.__name__
    layer(BY_TYPE, kind, "slice_safe = True", error="TeraPipeConfigError")(
        **{f"torch_{kind}": LayerSpec(OfTorch, make, use)}
    )


@layer("(TokenConvolution): output of tokens")
class TokenConvolution(Weighted, inner=lambda: nn.Conv1d(WIDTH, WIDTH, 3)):
    """Claim to be right in slices, which avoids the refusal by its type, but begin anew in each slice."""

    slice_safe = True

    def forward(self, x: Tensor) -> Tensor:
        return x + windows(self.inner, x)
