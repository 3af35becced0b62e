"""Test the rank pool itself: results come back by rank, and every failure ends fast with a readable report."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from tests.distributed.harness import PoolCache, RankFailure, RankPool

SLOW_S = 20.0  # far below the time a rank would hang, far above what a loaded machine needs to start ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def rank_and_sum(value: int) -> tuple[int, float, int, int]:
    import torch
    from torch import distributed

    total = torch.tensor(float(value + distributed.get_rank()))
    distributed.all_reduce(total)
    return distributed.get_rank(), total.item(), os.getpid(), torch.get_num_threads()


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def fail(failing_rank: int, how: str) -> int:
    from torch import distributed

    print("printed before", flush=True)
    if distributed.get_rank() == failing_rank:
        if how == "raise":
            raise ValueError(f"the number of rank {failing_rank} is up")
        if how == "die":
            os._exit(7)
        wait_for_ever()
    if how != "hang":
        distributed.barrier()
    return distributed.get_rank()


def wait_for_ever() -> None:
    threading.Event().wait()


def make_groups(count: int) -> int:
    from torch import distributed
    from torch.distributed import distributed_c10d

    for _ in range(count):
        distributed.new_group([0, 1])
    return len(distributed_c10d._world.pg_map)


def open_handles() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestRunningJobs:
    def test_results_come_in_the_order_of_ranks(self, pool: RankPool) -> None:
        results = pool.run(rank_and_sum, value=10)
        assert [(rank, total) for rank, total, *_ in results] == [(0, 21.0), (1, 21.0)]
        assert {threads for *_, threads in results} == {1}

    def test_processes_are_kept_from_job_to_job(self, pool: RankPool) -> None:
        first, second = pool.run(rank_and_sum, value=1), pool.run(rank_and_sum, value=2)
        assert [pid for _, _, pid, _ in first] == [pid for _, _, pid, _ in second] == pool.pids

    def test_ranks_see_what_a_launcher_would_set(self, pool: RankPool) -> None:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR", "OMP_NUM_THREADS"]
        results = pool.run(environment, names=names)
        assert results == [dict(zip(names, [rank, rank, "2", "2", "cpu", "1"], strict=True)) for rank in "01"]

    def test_process_groups_of_a_job_are_closed_after_it(self, pool: RankPool) -> None:
        pool.run(make_groups, count=2)  # so that what is made once exists
        before = pool.run(open_handles)
        counts = [pool.run(make_groups, count=10) for _ in range(3)]
        assert counts[0] == counts[1] == counts[2]
        for (threads, files), (threads_before, files_before) in zip(pool.run(open_handles), before, strict=True):
            assert threads <= threads_before + 1
            assert files <= files_before + 2


def failure_of(pool: RankPool, failing_rank: int, how: str, timeout_s: float | None = None) -> RankFailure:
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        pool.run(fail, failing_rank=failing_rank, how=how, timeout_s=timeout_s)
    assert (timeout_s or 0.0) <= time.monotonic() - start < SLOW_S
    return failure.value


class TestFailures:
    def test_a_rank_that_raises(self, pool: RankPool) -> None:
        failure = failure_of(pool, 1, "raise")
        first, other = failure.first, failure.reports[0]
        assert (first.rank, first.status) == (1, "raised")
        assert "ValueError: the number of rank 1 is up" in first.detail
        assert 'in fail\n    raise ValueError(f"the number' in first.detail
        assert other.status in ("stopped", "raised")
        assert "printed before" in other.output
        assert "fail on 2 ranks: rank 1 raised first" in str(failure)

    def test_a_rank_that_dies(self, pool: RankPool) -> None:
        failure = failure_of(pool, 0, "die")
        dead = failure.reports[0]
        assert (dead.status, dead.detail) == ("died", "exit code 7")
        assert "printed before" in dead.output and "printed before" in str(failure)

    def test_a_rank_that_hangs(self, pool: RankPool) -> None:
        pool.run(environment, names=[])  # a new rank imports this module, which may take a second by itself
        first = failure_of(pool, 1, "hang", timeout_s=1.0).first
        assert (first.rank, first.status, first.detail) == (1, "timed out", "no answer within 1 s")
        assert "in wait_for_ever" in first.output, "the report shows where the rank hangs"

    def test_failures_leave_no_process_and_the_next_run_works(self, pool: RankPool) -> None:
        pool.start()
        pids = pool.pids
        failure_of(pool, 0, "raise")
        assert not pool.is_running
        assert not any(process_exists(pid) for pid in pids if pid is not None)
        assert [total for _, total, *_ in pool.run(rank_and_sum, value=0)] == [1.0, 1.0]
        assert not set(pool.pids) & set(pids)


def test_few_ranks_are_alive_at_a_time() -> None:
    cache = PoolCache(max_ranks=3)
    try:
        one, two = cache.get(1), cache.get(2)
        one.start()
        two.start()
        assert cache.get(1) is one and one.is_running and two.is_running
        cache.get(3)
        assert not one.is_running and not two.is_running
        assert cache.get(2) is two
    finally:
        cache.close()
