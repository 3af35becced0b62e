"""Ranks that hang at a chosen place of the engine, and ranks that end while a checkpoint is written."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import torch

import terapipe_ds
from terapipe_ds.runtime import agreement
from terapipe_ds.runtime.failures import watchdog
from terapipe_ds.schedule.action import Action, Kind
from tests.distributed.failures.alike import Raised, provoke
from tests.distributed.failures.job import Fault, Job, build_model, deepspeed_config, die, hang, mark, run


def run_until_it_hangs(job: Job) -> list[float]:
    """`run` with the faults of `PLACES`, on ranks that no launcher would end while they print."""
    watchdog.LINGER_S = 0.1
    return run(job, PLACES)


def _act(fault: Fault) -> NoReturn:
    """Hang, die or raise, as the kind begins."""
    {"hang": hang, "kill": die, "raise": mark}[fault.kind.partition("_")[0]]()
    if fault.kind.startswith("raise"):
        raise MemoryError("none is left")
    raise AssertionError("this never comes")


def _at_forward(engine: Any, fault: Fault, act: Callable[[Fault], None] = _act) -> None:
    """Act before one forward."""
    usual = engine._ACTIONS[Kind.FORWARD]

    def struck(engine: Any, action: Action) -> None:
        if action.unit == tuple(fault.unit):
            act(fault)
        usual(engine, action)

    engine._ACTIONS = {**engine._ACTIONS, Kind.FORWARD: struck}


def _in_send(engine: Any, fault: Fault) -> None:
    """Of an activation, on the last stage of a gradient."""
    name = "send_gradients" if engine.is_last_stage() else "send_activation"
    usual: Callable[..., None] = getattr(engine._stage.links, name)

    def send(action: Action, *arguments: Any) -> None:
        if action.unit == tuple(fault.unit):
            _act(fault)
        usual(action, *arguments)

    setattr(engine._stage.links, name, send)


def _instead(owner: str, name: str) -> Callable[[Any, Fault], None]:
    return lambda engine, fault: setattr(getattr(engine, owner), name, lambda *_, **__: _act(fault))


def _terminated_in_save(engine: Any, fault: Fault) -> None:
    """This rank gets SIGTERM in the middle of a file."""

    def save(state_dict: Any, path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"half of it")
            file.flush()
            mark()
            os.kill(os.getpid(), signal.SIGTERM)
            hang()

    engine.checkpoint_engine.save = save


def _stop(fault: Fault) -> None:
    """The whole process stops, with the watch-dog and the store that it serves."""
    mark()
    os.kill(os.getpid(), signal.SIGSTOP)


PLACES: dict[str, Callable[[Any, Fault], None]] = {
    **{
        f"{how}_{place}": strike
        for how in ("hang", "kill")
        for place, strike in {
            "before_forward": _at_forward,
            "send": _in_send,
            "optimizer": _instead("optimizer", "step"),
            "reduce": _instead("module", "before_reduce"),
            "save": _instead("checkpoint_engine", "save"),
        }.items()
    },
    "stopped": lambda engine, fault: _at_forward(engine, fault, _stop),
    "terminated_in_save": _terminated_in_save,
    "raise_save": _instead("checkpoint_engine", "commit"),
}


def one_rank_is_not_registered(patience_s: float) -> Raised:
    """The last rank has built its model and does something else then: it never comes to compare configs."""
    job = Job(stall_timeout_s=patience_s)
    model = build_model(job)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        next(agreement._meetings)  # the ranks of the pool go on together
        return Raised("", "", 0.0)
    usual, agreement.PATIENCE_S = agreement.PATIENCE_S, patience_s
    try:
        return provoke(
            lambda: terapipe_ds.initialize(
                model=model, model_parameters=list(model.parameters()), config=deepspeed_config(job)
            )
        )
    finally:
        agreement.PATIENCE_S = usual
