"""Ranks as threads over one store: who hears of a failure, and who gives up on whom."""

from __future__ import annotations

import datetime
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as torch_dist

from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.failures import trials as trials_module
from terapipe_ds.runtime.failures.trials import PATIENCE_S, TrialError, TrialFailure, Trials
from tests.unit.runtime.rank_threads import Ranks

BROKEN, OTHER = ValueError("the layer is\nbroken"), KeyError("x")
LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all ranks of a test, whose threads share what a process has: so each counts its trials by itself."""
    monkeypatch.setattr(trials_module, "_numbers", _PerThread())
    found = torch_dist.HashStore()
    found.set_timeout(datetime.timedelta(seconds=5))
    monkeypatch.setattr(agreement, "default_store", lambda: found)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self._counts: dict[Any, Any] = {}

    def setdefault(self, ranks: Any, first: itertools.count[int]) -> itertools.count[int]:
        return self._counts.setdefault(ranks, first)  # type: ignore[no-any-return]


def on_ranks(ranks: tuple[int, ...], act: Callable[[Trials, int], Any], stall_timeout_s: float = 10.0) -> list[Any]:
    """What `act` returns or raises on each rank."""
    return Ranks(len(ranks)).run(lambda index: act(Trials(ranks, ranks[index], stall_timeout_s), ranks[index]))


def test_every_rank_hears_of_the_first_failure_and_keeps_its_own() -> None:
    errors = {1: None, 4: BROKEN, 7: OTHER}
    first, broken, other = on_ranks((1, 4, 7), lambda trials, rank: trials.failure(errors[rank], "it"))
    assert first == TrialFailure("ValueError", "the layer is\nbroken", 4)
    assert str(first) == "rank 4: ValueError: the layer is\nbroken"
    assert broken == TrialFailure("ValueError", "the layer is\nbroken") and other == TrialFailure("KeyError", "'x'")


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["alone", "with a peer"])
def test_what_the_frames_of_a_failed_trial_hold_ends_with_it(ranks: tuple[int, ...]) -> None:
    """As the hooks of torch's checkpointing, which a generator holds that nothing ends where a layer raises."""
    ended: list[int] = []

    def hold(rank: int) -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(rank)

    def layer(rank: int) -> None:
        hooks = hold(rank)
        next(hooks)
        raise ValueError("the layer is broken")

    def act(trials: Trials, rank: int) -> list[int]:
        try:
            layer(rank)
        except ValueError as error:
            assert rank not in ended and trials.failure(error, "it") is not None
            return [*ended]
        raise AssertionError("the layer raises")

    for rank, seen in enumerate(on_ranks(ranks, act)):
        assert rank in seen


def test_a_rank_that_fails_gives_up_on_peers_that_do_not_come() -> None:
    """Rank 1 stays in the layers; rank 2, which came through, waits as long as it takes."""
    ended = threading.Event()

    def act(trials: Trials, rank: int) -> Any:
        if rank == 1:
            ended.wait(15.0)
            return trials.failure(None, "timing layers")
        try:
            return trials.failure(BROKEN if rank == 0 else None, "timing layers", "leave it out")
        finally:
            if rank == 0:
                ended.set()

    failed, late, through = on_ranks((0, 1, 2), act, stall_timeout_s=3.0)
    assert isinstance(failed, TrialError) and failed.__cause__ is BROKEN
    assert str(failed) == (
        "timing layers failed on rank 0 (ValueError: the layer is\nbroken); its tensor-parallel peer, rank 1, has not "
        "come out of the layers in 1.5 s after that, where each waits for all. Fix what fails on rank 0, or leave it "
        "out"
    )
    assert late == through == TrialFailure("ValueError", "the layer is\nbroken", 0)


def test_ranks_at_different_trials_end_at_once() -> None:
    """One has failed before the trial that the other ended: they would wait for each other from now on."""

    def act(trials: Trials, rank: int) -> Any:
        return trials.failure(BROKEN if rank else None, "verifying layer 3" if rank else "running layer 3 in fp32")

    first, second = on_ranks((0, 1), act)
    assert isinstance(first, TrialError) and isinstance(second, TrialError)
    assert "running layer 3 in fp32 ended on rank 0 (it came through)" in str(first)
    assert "at verifying layer 3, on rank 1 (" in str(first) and "the layer is" in str(first)
    assert "at running layer 3 in fp32, on rank 0 (came through)" in str(second) and second.__cause__ is BROKEN


def test_a_device_behind_the_host_is_out_of_layers_before_the_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    device = SimpleNamespace(is_synchronized_device=lambda: False, synchronize=lambda: waited.append(current()))
    monkeypatch.setattr(trials_module, "get_accelerator", lambda: device)
    names: dict[int, str] = {}

    def act(trials: Trials, rank: int) -> Any:
        names[rank] = current()
        return trials.failure(BROKEN if rank else None, "it")

    on_ranks((0, 1), act)
    assert waited == [names[0]]


def current() -> str:
    return threading.current_thread().name


def test_a_lost_connection_is_nobody_to_wait_for() -> None:
    trials = Trials((0, 1), 0, 60.0)
    with pytest.raises(RuntimeError) as caught:
        trials.failure(LOST, "it")
    assert caught.value is LOST


@pytest.mark.parametrize(("stall_timeout_s", "patience_s"), [(300.0, PATIENCE_S), (4.0, 2.0)])
def test_a_rank_says_that_it_waits_before_watchdogs_report_a_stall(stall_timeout_s: float, patience_s: float) -> None:
    assert Trials((2, 3), 3, stall_timeout_s)._patience_s == patience_s
    assert Trials((), 3, stall_timeout_s).failure(BROKEN, "it") is not None
