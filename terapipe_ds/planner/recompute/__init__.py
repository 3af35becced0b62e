"""Choose the layers of each stage that run again in their backward, so that a step fits in memory in the least time.

`choose_layers`  decides for one schedule and one plan: for each stage the fastest subset that fits, by its exact peak
`frontier`       lists the subsets that are worth a look: a knapsack in time, bytes kept and bytes at the peak
`plans`          searches slices and schedule together with the subsets, since other slices need other subsets
"""

from __future__ import annotations

from terapipe_ds.planner.recompute.choose_layers import PartLayers as PartLayers
from terapipe_ds.planner.recompute.choose_layers import RecomputeChoice as RecomputeChoice
from terapipe_ds.planner.recompute.choose_layers import choose_layers as choose_layers
from terapipe_ds.planner.recompute.choose_layers import costs_of as costs_of
from terapipe_ds.planner.recompute.choose_layers import recomputable_parts as recomputable_parts
from terapipe_ds.planner.recompute.plans import plan_with_recompute as plan_with_recompute
