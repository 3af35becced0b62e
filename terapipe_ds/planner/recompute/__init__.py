"""Which layers of which stages run again in their backward, so that a step fits in memory in the least time.

`frontier`  the subsets of a part's layers that are worth a look: a knapsack in time, bytes kept and bytes at the peak
`stages`    for one schedule and one plan: of each stage the subset with the least time that fits, by its exact peak
`plans`     with it slices and schedule, which need other subsets
"""

from __future__ import annotations

from .frontier import Layer
from .plans import plan_with_recompute
from .stages import PartLayers, RecomputeChoice, choose_layers, costs_of, measured_layers

__all__ = [
    "Layer",
    "PartLayers",
    "RecomputeChoice",
    "choose_layers",
    "costs_of",
    "measured_layers",
    "plan_with_recompute",
]
