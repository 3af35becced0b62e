"""Six kinds of faults that strike one rank at twelve places of a job: around batches, in them, and in checkpoints."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.runtime.failures import watchdog
from terapipe_ds.schedule.action import Action, Kind
from tests.distributed.failures.job import (
    Batch,
    BrokenError,
    Job,
    StruckLayer,
    _InBackward,
    batches,
    build_engine,
    die,
    hang,
    mark,
    wait_for_ever,
)

UNIT = (1, 2)  # micro-batch and slice
Act = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Which fault strikes where, on which rank of how many; the limits of the job, and a folder for checkpoints."""

    place: str
    fault: str
    stages: int
    rank: int
    stall_timeout_s: float
    data_timeout_s: float
    folder: str


def run_struck(case: Case) -> None:
    """Run the call of `case.place`, in which one rank is struck, and then a batch. Called on every rank."""
    watchdog.LINGER_S = 0.1  # no launcher ends these ranks while they print
    place = PLACES[case.place]
    section = {"data_timeout_s": case.data_timeout_s, **place.section}
    engine = build_engine(Job(case.stages, stall_timeout_s=case.stall_timeout_s, section=section))
    try:
        if not place.is_first:
            engine.train_batch(batches(1))
        if place.call is _load:
            engine.save_checkpoint(case.folder, tag="whole")
        data = batches(2)
        if engine.global_rank == case.rank:
            act = partial(FAULTS[case.fault], case.place)
            data = place.arm(engine, act) or data
        place.call(engine, data, case.folder)
        engine.train_batch(batches(3))  # by ranks that are through with that call, because they needed no other for it
    finally:
        engine.destroy()


# -- the faults ------------------------------------------------------------------------------------------------------


def _raise(place: str) -> NoReturn:
    mark()
    raise BrokenError(f"the {place} is broken")


def _stop(place: str) -> None:
    """The whole process stops, with the watch-dog and the store that it may serve."""
    mark()
    os.kill(os.getpid(), signal.SIGSTOP)


def _interrupt(place: str) -> None:
    """Ctrl-C, on this rank alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started without it
    mark()
    os.kill(os.getpid(), signal.SIGINT)
    wait_for_ever()


def _run_out_of_memory(place: str) -> NoReturn:
    """Of the device, as torch says it; in some places this process cannot get any more in truth."""
    mark()
    if place not in ("save", "F", "data"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    used_bytes, held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(), []
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (16 << 20), resource.RLIM_INFINITY))
    while True:
        held.append(bytearray(1 << 20))


FAULTS: dict[str, Callable[[str], Any]] = {
    "raise": _raise,
    "hang": lambda place: hang(),
    "kill": lambda place: die(),
    "stop": _stop,
    "SIGINT": _interrupt,
    "out of memory": _run_out_of_memory,
}


# -- the places ------------------------------------------------------------------------------------------------------


def _train(engine: Any, data: Iterator[Batch], folder: str) -> None:
    engine.train_batch(data)


def _load(engine: Any, data: Iterator[Batch], folder: str) -> None:
    engine.load_checkpoint(folder, tag="whole")


def _in_layer(is_here: Callable[[ActiveSlice], bool], backward: bool = False) -> Callable[[Any, Act], None]:
    def arm(engine: Any, act: Act) -> None:
        layer = next(each for each in engine.module.forward_funcs if isinstance(each, StruckLayer))
        usual = layer.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            hidden, active = usual(hidden), active_slice()
            if active is None or not is_here(active):
                return hidden
            return _InBackward.apply(hidden, act) if backward else act()

        layer.forward = forward

    return arm


def _is_unit(active: ActiveSlice) -> bool:
    return (active.micro_batch_id, active.slice_id) == UNIT


def _before(kind: Kind, unit: tuple[int, int]) -> Callable[[Any, Act], None]:
    def arm(engine: Any, act: Act) -> None:
        usual = engine._ACTIONS[kind]

        def struck(engine: Any, action: Action) -> None:
            if action.unit == unit:
                act()
            usual(engine, action)

        engine._ACTIONS = {**engine._ACTIONS, kind: struck}

    return arm


def _instead(owner: Callable[[Any], Any], name: str) -> Callable[[Any, Act], None]:
    return lambda engine, act: setattr(owner(engine), name, lambda *_, **__: act())


def _drawing(engine: Any, act: Act) -> Iterator[Batch]:
    yield next(batches(2))
    act()


@dataclass(frozen=True)
class Place:
    """How a fault is brought there (`arm` may return the data), in which call, and before or after a first batch."""

    arm: Callable[[Any, Act], Iterator[Batch] | None]
    call: Callable[[Any, Iterator[Batch], str], Any] = _train
    is_first: bool = False
    section: dict[str, Any] = field(default_factory=dict)


PLACES = {
    "load": Place(_instead(lambda engine: engine.module.forward_funcs[-1], "load_state_dict"), _load),
    "save": Place(
        _instead(lambda engine: engine.module, "save_state_dict"),
        lambda engine, data, folder: engine.save_checkpoint(folder),
    ),
    "plan": Place(
        _in_layer(lambda active: active.mode == "probe" and active.start > 0),
        is_first=True,
        section={"slices": "auto", "granularity_tokens": 4},
    ),
    "verify": Place(_in_layer(lambda active: True), is_first=True, section={"verify": "first_batch"}),
    "first batch": Place(_before(Kind.FORWARD, (0, 0)), is_first=True),
    "F": Place(_in_layer(_is_unit)),
    "B": Place(_in_layer(_is_unit, backward=True)),
    "W": Place(_before(Kind.WEIGHT, UNIT), section={"schedule": "seq1f1b-zb"}),
    "reduce": Place(_instead(lambda engine: engine.module, "before_reduce")),
    "step": Place(_instead(lambda engine: engine.optimizer, "step")),
    "eval": Place(_in_layer(_is_unit), lambda engine, data, folder: engine.eval_batch(data)),
    "data": Place(_drawing),
}
