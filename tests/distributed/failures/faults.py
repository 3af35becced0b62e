"""Define faults that may strike one rank, and the places of a job: before a batch, in it, in a checkpoint."""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import distributed

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.active_slice import ActiveSlice
from terapipe_ds.models import gpt
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden
from terapipe_ds.schedule.action import Action, Kind

FAULT_MARK = "the fault strikes at"
LEAVES = "leaves"  # the kind of a rank that stops training before the step

Unit = tuple[int, int]  # micro-batch and slice
Act = Callable[..., Any]
Arm = Callable[[PipelineEngine, Act, Unit], Any]


@dataclass(frozen=True)
class Fault:
    """Describe a fault and its place: on which stage of which pipeline, in which step (from 1; 0: while it loads)."""

    kind: str  # a key of `FAULTS`, or `LEAVES`
    place: str  # a key of `PLACES`, or data
    stage: int = 0
    pipeline: int = 0
    step: int = 2
    unit: Unit = (1, 2)

    def arm(self, engine: PipelineEngine, data: Iterator[Any]) -> Iterator[Any]:
        """Arm the fault: from now on it strikes this rank at the place. Returns the rank's data."""

        def act(*hidden: torch.Tensor) -> Any:
            mark()
            return FAULTS[self.kind](self.place, *hidden)

        if self.place == "data":
            return _drawing(data, act)
        PLACES[self.place](engine, act, (self.unit[0], self.unit[1]))
        return data


def mark() -> None:
    print(f"{FAULT_MARK} {time.time():.3f}", file=sys.stderr, flush=True)


# -- the faults ----------------------------------------------------------------------------------------------

_pids: list[int] = []


class BrokenError(Exception):
    """Be the error of a broken layer, which the engine cannot know."""


def exchange_pids() -> None:
    global _pids
    _pids = [0] * distributed.get_world_size()
    distributed.all_gather_object(_pids, os.getpid())


def _raise(place: str, *_: torch.Tensor) -> NoReturn:
    raise BrokenError(f"the {place} is broken")


def wait_for_ever(*_: object) -> None:
    threading.Event().wait()


def _signal(number: signal.Signals) -> None:
    """Send a signal. SIGSTOP stops the watch-dog, too, and the store that this rank may serve."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started without it
    os.kill(os.getpid(), number)
    wait_for_ever()


def _terminate_others() -> None:
    """End the other ranks, as a launcher does when a rank has died."""
    for pid in set(_pids) - {os.getpid()}:
        os.kill(pid, signal.SIGTERM)
    wait_for_ever()


def _run_out_of_memory(place: str, *_: torch.Tensor) -> NoReturn:
    """Raise torch's error of a full device; at some places this process really gets no more memory."""
    if place not in ("save", "F", "data"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    used_bytes, held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(), []
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (16 << 20), resource.RLIM_INFINITY))
    while True:
        held.append(bytearray(1 << 20))


def _plain_attention(place: str, hidden: torch.Tensor) -> torch.Tensor:
    heads = hidden.unsqueeze(1)
    return hidden + F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)


FAULTS: dict[str, Callable[..., Any]] = {
    "raise": _raise,
    "hang": wait_for_ever,
    "kill": lambda *_: _signal(signal.SIGKILL),
    "stop": lambda *_: _signal(signal.SIGSTOP),
    "SIGINT": lambda *_: _signal(signal.SIGINT),
    "SIGTERM": lambda *_: _signal(signal.SIGTERM),
    "exit": lambda *_: os._exit(3),
    "terminate others": lambda *_: _terminate_others(),
    "out of memory": _run_out_of_memory,
    "other shape": lambda place, hidden: torch.cat([hidden, hidden], dim=-1),
    "plain attention": _plain_attention,
}


# -- the places ----------------------------------------------------------------------------------------------


class _InBackward(torch.autograd.Function):
    """Do something other than a backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, act: Act) -> torch.Tensor:
        ctx.act = act
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.act()


def _in_layer(is_here: Callable[[ActiveSlice, Unit], bool], backward: bool = False) -> Arm:
    def arm(engine: PipelineEngine, act: Act, unit: Unit) -> None:
        layer = next(each for each in engine.module.forward_funcs if isinstance(each, gpt.DecoderLayer))
        usual = layer.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            hidden, active = usual(hidden), active_slice()
            if active is None or not is_here(active, unit):
                return hidden
            return _InBackward.apply(hidden, act) if backward else act(hidden)

        layer.forward = forward

    return arm


def _is_unit(active: ActiveSlice, unit: Unit) -> bool:
    return active.mode != "probe" and (active.micro_batch_id, active.slice_id) == unit


def _drawing(data: Iterator[Any], act: Act) -> Iterator[Any]:
    yield next(data)
    act()
    yield from data


def _in_loss(engine: PipelineEngine, act: Act, unit: Unit) -> None:
    """Strike in the loss, of logits or of hidden states."""
    for owner, name in ((engine.module, "loss_fn"), (LossOfHidden, "__call__")):
        wrap(owner, name, act, lambda *_: (found := active_slice()) is not None and _is_unit(found, unit))


def _before(kind: Kind) -> Arm:
    def arm(engine: Any, act: Act, unit: Unit) -> None:
        usual = engine._ACTIONS[kind]

        def struck(engine: Any, action: Action) -> None:
            if action.unit == unit:
                act()
            usual(engine, action)

        engine._ACTIONS = {**engine._ACTIONS, kind: struck}

    return arm


def _in_send(engine: Any, act: Act, unit: Unit) -> None:
    """Strike in the send of an activation, or of a gradient on the last stage."""
    name = "send_gradients" if engine.is_last_stage() else "send_activation"
    wrap(engine._stage.links, name, act, lambda action, *_: action.unit == unit)


def wrap(owner: Any, name: str, act: Act, is_here: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Act before the usual function, if there is one, for arguments that `is_here` accepts."""
    usual = getattr(owner, name, lambda *_, **__: None)

    def struck(*arguments: Any, **named: Any) -> Any:
        if is_here(*arguments, **named):
            act()
        return usual(*arguments, **named)

    setattr(owner, name, struck)


PLACES: dict[str, Arm] = {
    "load": lambda engine, act, _: wrap(engine.module.forward_funcs[-1], "load_state_dict", act),
    "save": lambda engine, act, _: wrap(engine.module, "save_state_dict", act),
    "plan": _in_layer(lambda active, _: active.mode == "probe" and active.start > 0),
    "verify": _in_layer(lambda active, _: True),
    "between": lambda engine, act, _: act(),
    "before F": _before(Kind.FORWARD),
    "F": _in_layer(_is_unit),
    "loss": _in_loss,
    "send": _in_send,
    "B": _in_layer(_is_unit, backward=True),
    "recompute": _in_layer(lambda active, unit: _is_unit(active, unit) and active.mode == "recompute"),
    "W": _before(Kind.WEIGHT),
    "reduce": lambda engine, act, _: wrap(engine.module, "before_reduce", act),
    "step": lambda engine, act, _: wrap(engine.optimizer, "step", act),
    "eval": _in_layer(_is_unit),
}
