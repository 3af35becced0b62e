"""Run one part of a stage: forward of a slice, its loss, its backward, and the messages of the part.

The engine makes one `PartRunner` for each place (chunk) of its stage and hands it the actions of that chunk. A runner
holds no tensors: the tensors of a batch are in its `PartInFlight`, by micro-batch and slice. `Stage` has the objects
that the runners of a stage share. `DeepSpeedCalls` contains all their calls of DeepSpeed's engine (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import (
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    PipelineEngine,
)
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.messages import logger
from terapipe_ds.runtime.batch.cut_tensors import Tensors, as_tuple
from terapipe_ds.runtime.batch.handed_inputs import HandedInputs
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, PartInFlight
from terapipe_ds.runtime.engine.batch_results import BatchResults
from terapipe_ds.runtime.engine.deepspeed_faults import missing_loss_scale
from terapipe_ds.runtime.engine.own_time import OwnTime
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.activation_checkpointing import (
    checkpointing_with_gradients,
    keeps_attention,
    warn_if_none_is_kept,
)
from terapipe_ds.runtime.layers.finite import FiniteCheck
from terapipe_ds.runtime.layers.flops import StageFlops
from terapipe_ds.runtime.layers.loss_of_hidden import LossOfHidden, tell_of_logits
from terapipe_ds.runtime.layers.offload import ActivationOffload, explain_refusal
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.layout.layout import Place
from terapipe_ds.runtime.layout.parted_module import activate
from terapipe_ds.runtime.links.specs import MessageSpec
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.schedule.action import Action, Kind, SliceKey

T = TypeVar("T")
_NOTHING = nullcontext()


@dataclass
class Stage:
    """Hold all objects that the parts of one stage share; parts reach DeepSpeed's engine only by `DeepSpeedCalls`."""

    stage_id: int
    deepspeed: DeepSpeedCalls
    links: StageLinks
    store: SliceStore  # each part has names of its own in it
    watchdog: Watchdog
    weight_gradients: WeightGradients
    results: BatchResults
    tracer: Tracer
    own_time: OwnTime
    finite: FiniteCheck | None = None  # searches for numbers that are not finite, if the config enables it
    flops: StageFlops | None = None  # counts operations, if the config enables it
    sequence: SequenceRanks = field(default_factory=SequenceRanks)  # the ranks that divide the tokens of each slice
    offload: ActivationOffload | None = None  # brings saved tensors to the host, if the config enables it


class DeepSpeedCalls:
    """Run layers and backwards as `DeepSpeedEngine` does for a micro-batch: with its hooks, loss scale and timers."""

    def __init__(self, engine: PipelineEngine, offloads: bool) -> None:
        self._engine, self._offloads = engine, offloads
        self._ends_with: tuple[Any, Any] | None = None  # the loss and the last layer that `_of_hidden` is of
        self._of_hidden: LossOfHidden | None = None
        self.open_batch()

    def open_batch(self) -> None:
        """Check once per batch which options a program may have switched on since the last one."""
        engine = self._engine
        self._is_timed = bool(engine.wall_clock_breakdown())
        self.checkpoints = getattr(engine.module, "activation_checkpoint_interval", 0) > 0
        self.keeps_attention = keeps_attention(engine.module)

    def close_batch(self, stage_id: int) -> None:
        """Warn if a training batch has shown that a setting has no effect."""
        warn_if_none_is_kept(self._engine.module, stage_id)

    def loss_of_hidden(self, stage: Stage, chunk_id: int) -> LossOfHidden | None:
        """Return the loss of the last part, which is that chunk, without logits; None if it needs them now."""
        module = self._engine.module
        activate(module, chunk_id)
        # a program may have changed them since the batch before
        if self._ends_with != (ends_with := (module.loss_fn, module.forward_funcs[-1])):
            autocast = partial(autocast_if_enabled, self._engine)
            of_hidden = LossOfHidden.of(module, stage.weight_gradients, autocast, stage.own_time.layers)
            self._ends_with, self._of_hidden = ends_with, of_hidden
        return None if self._of_hidden is None or self._of_hidden.needs_logits else self._of_hidden

    def run_layers(self, inputs: Any, training: bool) -> Any:
        """Run the layers of the active part, and return their outputs."""
        with checkpointing_with_gradients(self._engine.module, self._offloads) if self.checkpoints else _NOTHING:
            outputs = DeepSpeedEngine.forward(self._engine, inputs)
        if not training:
            ds_checkpointing.reset()  # as the stock engine does between evaluation forwards
        return outputs

    def backward_of_loss(self, loss: Any) -> None:
        """Run the backward of the last part, from a slice's share of the loss.

        DeepSpeed's hook divides by the micro-batches (`ModelEndsEngine._backward_prologue_per_tensor`).
        """
        scale = missing_loss_scale(self._engine.optimizer)
        DeepSpeedEngine.backward(self._engine, loss if scale == 1.0 else loss.float() * scale)

    def backward_of_outputs(self, outputs: Any, gradients: Tensors) -> None:
        """Act for another part as `DeepSpeedEngine.backward` does. Its prologue runs from hooks on the outputs."""
        tensors = [t for t in as_tuple(outputs, "the outputs of a stage") if t.requires_grad]
        if tensors:
            with self._engine_backward():
                torch.autograd.backward(tensors, gradients)

    @contextmanager
    def weight_backward(self) -> Iterator[None]:
        """Let W run autograd. Its backward starts at weights, so no hook of an output runs DeepSpeed's prologue."""
        with self._engine_backward():
            self._engine._backward_prologue()
            yield

    @contextmanager
    def _engine_backward(self) -> Iterator[None]:
        """Mark this as the engine's backward: the ZeRO optimizers refuse a user's own `tensor.backward()`."""
        state = vars(self._engine)  # `nn.Module` would look for a parameter of that name each time
        state["_running_engine_backward"] = True
        try:
            yield
            self._engine._backward_epilogue()
        finally:
            state["_running_engine_backward"] = False

    def timed(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        """Call, with `wall_clock_breakdown` under one of DeepSpeed's timers. For a receive it times the wait."""
        if not self._is_timed:
            return call(*arguments)
        timer = self._engine.timers(name)
        timer.start()
        result = call(*arguments)
        timer.stop()
        return result


class PartRunner:
    """Run the actions of the part at `place`."""

    def __init__(self, stage: Stage, place: Place) -> None:
        self.place, self._stage = place, stage
        self._sends_outputs = stage.links.has_wire(Kind.FORWARD, place.chunk_id)
        self._sends_gradients = stage.links.has_wire(Kind.BACKWARD, place.chunk_id)
        self._has_warned = False
        # only this part owns what comes over a wire; offloading frees memory once nothing else holds it
        self.handed = HandedInputs(may_hand=self._sends_gradients and stage.offload is None)
        self._has_told_of_logits = False
        self.open_batch(None)

    def open_batch(self, batch: BatchInFlight | None) -> None:
        """Run actions of `batch` from now on; with None, no batch is open."""
        sends = self._sends_outputs, self._sends_gradients
        self._slices = None if batch is None else PartInFlight(batch, self.place, self._stage.store, *sends)
        self._num_weights = self._num_products = 0  # W actions that ran, and weight gradients in them
        self._sent: SliceKey | None = None  # the slice whose gradients B itself has sent
        calls, chunk_id = self._stage.deepspeed, self.place.chunk_id
        # before the first batch too: a program may change the last layer for that batch alone
        self._of_hidden = calls.loss_of_hidden(self._stage, chunk_id) if self.place.is_last else None

    def close_batch(self) -> None:
        """Log once if the schedule splits backwards but no layer does."""
        if self._num_weights and not self._num_products and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"stage {self._stage.stage_id}, chunk {self.place.chunk_id}: the schedule splits backwards, but no "
                "layer here leaves weight gradients to W: only torch's own nn.Linear and layers with "
                "defer_weight_gradients() do, in the dtype of the weight and without autocast. Gradients are right; an "
                "unsplit schedule is as fast."
            )

    def _open(self) -> PartInFlight:
        assert self._slices is not None, "no batch is open"
        return self._slices

    def _active(self, action: Action, mode: str) -> ActiveSlice:
        """Return the facts about the slice that layers may read."""
        micro_batch = self._open().batch.micro_batches[action.micro_batch_id]
        plan, starts = micro_batch.plan, micro_batch.shape.starts
        start, stop = plan.span(action.slice_id)
        whole = ActiveSlice(
            start,
            stop,
            plan.sequence_length,
            micro_batch_id=action.micro_batch_id,
            slice_id=action.slice_id,
            part_id=self.place.part_id,
            mode=mode,
            documents=None if starts is None else Documents(starts, start, stop),
            store=self._stage.store,
            wants_logits=self._of_hidden is None or self._stage.results.needs_logits,
            keeps_attention=self._stage.deepspeed.keeps_attention and mode != "eval",
        )
        return self._stage.sequence.part_of(whole)

    def forward(self, action: Action) -> None:
        """Run the layers of this part on one slice; the last part adds the slice's share of the loss."""
        slices, stage = self._open(), self._stage
        training = slices.batch.training
        active = self._active(action, "train" if training else "eval")
        saving = self._begin(action)
        # wait for the message of the part before, or cut the micro-batch
        leaves, is_tuple = self._leaves(action, active)
        inputs = self.handed.leaves_or_copies(leaves, action.slice_id == 0)
        # layers see the active slice, so that attention reads and writes its keys and values
        stage.own_time.layers_begin()
        with push_slice(active), saving:
            try:
                outputs = stage.deepspeed.run_layers(inputs if is_tuple else inputs[0], training)
            except RuntimeError as error:
                self.handed.explain(error)
                if stage.offload is not None:
                    explain_refusal(error)
                raise
            if training:
                plan = slices.batch.micro_batches[action.micro_batch_id].plan
                self.handed.look(leaves, inputs, action.slice_id == 0, is_last=action.slice_id == plan.num_slices - 1)
            loss = self._loss(active, outputs) if self.place.is_last else None
            if stage.finite is not None and training and loss is not None and active.wants_logits:
                stage.finite.look("the loss function", "the loss", loss)
        stage.own_time.layers_end()
        # keep the leaves and the outputs until B; a part on the same stage gets the outputs without a message
        slices.keep(action, leaves, outputs, loss)
        if not self._sends_outputs and not self.place.is_last:
            stage.links.hand_on(action, *self._outputs(action))
        slices.finish(action)

    def _loss(self, active: ActiveSlice, outputs: Any) -> Any:
        """Add the slice's share of the loss to the batch's (DeepSpeed's `total_loss`); log the bytes of logits once."""
        results = self._stage.results
        if not active.wants_logits:
            assert self._of_hidden is not None
            if self._stage.flops is not None:
                self._stage.flops.defer(active.micro_batch_id, self._of_hidden.operations(outputs))
            return results.add(active, outputs, self._of_hidden)
        if not self._has_told_of_logits:
            self._has_told_of_logits = True
            asks = "eval_batch(return_logits=True)" if results.needs_logits else "loss_fn"
            tell_of_logits(f"stage {self._stage.stage_id}: {asks}", outputs, active.num_tokens)
        return results.add(active, outputs)

    def _begin(self, action: Action) -> AbstractContextManager[Any]:
        """Start the copies of saved tensors that are due at this computation; return the saving context of an F."""
        offload = self._stage.offload
        if offload is None:
            return _NOTHING
        offload.begin(action)
        return offload.saving(self._open().key(action)) if action.kind is Kind.FORWARD else _NOTHING

    def _leaves(self, action: Action, active: ActiveSlice) -> tuple[Tensors, bool]:
        """Return the leaves of this slice's graph, and whether the layers take a tuple."""
        if self.place.is_first:
            inputs = self._open().batch.micro_batches[action.micro_batch_id].inputs
            assert inputs is not None
            return inputs.span(active.start, active.stop), inputs.is_tuple
        spec, leaves = self._received(action, PIPE_RECV_INPUT_TIMER)
        for leaf, tensor in zip(leaves, spec.tensors, strict=True):
            if tensor.requires_grad:
                leaf.requires_grad_()
        return leaves, spec.is_tuple

    def _received(self, action: Action, timer: str) -> tuple[MessageSpec, Tensors]:
        """Return the message that `action` needs, once it has arrived."""
        stage = self._stage
        stage.watchdog.waits(partial(stage.links.describe_wait, action))
        message = stage.deepspeed.timed(timer, stage.links.receive, action)
        stage.watchdog.note(action)
        stage.tracer.input_is_here()
        stage.own_time.input_is_here()
        return message

    def backward(self, action: Action) -> None:
        """Compute the gradients of one slice. Slices come in reverse, so dK and dV of this one are complete."""
        slices, stage = self._open(), self._stage
        slice_, key = slices.get(action), slices.key(action)
        self._begin(action)
        # wait for the gradients of the outputs; the last part begins at its loss
        gradients: Tensors = ()
        if not self.place.is_last:
            _, gradients = self._received(action, PIPE_RECV_GRAD_TIMER)
        # layers keep the factors of weight gradients: for W, or for one product with other slices
        is_split = key in slices.batch.split
        with push_slice(self._active(action, "recompute")) as active, stage.weight_gradients.deferred(key):
            if self.place.is_last:
                stage.deepspeed.backward_of_loss(slice_.loss)
                if not active.wants_logits:  # the backward has computed the loss
                    stage.results.book(active, slice_.loss)
                    if stage.finite is not None:
                        stage.finite.look("the loss function", "the loss", slice_.loss)
            else:
                stage.deepspeed.backward_of_outputs(slice_.outputs, gradients)
            if stage.finite is not None and is_split:
                stage.finite.look_at_parameters()
        if not self._sends_gradients and not self.place.is_first:
            stage.links.hand_on(action, self._input_gradients(action))
        if not is_split:
            self._compute_weights(action)
        slices.finish(action)

    def _compute_weights(self, action: Action) -> int:
        """Compute the weight gradients that wait for this B or W, if any; return how many its slice had."""
        stage, key = self._stage, self._open().key(action)
        is_due = stage.weight_gradients.is_due(key)
        stage.own_time.layers_begin()
        # nobody waits for weight gradients, but the stage before waits for this slice's
        if is_due and self._sends_gradients and action.kind is Kind.BACKWARD:
            self._send_gradients(action)
            self._sent = action.unit
        # most often the products wait for other slices, or there are none
        has_work = is_due or stage.finite is not None
        with push_slice(self._active(action, "weight")) if has_work else _NOTHING:
            count = stage.weight_gradients.compute(key, stage.deepspeed.weight_backward)
            if stage.finite is not None:
                stage.finite.look_at_parameters()
        stage.own_time.layers_end()
        return count

    def weight(self, action: Action) -> None:
        """Compute the weight gradients that the B of this slice and of its group have left."""
        slices = self._open()
        slices.get(action)
        self._begin(action)
        # the factors that B kept: the inputs, and the gradients of the outputs
        self._num_weights += 1
        self._num_products += self._compute_weights(action)
        slices.finish(action)

    def send_activation(self, action: Action) -> None:
        stage = self._stage
        stage.deepspeed.timed(PIPE_SEND_OUTPUT_TIMER, stage.links.send_activation, action, *self._outputs(action))
        self._open().finish(action)

    def _outputs(self, action: Action) -> tuple[Tensors, bool]:
        """Return the outputs of F, and whether the layers gave a tuple.

        Those without a gradient are copies: a layer may change a buffer in place before the next part has received it.
        Some wires make them.
        """
        outputs, copies = self._open().get(action).outputs, self._stage.links.copies_outputs(self.place.chunk_id)
        tensors = as_tuple(outputs, "the outputs of a stage")
        return tuple([t if copies or t.requires_grad else t.clone() for t in tensors]), not torch.is_tensor(outputs)

    def send_gradients(self, action: Action) -> None:
        """Send the gradients of the tensors that this slice received, unless its B has."""
        if self._sent != action.unit:
            self._send_gradients(action)
        self._open().finish(action)

    def _send_gradients(self, action: Action) -> None:
        stage = self._stage
        stage.deepspeed.timed(PIPE_SEND_GRAD_TIMER, stage.links.send_gradients, action, self._input_gradients(action))

    def _input_gradients(self, action: Action) -> Tensors:
        """Return the gradients of the tensors that a slice received; zeros if the layers did not use them."""
        leaves = [leaf for leaf in self._open().get(action).inputs if leaf.requires_grad]
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
