"""Let random operations give constants, so that a layer with dropout can be compared as it trains.

In evaluation mode a layer leaves out more than its dropout: batch statistics, auxiliary losses, noise, dropped layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_KEPT = ("bernoulli", "bernoulli_", "exponential", "exponential_")
_UNIFORM_OR_NORMAL = (
    "rand", "rand_like", "randn", "randn_like", "normal", "normal_", "normal_functional", "uniform", "uniform_",
)  # fmt: skip
_INTEGERS = ("randint", "randint_like", "random", "random_", "multinomial")


class ConstantDraws(TorchDispatchMode):
    """Replace what random operations draw; dropout keeps every number. Recomputed forwards and backwards do alike.

    `sizes` holds how many numbers each operation would have drawn. `unknown` names the operations that draw still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.unknown: set[str] = set()

    def take_sizes(self) -> list[int]:
        """Return how many numbers each operation since the last call would have drawn."""
        sizes, self.sizes = self.sizes, []
        return sizes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        names = [each.name for each in func._schema.arguments]  # noqa: SLF001  # operators have no other
        if "dropout_p" in names:  # a kernel of attention, which draws only for its dropout
            place = names.index("dropout_p")
            if place >= len(args):
                return func(*args, **{**kwargs, "dropout_p": 0.0})
            return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return self._drop_nothing(*args, **kwargs)
        drawn = func(*args, **kwargs)
        constant = _CONSTANTS.get(name)
        if constant is None:
            self.unknown.add(name)
            return drawn
        if drawn.is_floating_point():  # integers are choices, or seeds of a generator
            self.sizes.append(drawn.numel())
        return constant(drawn, args)

    def _drop_nothing(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Return what torch's fused dropout gives where it keeps every number; its backward scales alike."""
        kept = torch.ones_like(x, dtype=torch.bool)
        if train is False:
            return x.clone(), kept
        self.sizes.append(x.numel())
        return x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), kept


def _filled(number: float) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    return lambda drawn, args: drawn.fill_(number)


def _in_order(drawn: Tensor, args: Sequence[Any]) -> Tensor:
    return drawn.copy_(drawn.sort().values)


def _lowest(drawn: Tensor, args: Sequence[Any]) -> Tensor:
    """Fill integers with the least that may be drawn, which is the first of two bounds, or 0."""
    bounds = [each for each in args if type(each) is int]
    return drawn.fill_(bounds[0] if len(bounds) > 1 else 0)


def _between(drawn: Tensor, args: Sequence[Any]) -> Tensor:
    """Fill with a number that a uniform distribution between two bounds may give."""
    bounds = [float(each) for each in args[1:3] if isinstance(each, (int, float))]
    return drawn.fill_(sum(bounds) / 2 if len(bounds) == 2 else 0.5)


_CONSTANTS: dict[str, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    **dict.fromkeys(_KEPT, _filled(1.0)),
    **dict.fromkeys(_UNIFORM_OR_NORMAL, _filled(0.5)),
    **dict.fromkeys(_INTEGERS, _lowest),
    "uniform": _between,
    "uniform_": _between,
    "randperm": _in_order,
}
