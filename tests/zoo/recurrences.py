"""States that run along the sequence: they begin anew in every slice."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.zoo.convolutions import by_type
from tests.zoo.layers import WIDTH, Weighted, fixed, seeded
from tests.zoo.members import AFTER, layer, update, updates

update(AFTER)(
    running_sum=lambda x: x.cumsum(1),
    running_mean=lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None],
    running_maximum=lambda x: x.cummax(1).values,
    running_logsumexp=lambda x: x.logcumsumexp(1),
)


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
class StateSpace(Weighted, decay=(WIDTH, 70), inner=(WIDTH, WIDTH, 71)):
    """A diagonal state space model with gates from the input."""

    def forward(self, x: Tensor) -> Tensor:
        rates = (F.softplus(x @ self.inner) * -self.decay.exp()).exp()
        state, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
        for t in range(x.shape[1]):
            state = rates[:, t] * state + x[:, t]
            out[:, t] = state
        return x + out


@layer(AFTER)
class StateSpaceByKernel(Weighted, decay=(WIDTH, 72)):
    """The same with constant rates, as a product with a matrix of powers."""

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        kernel = self.decay.sigmoid() ** powers.clamp(min=0)[..., None] * (powers >= 0)[..., None]
        return x + torch.einsum("tsc,bsc->btc", kernel, x)


class Recurrence(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = seeded(make())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


class Cells(Recurrence):
    """A cell of torch's own for one token after the other."""

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for token in x.unbind(1):
            state = self.inner(token, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return x + torch.stack(states, 1)


by_type("Rnn", "RNN", LayerSpec(Recurrence, lambda: nn.RNN(WIDTH, WIDTH, batch_first=True)))
by_type("Gru", "GRU", LayerSpec(Recurrence, lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)))
by_type("Lstm", "LSTM", LayerSpec(Recurrence, lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)))
by_type("GruCells", "GRUCell", LayerSpec(Cells, lambda: nn.GRUCell(WIDTH, WIDTH)))
by_type("LstmCells", "LSTMCell", LayerSpec(Cells, lambda: nn.LSTMCell(WIDTH, WIDTH)))


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
