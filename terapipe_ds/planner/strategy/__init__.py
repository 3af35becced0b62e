"""Plan a strategy for a model on a cluster: stages, tensor and data parallelism, placement, cuts, schedule, slices.

enumerated   tensor ranks that divide heads and widths and lie within a node; stages and replicas, which multiply with
             them to the devices; micro-batch size and accumulation, which multiply with the replicas to the global
             batch; ZeRO 0 and 1 where they differ; the order of the axes: the placement (see `planner.cluster`)
programs     the cut of the layers: least (m - 1/s) T + S / s with the memory of every stage (see `layers.cuts`), for
             several numbers of slices; a stage recomputes only where it does not fit otherwise
bounds       for every candidate a time that no cut, schedule and plan beats (see `bound.Bounded.lower_bound_s` and
             `chunked_bound_s`): fill, the work of the slowest stage, reduction and optimizer step
replays      of the schedule that the engine will run, for the twelve best proposals, with the links of the machines
             between neighbours; then each stage reduces its gradients when its own last backward is done, as the
             engine does, and steps. Long batches are compared by two shorter runs, and the best is replayed whole

Costs come per layer, from one source (see `planner.layers`). The answer has its distance from the bound of all
unsettled candidates. Proposals are replayed with `1f1b` and `gpipe` unsliced, and with `seq1f1b` and `terapipe` sliced.
The search also tries the best four with split backwards and with two and four parts per stage (see `shapes`), where a
batch is short enough for that to matter. Layers without costs of slices have only `1f1b` and `gpipe`.
"""

from __future__ import annotations

from terapipe_ds.planner.cluster import Cluster as Cluster
from terapipe_ds.planner.layers.chain import LayerChain as LayerChain
from terapipe_ds.planner.strategy.candidate import USABLE as USABLE
from terapipe_ds.planner.strategy.question import plan_strategy as plan_strategy
from terapipe_ds.planner.strategy.question import price_strategy as price_strategy
from terapipe_ds.planner.strategy.question import rank_strategies as rank_strategies
from terapipe_ds.planner.strategy.question import simulate_strategy as simulate_strategy
from terapipe_ds.planner.strategy.question import size_for as size_for
from terapipe_ds.planner.strategy.question import size_of as size_of
from terapipe_ds.planner.strategy.search import TOO_SOON as TOO_SOON
from terapipe_ds.planner.strategy.space import check_limit as check_limit
from terapipe_ds.strategy import Strategy as Strategy
