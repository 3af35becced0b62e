"""Sum the seconds of several layers, with the methods that planner and simulator call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terapipe_ds.costs.devices import LinkCard
from terapipe_ds.costs.interface import Costs, know_weights


@dataclass(frozen=True)
class Wire:
    """Time the messages of a link between two stages, which carries `bytes_per_token`."""

    link: LinkCard
    bytes_per_token: float

    def __call__(self, tokens: Any) -> Any:
        return self.link.latency_s + self.bytes_per_token * tokens / self.link.bandwidth_bytes_per_s


NO_WIRE = Wire(LinkCard(1.0, 0.0), 0.0)
"""Between parts of one stage: a message takes no time."""


class PartCosts:
    """Sum the costs of layers; the part has `weight_s` where all its layers have.

    Args:
        again: the layers that run their forward again in their backward; W has no forward in it.
        send_s, send_gradient_s, step_s: of the part, as `Costs` may have them; None where nobody knows.
    """

    weight_s: Callable[[Any, Any], Any]
    send_s: Callable[[Any], Any]
    send_gradient_s: Callable[[Any], Any]
    step_s: Callable[[], float]

    def __init__(
        self,
        layers: Sequence[Costs],
        again: Sequence[Costs] = (),
        *,
        send_s: Callable[[Any], Any] | None = None,
        send_gradient_s: Callable[[Any], Any] | None = None,
        step_s: Callable[[], float] | None = None,
    ) -> None:
        self._layers, self._again = _counted(layers), _counted(again)
        self.vectorized = all(getattr(layer, "vectorized", False) for layer in (*layers, *again))
        # a part that cannot split, or has no link, must lack the method
        optional = {
            "weight_s": self._weight_s if know_weights(layer for layer, _ in self._layers) else None,
            "send_s": send_s,
            "send_gradient_s": send_gradient_s,
            "step_s": step_s,
        }
        vars(self).update({name: method for name, method in optional.items() if method is not None})

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(count * layer.forward_s(tokens, prefix) for layer, count in self._layers)

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        # a layer that recomputes takes its forward once more, in B and never in W
        seconds = sum(count * layer.backward_s(tokens, prefix) for layer, count in self._layers)
        return seconds + sum(count * layer.forward_s(tokens, prefix) for layer, count in self._again)

    def _weight_s(self, tokens: Any, prefix: Any) -> Any:
        return sum(count * layer.weight_s(tokens, prefix) for layer, count in self._layers)


def _counted(layers: Sequence[Costs]) -> list[tuple[Any, int]]:
    """Return every layer once, with the number of times that it is in the part; equal layers are one object."""
    # by identity: costs of users need not be hashable, and equal layers are one object
    by_id = {id(layer): layer for layer in layers}
    return [(by_id[key], count) for key, count in Counter(map(id, layers)).items()]
