"""Six kinds of faults that strike one rank at twelve places of a job: before batches, in them, and in checkpoints."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.runtime.failures import watchdog
from terapipe_ds.schedule.action import Action, Kind
from tests.distributed.failures import job as jobs
from tests.distributed.failures.job import Batch, Job

UNIT = (1, 2)  # micro-batch and slice
FIRST = ("plan", "verify", "first batch")  # in the first batch; a batch comes before the other places
SECTIONS: dict[str, dict[str, Any]] = {
    "plan": {"slices": "auto", "granularity_tokens": 4},
    "verify": {"verify": "first_batch"},
    "W": {"schedule": "seq1f1b-zb"},
}
CALLS: dict[str, Callable[[Any, Iterator[Batch], str], Any]] = {
    "load": lambda engine, data, folder: engine.load_checkpoint(folder, tag="whole"),
    "save": lambda engine, data, folder: engine.save_checkpoint(folder),
    "eval": lambda engine, data, folder: engine.eval_batch(data),
}
Act = Callable[[], Any]
Arm = Callable[[Any, Act], Iterator[Batch] | None]


def run_struck(job: Job, place: str) -> None:
    """Make the call of `place`, in which the stage of `job.fault` is struck, and then train. Called on every rank."""
    watchdog.LINGER_S = 0.1  # no launcher ends these ranks while they print
    fault, data = job.fault, jobs.batches(2)
    assert fault is not None
    engine = jobs.build_engine(replace(job, section={**job.section, **SECTIONS.get(place, {})}))
    try:
        if place not in FIRST:
            engine.train_batch(jobs.batches(1))
        if place == "load":
            engine.save_checkpoint(job.folder, tag="whole")
        if engine.stage_id == fault.stage:
            data = PLACES[place](engine, partial(FAULTS[fault.kind], place)) or data
        CALLS.get(place, lambda engine, data, folder: engine.train_batch(data))(engine, data, job.folder)
        engine.train_batch(jobs.batches(3))  # by ranks that needed no other for that call
    finally:
        engine.destroy()


# -- the faults ------------------------------------------------------------------------------------------------------


def _raise(place: str) -> NoReturn:
    jobs.mark()
    raise jobs.BrokenError(f"the {place} is broken")


def _signal(number: signal.Signals) -> None:
    """SIGSTOP stops the watch-dog, too, and the store that this rank may serve."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started without it
    jobs.mark()
    os.kill(os.getpid(), number)
    jobs.wait_for_ever()


def _run_out_of_memory(place: str) -> NoReturn:
    """Of the device, as torch says it; at some places this process gets no more in truth."""
    jobs.mark()
    if place not in ("save", "F", "data"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    used_bytes, held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(), []
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (16 << 20), resource.RLIM_INFINITY))
    while True:
        held.append(bytearray(1 << 20))


FAULTS: dict[str, Callable[[str], Any]] = {
    "raise": _raise,
    "hang": lambda place: jobs.hang(),
    "kill": lambda place: jobs.die(),
    "stop": lambda place: _signal(signal.SIGSTOP),
    "SIGINT": lambda place: _signal(signal.SIGINT),
    "out of memory": _run_out_of_memory,
}


# -- the places ------------------------------------------------------------------------------------------------------


def _in_layer(is_here: Callable[[ActiveSlice], bool], backward: bool = False) -> Arm:
    def arm(engine: Any, act: Act) -> None:
        layer = next(each for each in engine.module.forward_funcs if isinstance(each, jobs.StruckLayer))
        usual = layer.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            hidden, active = usual(hidden), active_slice()
            if active is None or not is_here(active):
                return hidden
            return jobs._InBackward.apply(hidden, act) if backward else act()

        layer.forward = forward

    return arm


def _is_unit(active: ActiveSlice) -> bool:
    return (active.micro_batch_id, active.slice_id) == UNIT


def _before(kind: Kind, unit: tuple[int, int]) -> Arm:
    def arm(engine: Any, act: Act) -> None:
        usual = engine._ACTIONS[kind]

        def struck(engine: Any, action: Action) -> None:
            if action.unit == unit:
                act()
            usual(engine, action)

        engine._ACTIONS = {**engine._ACTIONS, kind: struck}

    return arm


def _instead(owner: Callable[[Any], Any], name: str) -> Arm:
    return lambda engine, act: setattr(owner(engine), name, lambda *_, **__: act())


def _drawing(engine: Any, act: Act) -> Iterator[Batch]:
    yield next(jobs.batches(2))
    act()


PLACES: dict[str, Arm] = {
    "load": _instead(lambda engine: engine.module.forward_funcs[-1], "load_state_dict"),
    "save": _instead(lambda engine: engine.module, "save_state_dict"),
    "plan": _in_layer(lambda active: active.mode == "probe" and active.start > 0),
    "verify": _in_layer(lambda active: True),
    "first batch": _before(Kind.FORWARD, (0, 0)),
    "F": _in_layer(_is_unit),
    "B": _in_layer(_is_unit, backward=True),
    "W": _before(Kind.WEIGHT, UNIT),
    "reduce": _instead(lambda engine: engine.module, "before_reduce"),
    "step": _instead(lambda engine: engine.optimizer, "step"),
    "eval": _in_layer(_is_unit),
    "data": _drawing,
}
