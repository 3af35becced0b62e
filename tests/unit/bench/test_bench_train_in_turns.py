"""What a rank times and records, with a driver and a device that are made up."""

import dataclasses
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe_ds.bench import train_in_turns
from terapipe_ds.bench.cases import Job
from terapipe_ds.bench.drivers.base import Driver
from terapipe_ds.bench.drivers.recorder import Recorder
from terapipe_ds.bench.ranks import Workload
from terapipe_ds.runtime.profiling import slice_timer

TIMED_AND_RECORDED = ["synchronize", "barrier", "clock", "step", "synchronize", "clock", "barrier", "recorded step"]


@pytest.mark.parametrize(("on_device", "expected"), [
    (True, TIMED_AND_RECORDED), (False, ["synchronize", "barrier", "clock", "recorded step", "synchronize", "clock"]),
], ids=["on a device two steps", "on the CPU one"])  # fmt: skip
def test_the_timed_and_the_recorded_step(on_device: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    clock, losses, recorder = count(), count(1), Recorder()

    def step(batch: Any) -> float:
        with recorder.span("F", 0, 0):
            happened.append("recorded step" if recorder.listens else "step")
        return float(next(losses))

    def read_clock() -> float:
        happened.append("clock")
        return float(next(clock))

    device = SimpleNamespace(
        is_synchronized_device=lambda: not on_device, synchronize=lambda: happened.append("synchronize")
    )
    for module in (train_in_turns, slice_timer):
        monkeypatch.setattr(module, "get_accelerator", lambda: device)
    monkeypatch.setattr(train_in_turns, "time", SimpleNamespace(perf_counter=read_clock))
    monkeypatch.setattr(train_in_turns.torch_dist, "barrier", lambda: happened.append("barrier"))
    run: dict[str, Any] = {"seconds": [], "losses": [], "events": []}
    for _ in range(2):
        train_in_turns._timed_step(run, SimpleNamespace(recorder=recorder, step=step), None)  # type: ignore[arg-type]
    assert happened == expected * 2
    assert run["losses"] == [1.0, 2.0, 3.0, 4.0][: 4 if on_device else 2] and run["seconds"] == [1.0, 1.0]
    assert [[event.kind for event in events] for events in run["events"]] == [["F"], ["F"]]
    assert recorder.listens


def test_a_message_takes_half_of_its_way_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(stages=2, accumulation=1, sequence_length=8, micro_batch=2, hidden=4, layers=2, heads=1)
    trips = iter([100.0, 8.0, 2.0, 4.0, 6.0, 9.0])  # the first one warms up
    monkeypatch.setattr(train_in_turns, "_round_trip", lambda rank, message: next(trips) * message.shape[1])
    for name in ("barrier", "get_rank"):
        monkeypatch.setattr(train_in_turns.torch_dist, name, lambda: 0)
    job = Job(work, (), (1,), 1)
    assert train_in_turns.measure_links(job, [3]) == {3: 9.0}
    for alone in (dataclasses.replace(work, stages=1), work):  # nothing is replayed on devices
        device = "cpu" if alone.stages == 1 else "cuda"
        assert train_in_turns.measure_links(dataclasses.replace(job, work=alone, device=device), [3]) == {}


class CountingSteps(torch.optim.SGD):
    """Count steps by ints, as DeepSpeed's Adam does; updates depend on the count and on a loss scale that falls."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.data -= group["lr"] / state["step"] * self.loss_scaler.cur_scale
        self.loss_scaler.cur_scale /= 2


class LearnsByItself(Driver):
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = CountingSteps([self.weight], lr=0.5)
        self.optimizer.loss_scaler = SimpleNamespace(cur_scale=1.0)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=9)

    def parameters(self) -> list[torch.Tensor]:
        return [self.weight]

    def step(self, micro_batches: Any) -> float:
        self.optimizer.step()
        self.scheduler.step()
        return float(self.weight.detach().sum())


def test_steps_before_a_restart_change_nothing_after_it() -> None:
    """Systems that skip an accumulation have made fewer steps: their losses differed, and they were errors."""
    driver = LearnsByItself()
    driver.remember_start()
    losses = []
    for steps in (5, 3):
        losses.append([driver.step(()) for _ in range(steps)])
        driver.restart()
    assert losses[0][:3] == losses[1] and len({*losses[0]}) == 5
