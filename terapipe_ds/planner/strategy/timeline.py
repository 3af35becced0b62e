"""The timeline of a strategy (stand-in)."""

from __future__ import annotations

from typing import Any

from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.strategy.priced import Candidate, Priced
from terapipe_ds.planner.strategy.question import _layers_of
from terapipe_ds.planner.strategy.strategy import Strategy
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate
from terapipe_ds.timeline import Timeline


def simulate_strategy(
    strategy: Strategy, model: Any, cluster: Cluster, *, num_micro_batches: int | None = None
) -> Timeline:
    """Return what one batch does when."""
    length = strategy.plan.sequence_length
    layers = _layers_of(model, cluster, length, strategy.dtype)
    candidate = Candidate(strategy.layout, strategy.micro_batch_size, strategy.accumulation, strategy.zero_stage)
    priced = Priced(layers, cluster, length, candidate)
    stages = strategy.grid["pipe"]
    again = strategy.recompute
    recompute = [again == "full" or (isinstance(again, list) and k in again) for k in range(stages)]
    schedule = build(strategy.schedule, stages, num_micro_batches or strategy.accumulation, len(strategy.slices))
    parts = priced.parts(tuple(strategy.partition), recompute)
    return simulate(schedule, strategy.plan, parts)
