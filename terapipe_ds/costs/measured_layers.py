"""What each layer of a measured model takes. A part of any cut takes the sum of its layers, and its overhead.

Equal layers share one fitted model, so that the sums of parts count them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import LayerProfile, Overhead, Profile, ProfileError


class OverheadCosts:
    """What every F and B takes beyond its layers, with the interface of a layer; W has none of it."""

    vectorized = True

    def __init__(self, points: Sequence[Overhead]) -> None:
        ordered = sorted(points, key=lambda point: point.tokens)
        self._tokens = [float(point.tokens) for point in ordered]
        self._forward_s = [point.forward_s for point in ordered]
        self._backward_s = [point.backward_s for point in ordered]

    def forward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return seconds, linear between what was measured and constant beyond."""
        return np.interp(tokens, self._tokens, self._forward_s) + 0.0 * prefix

    def backward_s(self, tokens: Any, prefix: Any) -> Any:
        """Return the same of a backward."""
        return np.interp(tokens, self._tokens, self._backward_s) + 0.0 * prefix

    def weight_s(self, tokens: Any, prefix: Any) -> Any:
        """Return 0 seconds."""
        return 0.0 * tokens + 0.0 * prefix


@dataclass(frozen=True)
class MeasuredLayer:
    """One layer of the model, and what is known of the part that it was measured in."""

    costs: CostModel
    profile: LayerProfile
    part_id: int
    overhead: OverheadCosts | None  # of every part, not of a layer
    layers_of_part: int
    send_s: Callable[[Any], Any] | None  # of a message of its part
    step_s: float | None  # its share of the optimizer's step, by trained parameters


def profile_layers(profile: Profile) -> list[MeasuredLayer]:
    """Return every layer of a profile, in the order of the model.

    Raises:
        ProfileError: the layers were not timed.
    """
    layers = profile.layers
    if layers is None:
        raise ProfileError(f"the layers of {profile.key.model} were not timed one by one: measure again")
    kinds = [CostModel(kind.samples, part_id=index, window=_window(kind)) for index, kind in enumerate(layers.kinds)]
    found: list[MeasuredLayer] = []
    for part, model, start, stop in zip(
        profile.parts, CostModel.from_profile(profile), layers.bounds[:-1], layers.bounds[1:], strict=True
    ):
        own = [layers.kinds[index] for index in layers.kind_of[start:stop]]
        trained = sum(kind.trained_parameters for kind in own)
        overhead = OverheadCosts(part.overheads) if part.overheads else None
        for index, kind in zip(layers.kind_of[start:stop], own, strict=True):
            share = kind.trained_parameters / trained if trained else 0.0
            step_s = None if part.step_s is None else share * part.step_s
            send_s = getattr(model, "send_s", None)
            found.append(MeasuredLayer(kinds[index], kind, part.part_id, overhead, stop - start, send_s, step_s))
    return found


def _window(kind: LayerProfile) -> float:
    tokens = (kind.memory or {}).get("window_tokens")
    return 1 + tokens if tokens else math.inf
