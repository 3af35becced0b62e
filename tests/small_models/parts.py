"""Define the layers of most small models: hidden size 12, fp64, weights from seeds.

Attention and MLP have biases and work in place, as the models of users do. Keys have no bias: its gradient is zero, and
Adam would turn the rounding of that into a step.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds import attention as terapipe_attention

WIDTH, HEADS, VOCAB_SIZE, IGNORE_INDEX = 12, 2, 31, -100
LONG = 200  # tokens of a long text
Module = TypeVar("Module", bound=nn.Module)


def weight(*shape: int, seed: int, std: float = 0.4) -> nn.Parameter:
    return nn.Parameter(fixed(*shape, seed=seed, std=std))


def fixed(*shape: int, seed: int, std: float = 0.4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)


def seeded(module: Module, seed: int = 50) -> Module:
    """Return a module of torch's own in fp64, with weights that follow from the seed."""
    module.double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(fixed(*parameter.shape, seed=seed + index))
    return module


class Weighted(nn.Module):
    """Make the weights and modules that a class names.

    `class Mine(Weighted, inner=(3, 4, 17), norm=lambda: nn.LayerNorm(4))` has [3, 4] from the seed 17, and the norm.
    """

    made: dict[str, Any] = {}

    def __init_subclass__(cls, **made: Any) -> None:
        cls.made = {**cls.made, **made}

    def __init__(self) -> None:
        super().__init__()
        for index, (name, made) in enumerate(self.made.items()):
            module = seeded(made(), 50 + 10 * index) if callable(made) else weight(*made[:-1], seed=made[-1])
            setattr(self, name, module)


class Uses(Weighted):
    """Compute inputs -> use(layer, inputs), with weights and modules by name as `Weighted` takes them."""

    def __init__(self, use: Callable[[Any, Any], Any], **made: Any) -> None:
        self.made = made
        super().__init__()
        self.use = use

    def forward(self, inputs: Any) -> Any:
        return self.use(self, inputs)


using = functools.partial(LayerSpec, Uses)


class Calls(nn.Module):
    """Make a layer without weights of a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Any) -> Any:
        return self.function(inputs)


class Embedding(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(VOCAB_SIZE, WIDTH, seed=1, std=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Head(Weighted, weight=(VOCAB_SIZE, WIDTH, 2)):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Mlp(Weighted, up=lambda: nn.Linear(WIDTH, 2 * WIDTH), down=lambda: nn.Linear(2 * WIDTH, WIDTH)):
    """Compute each token on its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.silu(self.up(x), inplace=True))
        y += x
        return y


class Residual(Weighted, inner=(WIDTH, WIDTH, 5), outer=(WIDTH, WIDTH, 6)):
    """Compute x + out(update(in(x)))."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        return x + self.update(x @ self.inner) @ self.outer


class Attention(Weighted, qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH, bias=False), outer=lambda: nn.Linear(WIDTH, WIDTH)):
    """Compute multi-head attention around `attend`, which is a method unless the constructor gets one."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        if attend is not None:
            self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = self.outer(self.attend(q, k, v).transpose(1, 2).flatten(2))
        y += x
        return y


def later(tokens: int, keys: int | None = None) -> Tensor:
    """Return [T, T]: true where the key comes after the query."""
    keys = tokens if keys is None else keys
    return torch.ones(tokens, keys, dtype=torch.bool).triu(1 + keys - tokens)


def causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Return attention by hand; queries belong to the last of the keys' tokens."""
    scores = (scores_of(q, k) + bias).masked_fill(later(q.shape[2], k.shape[2]), float("-inf"))
    return scores.softmax(-1) @ v


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX)


def sliced_attention(q: Tensor, k: Tensor, v: Tensor, layer: Any, **options: Any) -> Tensor:
    return _attention(q, k, v, layer, **options)


_attention: Callable[..., Tensor] = terapipe_attention.sliced_attention
"""What `engines.torch_attention` replaces in stock runs, however a model has imported it."""
