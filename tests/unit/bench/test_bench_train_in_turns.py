"""What a rank times and records, with a driver and a device that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.bench import train_in_turns
from terapipe_ds.bench.drivers.recorder import Recorder
from terapipe_ds.runtime.profiling import slice_timer


class Accelerator:
    """What is asked of DeepSpeed's accelerator; ``synchronize`` joins what happened."""

    def __init__(self, happened: list[str], on_device: bool) -> None:
        self.happened, self.on_device = happened, on_device

    def is_synchronized_device(self) -> bool:
        return not self.on_device

    def synchronize(self) -> None:
        self.happened.append("synchronize")


class OneAction:
    """A driver whose step is one recorded action; its loss counts the steps."""

    def __init__(self, happened: list[str]) -> None:
        self.recorder, self.happened, self.losses = Recorder(), happened, count(1)

    def step(self, batch: Any) -> float:
        with self.recorder.span("F", 0, 0):
            self.happened.append("recorded step" if self.recorder.on else "step")
        return float(next(self.losses))


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    clock = count()

    def read_clock() -> float:
        found.append("clock")
        return float(next(clock))

    monkeypatch.setattr(train_in_turns, "time", SimpleNamespace(perf_counter=read_clock))
    monkeypatch.setattr(train_in_turns.torch_dist, "barrier", lambda: found.append("barrier"))
    yield found


def use(monkeypatch: pytest.MonkeyPatch, happened: list[str], on_device: bool) -> None:
    for module in (train_in_turns, slice_timer):
        monkeypatch.setattr(module, "get_accelerator", lambda: Accelerator(happened, on_device))


def test_on_a_device_the_timed_step_is_not_the_recorded_one(
    happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, happened, on_device=True)
    driver = OneAction(happened)
    run: dict[str, Any] = {"seconds": [], "losses": [], "events": []}
    for _ in range(2):
        train_in_turns._timed_step(run, driver, None)  # type: ignore[arg-type]
    timed = ["synchronize", "barrier", "clock", "step", "synchronize", "clock"]
    assert happened == [*timed, "barrier", "recorded step"] * 2
    assert run["losses"] == [1.0, 2.0, 3.0, 4.0] and run["seconds"] == [1.0, 1.0]
    assert [[event.kind for event in events] for events in run["events"]] == [["F"], ["F"]]
    assert driver.recorder.on


def test_on_the_cpu_they_are_the_same_step(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, happened, on_device=False)
    run: dict[str, Any] = {"seconds": [], "losses": [], "events": []}
    train_in_turns._timed_step(run, OneAction(happened), None)  # type: ignore[arg-type]
    assert happened == ["barrier", "clock", "recorded step", "clock"]
    assert run["losses"] == [1.0] and len(run["events"]) == 1
