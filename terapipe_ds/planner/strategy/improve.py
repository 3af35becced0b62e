"""What is tried with the best strategies: slices of their own lengths, and layers moved from part to part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from terapipe_ds.planner.errors import MemoryLimitError
from terapipe_ds.planner.search.search import plan_slices
from terapipe_ds.planner.strategy.candidate import Candidate, Score, owners_of
from terapipe_ds.planner.strategy.cuts import Bounds
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.rates import granule_of

_BUDGET = 60_000  # of the slices of a finalist, as `plan_slices` counts it
_MOST_MOVES = 60  # of a layer from one part to another, tried by replay
_MOVED = 400_000  # computations of all of these replays


def planned(priced: Priced, score: Score, limit_bytes: float) -> Score | None:
    """Return the score with slices by `plan_slices`; None where none fits."""
    owners = owners_of(score.schedule, priced.num_stages, score.chunks_per_stage)
    memory = priced.memory(score.bounds, score.recompute, owners)
    filling = -(-2 * priced.num_stages // score.plan.num_slices) + 2  # micro-batches, and what drains
    try:
        result = plan_slices(
            priced.parts(score.bounds, score.recompute, owners),
            priced.length,
            priced.num_stages,
            min(priced.num_micro_batches, filling),
            granule_of(priced.length),
            score.schedule,
            chunks_per_stage=score.chunks_per_stage,
            max_slices=max(2 * score.plan.num_slices, 2),
            memory=memory,
            memory_limit_bytes=limit_bytes,
            budget=_BUDGET,
        )
    except MemoryLimitError:
        return None
    how = score.bounds, score.schedule, result.plans[0], limit_bytes, False
    return priced.score(*how, chunks_per_stage=score.chunks_per_stage)


def move_layers(
    priced: Priced,
    score: Score,
    limit_bytes: float,
    keep: Callable[[Score | None], None],
    best_of: Callable[[Candidate], Score],
) -> None:
    """Move one layer over each edge while that makes the batch shorter; fewer moves where a replay is long.

    Args:
        keep: takes a score, and holds the best of each candidate, which `best_of` returns.
    """
    tried: set[Bounds] = set()
    best = score
    while True:
        units = priced.num_micro_batches * best.plan.num_slices * best.chunks_per_stage
        most = min(_MOST_MOVES, _MOVED // (2 * priced.num_stages * units))
        moved = [cut for cut in _neighbours(best.bounds) if cut not in tried][: max(0, most - len(tried))]
        tried.update(moved)
        for cut in moved:
            how = cut, best.schedule, best.plan, limit_bytes, False
            keep(priced.score(*how, chunks_per_stage=best.chunks_per_stage))
        if best_of(score.candidate) is best:
            return
        best = best_of(score.candidate)


def _neighbours(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the cuts with one edge moved by one layer."""
    for i in range(1, len(bounds) - 1):
        for step in (-1, 1):
            moved = bounds[i] + step
            if bounds[i - 1] < moved < bounds[i + 1]:
                yield (*bounds[:i], moved, *bounds[i + 1 :])
