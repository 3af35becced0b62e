"""When does each device of a strategy do what? Its whole schedule, with its costs and links."""

from __future__ import annotations

from typing import Any

from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.strategy.candidate import Candidate, owners_of
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.question import layers_of
from terapipe_ds.planner.strategy.strategy import Strategy
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate
from terapipe_ds.timeline import Timeline


def simulate_strategy(
    strategy: Strategy, model: Any, cluster: Cluster, *, num_micro_batches: int | None = None
) -> Timeline:
    """Return what one batch of a strategy does when, before gradients are reduced.

    Args:
        model, cluster: those that the strategy was planned for, as `rank_strategies` takes them.
        num_micro_batches: fewer than the batch has; None: all.

    Raises:
        PlannerError: as `rank_strategies` does for a model that it cannot read.
    """
    length, stages, chunks = strategy.plans[0].sequence_length, strategy.grid["pipe"], strategy.chunks_per_stage
    candidate = Candidate(strategy.layout, strategy.micro_batch_size, strategy.accumulation, strategy.zero_stage)
    priced = Priced(layers_of(model, cluster, length, strategy.dtype), cluster, length, candidate)
    again = strategy.recompute
    recompute = [again == "full" or (isinstance(again, list) and stage_id in again) for stage_id in range(stages)]
    number = num_micro_batches or strategy.accumulation
    plans = [strategy.plans[m % strategy.accumulation] for m in range(number)]
    counts = stages, len(plans), [plan.num_slices for plan in plans]
    parts = priced.parts(tuple(strategy.partition), recompute, owners_of(strategy.schedule, stages, chunks))
    return simulate(build(strategy.schedule, *counts, chunks_per_stage=chunks), plans, parts)
