"""Measure the engine's own time in an F and a B, around the layers: its books, DeepSpeed's wrappers, autograd.

This time is the same for slices of any length, so it matters where slices are short. A timer runs layers and loss
alone. So the engine rehearses with layers that do nothing, and what a timer takes for the same layers is subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from terapipe_ds.attention import SliceStore
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, MicroBatchInFlight
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.collaborators import Stage
from terapipe_ds.runtime.engine.deepspeed_calls import DeepSpeedCalls
from terapipe_ds.runtime.engine.part_runner import PartRunner
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.failures.report import Wait
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.layout.layout import Place
from terapipe_ds.runtime.links.specs import MessageSpec, TensorSpec
from terapipe_ds.runtime.profiling.slice_timer import SliceTimer, synchronize
from terapipe_ds.schedule import build
from terapipe_ds.schedule.action import Action, Kind

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_SPEC = MessageSpec((TensorSpec((1, 1, 8), torch.float32, True),), is_tuple=False)


def own_seconds(
    engine: PipelineEngine,
    is_last: bool,
    between: Callable[[], object],
    share: float,
    clock: Callable[[], float] | None = None,
) -> tuple[float, float]:
    """Return the engine's own seconds of an F and of a B. Call it inside `untouched(module)`.

    Messages are left out because they are measured separately, and what an optimizer adds to a backward because its
    state must not change here.

    Args:
        is_last: whether the part's slices have a loss, which the engine adds up.
        between: runs layers on a slice before each action, so that caches are as in a step.
        share: the slice's share of a sequence. Short slices run more often in a step, so they are measured more often.
    """
    now_s = clock or time.perf_counter
    layers, device = _Idle(), torch.device(engine.device)
    rounds = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(0.5 / share)))
    labels = SliceableTensors.of_labels(torch.zeros(1, rounds, dtype=torch.int64, device=device), 1)
    loss_fn, timer_labels = layers.loss_fn, labels if is_last else None
    timer = SliceTimer(layers, rounds, device, SliceStore(), labels=timer_labels, is_last=is_last, loss_fn=loss_fn)
    timer.receive(1, _SPEC)
    timer.output_spec(1)
    runner = _runner(_Rehearsal(engine, layers), is_last, labels, rounds, device)

    def timed(call: Callable[[], object]) -> float:
        between()
        synchronize()  # or calls might wait for a device that is behind
        begin_s = now_s()
        call()
        return now_s() - begin_s

    taken_s: dict[Kind, list[tuple[float, float]]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
    for slice_id in range(rounds):
        live: list[Any] = []
        for kind, taken in taken_s.items():
            alone_s = timed(partial(_run_layers, timer, kind, slice_id, live))
            taken.append((alone_s, timed(partial(_act, runner, kind, slice_id, is_last))))
    forward_s, backward_s = (  # of the minima: time that other programs took is not the engine's
        max(0.0, min(acted for _, acted in pairs) - min(alone for alone, _ in pairs)) for pairs in taken_s.values()
    )
    return forward_s, backward_s


def _run_layers(timer: SliceTimer, kind: Kind, slice_id: int, live: list[Any]) -> None:
    if kind is Kind.FORWARD:
        live.append(timer.issue_forward(1, slice_id))
    else:
        timer.issue_backward(live.pop())


def _act(runner: PartRunner, kind: Kind, slice_id: int, is_last: bool) -> None:
    """Run F or B of a slice, and send what follows from it."""
    if kind is Kind.FORWARD:
        runner.forward(Action(kind, 0, slice_id))
        if not is_last:
            runner.send_activation(Action(Kind.SEND_ACTIVATION, 0, slice_id))
    else:
        runner.backward(Action(kind, 0, slice_id))
        runner.send_gradients(Action(Kind.SEND_GRAD, 0, slice_id))


class _Idle(nn.Module):
    """Stand in for a layer that has a graph, and for a loss, at next to no cost."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view(inputs.shape)

    @staticmethod
    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return outputs.sum()

    def get_additional_losses(self) -> None:
        """Return none: there is only the loss itself."""


class _Rehearsal(PipelineEngine):
    """Stand in for an engine in DeepSpeed's forward and backward: it has the same settings, and leaves no trace there.

    `layers` replace the module, and no optimizer changes its state. Timers and results of a batch are separate ones.
    Attributes are copied as they are: `setattr` of a module would look at their types.
    """

    def __init__(self, engine: PipelineEngine, layers: nn.Module) -> None:
        optimizer = SimpleNamespace(set_gradient_accumulation_boundary=lambda is_boundary: None)
        results: dict[str, Any] = {"total_loss": None, "total_additional_losses": None, "fwd_outputs": []}
        self.__dict__.update(vars(engine), module=layers, optimizer=optimizer, timers=type(engine.timers)(), **results)
        self.__dict__.update(_compute_loss=True, eval_return_logits=False)

    def __del__(self) -> None:
        """Destroy nothing, since all that is here belongs to the engine."""


def _links(device: torch.device) -> Any:
    """Return links of a part in the middle: every message is there at once, and none goes anywhere."""
    (tensor,) = _SPEC.tensors
    gradients = (torch.zeros(tensor.shape, dtype=tensor.dtype, device=device),)
    return SimpleNamespace(
        describe_wait=lambda action: Wait(f"the input of {action}: a rehearsal", ()),
        receive_activation=lambda action: (_SPEC, (torch.zeros_like(gradients[0]),)),
        receive_gradients=lambda action: gradients,
        send_activation=lambda *message: None,
        send_gradients=lambda *message: None,
        has_wire=lambda kind, chunk_id: True,
    )


def _runner(
    engine: PipelineEngine, is_last: bool, labels: SliceableTensors, rounds: int, device: torch.device
) -> PartRunner:
    """Return the runner of a part that receives, in a batch of one micro-batch whose slices have one token each."""
    watchdog: Any = SimpleNamespace(waits=lambda what: None, note=lambda action: None)  # reports are about real actions
    results, tracer = BatchResults(engine, sequence_dim=1), Tracer(None, 0, 0, 1)
    stage = Stage(0, DeepSpeedCalls(engine), _links(device), SliceStore(), watchdog, WeightGradients(), results, tracer)
    plan, shape = SlicePlan((1,) * rounds), MicroBatchShape(1, rounds)
    micro_batch = MicroBatchInFlight(plan, shape, labels=labels, weights=(0.5,) * rounds)
    batch = BatchInFlight(build("terapipe", 1, 1, rounds), 0, True, [micro_batch])
    stage.results.begin(batch)
    runner = PartRunner(stage, Place(0, is_last=is_last))
    runner.open_batch(batch)
    return runner
