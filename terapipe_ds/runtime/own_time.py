"""What the engine itself takes of an F and a B, around the layers: books, DeepSpeed's wrappers, autograd's start.

It is the same for slices of any length, so that it matters where slices are short: there a probe, which runs layers and
loss alone, promises what no step can keep. A rehearsal of a part whose layers do nothing shows it; what a probe takes
for such layers is subtracted, for its times are added to those of this module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from terapipe_ds.attention import SliceStore
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import Tensors
from terapipe_ds.runtime.buffers import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.header import MicroBatchShape
from terapipe_ds.runtime.layout import Place
from terapipe_ds.runtime.link import MessageSpec, TensorSpec
from terapipe_ds.runtime.part_runner import PartRunner
from terapipe_ds.runtime.probe import StageProbe
from terapipe_ds.runtime.rank_record import RankRecord
from terapipe_ds.runtime.stall import Wait
from terapipe_ds.runtime.weight_gradients import WeightGradients
from terapipe_ds.schedule import build
from terapipe_ds.schedule.action import Action, Kind

_ROUNDS = 24
_SPEC = MessageSpec((TensorSpec((1, 1, 8), torch.float32, True),), is_tuple=False)


def own_seconds(engine: Any, clock: Callable[[], float] | None = None) -> tuple[float, float]:
    """Seconds of an F and of a B of ``engine`` that are not those of a probe. Use it inside ``untouched(module)``.

    Left out are messages, which are measured on their own, and what optimizers add to a backward, whose books this must
    not touch.

    Args:
        clock: in the place of the wall's, as in ``StageProbe``.
    """
    now_s = clock or time.perf_counter
    layers, device = _Idle(), torch.device(engine.device)
    probe = StageProbe(layers, layers, _ROUNDS, device, SliceStore())
    probe.receive(1, _SPEC)
    probe.output_spec(1)
    forwards: list[tuple[float, float]] = []
    backwards: list[tuple[float, float]] = []
    with _idle_layers(engine, layers):
        runner = _runner(engine, device)
        for slice_id in range(_ROUNDS):
            begin_s = now_s()
            live = probe.issue_forward(1, slice_id)
            middle_s = now_s()
            runner.forward(Action(Kind.FORWARD, 0, slice_id))
            runner.send_activation(Action(Kind.SEND_ACTIVATION, 0, slice_id))
            forwards.append((middle_s - begin_s, now_s() - middle_s))
            begin_s = now_s()
            probe.issue_backward(live)
            middle_s = now_s()
            runner.backward(Action(Kind.BACKWARD, 0, slice_id))
            runner.send_gradients(Action(Kind.SEND_GRAD, 0, slice_id))
            backwards.append((middle_s - begin_s, now_s() - middle_s))
    forward_s, backward_s = (
        max(0.0, statistics.median(whole_s - probed_s for probed_s, whole_s in runs)) for runs in (forwards, backwards)
    )
    return forward_s, backward_s


class _Idle(nn.Module):
    """A layer that does next to nothing, with a graph."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view(inputs.shape)


@contextmanager
def _idle_layers(engine: Any, layers: nn.Module) -> Iterator[None]:
    """``layers`` in the place of the module, and neither an optimizer whose books a backward would change nor what
    counts operations and looks for numbers that are not finite."""
    stand_ins = {"module": layers, "optimizer": _NoOptimizer(), "_flops": None, "_finite": None}
    kept = {name: getattr(engine, name) for name in stand_ins}
    try:
        for name, stand_in in stand_ins.items():
            setattr(engine, name, stand_in)
        yield
    finally:
        for name, value in kept.items():
            setattr(engine, name, value)


class _NoOptimizer:
    """What DeepSpeed tells an optimizer before a backward, unheard."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Nothing is accumulated."""


class _NoWatch:
    """A watch-dog's notes, in books of their own: its reports are of real actions."""

    def __init__(self) -> None:
        self._record = RankRecord(0, 0)

    @contextmanager
    def waiting(self, what: Wait) -> Iterator[None]:
        self._record.now_waits(what)
        yield


class _NoMessages:
    """The channels of a part in the middle, on which messages are there at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gradients = (self._message(),)

    def _message(self) -> torch.Tensor:
        (tensor,) = _SPEC.tensors
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)

    def describe_wait(self, action: Action) -> Wait:
        return Wait(f"the input of {action}: a rehearsal", ())

    def receive_activation(self, action: Action) -> tuple[MessageSpec, Tensors]:
        return _SPEC, (self._message(),)

    def receive_gradients(self, action: Action) -> Tensors:
        return self._gradients

    def send_activation(self, action: Action, spec: MessageSpec, tensors: Tensors) -> None:
        """It has arrived."""

    def send_gradients(self, action: Action, gradients: Tensors) -> None:
        """They have arrived."""

    def has_wire(self, kind: Kind, chunk_id: int) -> bool:
        return True


def _runner(engine: Any, device: torch.device) -> PartRunner:
    """The runner of a part in the middle, in a batch of one micro-batch whose slices have a token each."""
    stand_ins: dict[str, Any] = {"links": _NoMessages(device), "watchdog": _NoWatch()}
    runner = PartRunner(engine, Place(0), store=SliceStore(), weights=WeightGradients(), **stand_ins)
    micro_batch = MicroBatchInFlight(SlicePlan((1,) * _ROUNDS), MicroBatchShape(1, _ROUNDS))
    schedule = build("terapipe", 1, 1, _ROUNDS)
    runner.open_batch(BatchInFlight(schedule, 0, True, [micro_batch]))
    return runner
