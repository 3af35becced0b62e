"""Test planning under tensor parallelism: peers run the same slices equally often, for any clocks and caches."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe_ds.costs.profile import Profile
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.planning import choose_plan
from terapipe_ds.runtime.profiling import profiles, rounds, slice_timer
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


# -- the cache ---------------------------------------------------------------------------------------------------


def _with_cache_of_its_own(folder: str, grid: tuple[int, int, int], multiple: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of measured slices, and the plan; each rank sees another folder, as on separate machines."""
    module_class = tp.InMultiplesOfTwo if multiple == 2 else tp.TensorParallelModule
    usual = profiles.cache_path
    with pytest.MonkeyPatch.context() as patch:
        own = str(Path(folder, str(torch.distributed.get_rank())))
        patch.setattr(profiles, "cache_path", lambda _, *rest: usual(own, *rest))
        patch.setattr(rounds, "MAX_ROUNDS", rounds.MIN_ROUNDS)
        ran = _recorded(patch)
        terapipe = section(**AUTO, planner={"cache_dir": folder})
        with engine_of(tp.layers(), terapipe, **parallel(grid, module_class)) as engine:
            assert isinstance(engine, TeraPipeEngine)
            train(engine, batches(1, length=24))
            return len(ran), engine.slice_plan(24).lengths


@pytest.mark.full
def test_rank_0_decides_whether_to_measure(tmp_path: Path) -> None:
    """The second start finds the profile on rank 0 only; other grids and multiples are measured anew."""
    ranks, grid = GRIDS["tp2-pp1"]
    pool = rank_pool(ranks)
    job = {"folder": str(tmp_path), "grid": grid, "multiple": 1}
    first = pool.run(_with_cache_of_its_own, **job)
    second = pool.run(_with_cache_of_its_own, **job)
    assert len({ran for ran, _ in first}) == 1 and first[0][0] > 0
    assert [ran for ran, _ in second] == [0] * ranks and len({plan for _, plan in first + second}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    in_multiples = pool.run(_with_cache_of_its_own, **{**job, "multiple": 2})
    assert len({ran for ran, _ in in_multiples}) == 1 and in_multiples[0][0] > 0
    assert [Profile.load(path).key.tensor_parallel for path in tmp_path.glob("0/profile-*.json")] == [2, 2]
