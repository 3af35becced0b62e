"""What every test starts from."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or deepspeed: the tests are small, and many of them run several ranks at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from hypothesis import settings

gc.set_threshold(50_000, 20, 100)  # a search of the usual 700 for cycles takes a sixth of the time of an import

FULL = os.environ.get("TERAPIPE_TEST_FULL", "") not in ("", "0")

settings.register_profile("default", deadline=None, max_examples=100)
settings.register_profile("full", deadline=None, max_examples=1000)
settings.load_profile("full" if FULL else "default")


ALONE = {
    "test_bench", "test_failures", "test_hangs", "test_harness", "test_memory_growth", "test_memory_peaks",
    "test_one_rank_failures", "test_study_strategy_times", "test_study_two_ranks", "test_tensor_parallel_runs",
    "test_watchdog",
}  # fmt: skip
"""Files whose tests look at the clock or at the memory of a process, and mostly wait: `make test` runs them at last."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The two runs of `make test` do not even import each other's files: to import all of them takes 20 s."""
    if not collection_path.name.startswith("test_") or config.option.markexpr not in ("alone", "not alone"):
        return None
    return True if (collection_path.stem in ALONE) != (config.option.markexpr == "alone") else None


def pytest_collection(session: pytest.Session) -> None:
    """The server of the ranks imports torch while these tests are collected."""
    if session.config.option.markexpr == "alone":
        from tests.distributed.harness import ensure_server

        ensure_server()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a file that leaves a process group: files share a process, and the next one would see a running job."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a test of this file left a process group: start it in a rank, or destroy it")


def _leave_samples(items: list[pytest.Item]) -> None:
    """Mark `full` all but the n cases that `sample(n)` asks for, evenly chosen from those that a test has."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        (number,) = of_test[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        kept = {len(of_test) * i // number for i in range(number)}
        for index, item in enumerate(of_test):
            if index not in kept:
                item.add_marker("full")


def pytest_collection_finish() -> None:
    """Leave what the collection has made, which stays, out of the searches for cycles."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs alone, and skip what the markers `full` and `gpu` ask for and this run or machine does not
    have. `make test` leaves out what is `full`: to report thousands of skips takes seconds."""
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker("alone")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        for item in gpu_items if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    _leave_samples(items)
    of_full = [item for item in items if item.get_closest_marker("full") and not FULL]
    for item in of_full:
        item.add_marker(pytest.mark.skip(reason="only with TERAPIPE_TEST_FULL=1 (make test-full)"))
    if config.option.markexpr in ("alone", "not alone"):
        left_out = set(of_full)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=of_full)
