"""Test planning under tensor parallelism: peers run the same slices equally often, for any clocks and caches."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.planning import choose_plan
from terapipe_ds.runtime.profiling import rounds, slice_timer
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer
from tests.distributed import tensor_parallel as tp
from tests.distributed.engines import LENGTH, batches, engine_of, error_of, section, train
from tests.distributed.harness import rank_pool
from tests.distributed.tensor_parallel import parallel
from tests.distributed.test_planning import cut_anyway

AUTO = {"slices": "auto", "granularity_tokens": 8, "verify": "off"}
GRIDS = {"tp2-pp2": (4, (2, 1, 2)), "tp2-pp1": (2, (1, 1, 2))}


def _disturb(patch: pytest.MonkeyPatch, how: str, is_disturbed: bool) -> None:
    """Disturb one rank of two peers."""
    if not is_disturbed:
        return
    if how == "slow clock":  # the measurement seems to take a million times as long, so that it wants to stop
        slow = SimpleNamespace(perf_counter=lambda: 1e6 * time.perf_counter(), process_time=time.process_time)
        patch.setattr(rounds, "time", slow)
    elif how == "noisy clock":  # every second measurement seems to take an hour
        jumps = itertools.accumulate(itertools.cycle([0.0, 0.0, 0.0, 3600.0]))
        patch.setattr(slice_timer, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + next(jumps)))
    elif how == "own profiler":  # as where one rank alone is profiled: peaks cannot be told on it
        patch.setattr(MemoryPeak, "is_available", staticmethod(lambda: False))


def _recorded(patch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record the slices whose F and B the probe of this rank runs, in their order."""
    ran: list[tuple[str, int, int]] = []
    forward, backward = SliceTimer._forward, SliceTimer.issue_backward

    def note_forward(self: SliceTimer, active: Any, *rest: Any) -> Any:
        ran.append(("F", active.start, active.stop))
        return forward(self, active, *rest)

    def note_backward(self: SliceTimer, live: Any, **options: Any) -> None:
        ran.append(("B", live.active.start, live.active.stop))
        backward(self, live, **options)

    patch.setattr(SliceTimer, "_forward", note_forward)
    patch.setattr(SliceTimer, "issue_backward", note_backward)
    return ran


def _planned(grid: tuple[int, int, int], how: str, disturbed: list[int]) -> tuple[list[int], Any, float]:
    """Return the plan, the measured slices, and the difference of a run with that plan as a list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_plan, "plan_slices", cut_anyway)
        patch.setattr(rounds, "MAX_ROUNDS", 4)
        patch.setattr(rounds, "LIMIT_STEPS", 1000)  # so that only a clock of its own would make a rank stop
        _disturb(patch, how, torch.distributed.get_rank() in disturbed)
        ran = _recorded(patch)
        with engine_of(tp.layers(), section(**AUTO), **parallel(grid)) as engine:
            assert isinstance(engine, TeraPipeEngine)
            run = train(engine, batches(2))
            lengths = list(engine.slice_plan(LENGTH).lengths)
    with engine_of(tp.layers(), section(slices=lengths, verify="off"), **parallel(grid)) as engine:
        listed = train(engine, batches(2))
    return lengths, ran, error_of(vars(run), vars(listed))


@pytest.mark.parametrize(
    ("case", "how"), [("tp2-pp1", "slow clock"), ("tp2-pp1", "own profiler"), ("tp2-pp2", "noisy clock")]
)
@pytest.mark.sample(1)
def test_peers_plan_alike_and_train_as_with_that_plan_by_hand(case: str, how: str) -> None:
    ranks, grid = GRIDS[case]
    results = rank_pool(ranks).run(_planned, grid=grid, how=how, disturbed=[1])
    assert [lengths for lengths, *_ in results] == [[9, 13, 1]] * ranks
    assert len({tuple(ran) for _, ran, _ in results}) == 1, "other slices, or another order, or more rounds"
    assert len(results[0][1]) > 50
    assert [error for *_, error in results] == [0.0] * ranks
