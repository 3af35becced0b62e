"""States that run along the sequence: they begin anew in every slice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.convolutions import BY_TYPE, START
from tests.zoo.layers import WIDTH, fixed, seeded, weight
from tests.zoo.members import AFTER, layer, updates


@updates(AFTER)
def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(1)


@updates(AFTER)
def running_mean(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


@updates(AFTER)
def running_maximum(x: Tensor) -> Tensor:
    return x.cummax(1).values


@updates(AFTER)
def running_logsumexp(x: Tensor) -> Tensor:
    return x.logcumsumexp(1)


@updates(AFTER)
def moving_average(x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.8 * state + 0.2 * token
        states.append(state)
    return torch.stack(states, 1)


@updates(AFTER)
def scan_by_doubling(x: Tensor) -> Tensor:
    """A decaying sum in log2(T) shifts."""
    shift, decay = 1, 0.9
    while shift < x.shape[1]:
        x = x + decay * F.pad(x, (0, 0, shift, -shift))
        shift, decay = 2 * shift, decay * decay
    return x


@updates(AFTER)
def fast_weights(x: Tensor) -> Tensor:
    """The delta rule: a matrix per row that each token reads and corrects."""
    memory, out = x.new_zeros(x.shape[0], WIDTH, WIDTH), []
    for token in F.normalize(x, dim=-1).unbind(1):
        read = torch.einsum("bc,bcd->bd", token, memory)
        memory = memory + torch.einsum("bc,bd->bcd", token, token.roll(1, -1) - read)
        out.append(read)
    return torch.stack(out, 1)


@layer(AFTER)
class StateSpace(nn.Module):
    """A diagonal state space model with gates from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.inner = weight(WIDTH, seed=70), weight(WIDTH, WIDTH, seed=71)

    def forward(self, x: Tensor) -> Tensor:
        rates = (F.softplus(x @ self.inner) * -self.decay.exp()).exp()
        state, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
        for t in range(x.shape[1]):
            state = rates[:, t] * state + x[:, t]
            out[:, t] = state
        return x + out


@layer(AFTER)
class StateSpaceByKernel(nn.Module):
    """The same with constant rates, as a product with a matrix of powers."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = weight(WIDTH, seed=72)

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        kernel = self.decay.sigmoid() ** powers.clamp(min=0)[..., None] * (powers >= 0)[..., None]
        return x + torch.einsum("tsc,bsc->btc", kernel, x)


class _Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(self.make())

    def make(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


@layer(BY_TYPE, "RNN", **START)
class Rnn(_Recurrence):
    def make(self) -> nn.Module:
        return nn.RNN(WIDTH, WIDTH, batch_first=True)


@layer(BY_TYPE, "GRU", **START)
class Gru(_Recurrence):
    def make(self) -> nn.Module:
        return nn.GRU(WIDTH, WIDTH, batch_first=True)


@layer(BY_TYPE, "LSTM", **START)
class Lstm(_Recurrence):
    def make(self) -> nn.Module:
        return nn.LSTM(WIDTH, WIDTH, batch_first=True)


@layer(BY_TYPE, "GRUCell", **START)
class GruCells(_Recurrence):
    def make(self) -> nn.Module:
        return nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = self.inner(token, state)
            states.append(state)
        return x + torch.stack(states, 1)


@layer(BY_TYPE, "LSTMCell", **START)
class LstmCells(_Recurrence):
    def make(self) -> nn.Module:
        return nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for token in x.unbind(1):
            state = self.inner(token, state)
            states.append(state[0])
        return x + torch.stack(states, 1)


@layer(AFTER)
class OwnGru(nn.Module):
    """A gated recurrence out of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = seeded(nn.Linear(2 * WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, states = fixed(WIDTH, seed=73).expand(len(x), -1), []
        for token in x.unbind(1):
            gate, new = self.gates(torch.cat([token, state], -1)).chunk(2, -1)
            state = state + gate.sigmoid() * (new.tanh() - state)
            states.append(state)
        return x + torch.stack(states, 1)
