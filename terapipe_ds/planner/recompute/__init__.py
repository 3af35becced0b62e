"""Choose the layers of each stage that run again in their backward, so that a step fits in memory in the least time.

`choose_layers`  decides for one schedule and one plan: for each stage the fastest subset that fits, by its exact peak
`frontier`       lists the subsets that are worth a look: a knapsack in time, bytes kept and bytes at the peak
`plans`          searches slices and schedule together with the subsets, since other slices need other subsets
"""

from __future__ import annotations

from .choose_layers import PartLayers, RecomputeChoice, choose_layers, costs_of, recomputable_parts
from .plans import plan_with_recompute

__all__ = [
    "PartLayers",
    "RecomputeChoice",
    "choose_layers",
    "costs_of",
    "plan_with_recompute",
    "recomputable_parts",
]
