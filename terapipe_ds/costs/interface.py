"""Define the interface of costs for planner and simulator, whoever measured or counted them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Costs(Protocol):
    """Give the seconds of a slice of a layer or a part.

    Costs may also have `weight_s(tokens, prefix)`, `send_s(tokens)`, `send_gradient_s(tokens)`, `step_s()` and a true
    `vectorized`. An absent method means that the time is unknown.
    """

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of F of `tokens` tokens after `prefix` tokens."""

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the seconds of the whole B, W included."""


def know_weights(costs: Iterable[Costs]) -> bool:
    """Return whether all costs know the seconds of W."""
    return all(method_of(one, "weight_s") for one in costs)


def method_of(costs: Costs, name: str) -> Callable[..., Any] | None:
    """Return an optional method of `costs`, or None where they lack it."""
    method = getattr(costs, name, None)
    return method if callable(method) else None
