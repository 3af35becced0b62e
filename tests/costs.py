"""Costs of a part of the layers, for tests of planning and simulation."""

from collections.abc import Callable
from typing import Any

Seconds = Callable[[int, int], float]


class CostsOf:
    """Costs by functions of (tokens, prefix), for messages of tokens; what is not given is not there."""

    def __init__(self, forward_s: Seconds, backward_s: Seconds, **others: Callable[..., float]) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        vars(self).update(others)


def constant(forward: float, backward: float, send: float = 0.0, back: float | None = None) -> Any:
    """Return costs that are the same for all slices. `back` is of the messages of gradients: as others by default."""
    sends = {"send_s": lambda tokens: send, "send_gradient_s": lambda tokens: send if back is None else back}
    return CostsOf(lambda tokens, prefix: forward, lambda tokens, prefix: backward, **sends)
