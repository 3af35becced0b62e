"""What a stage does with one of its parts: forward of a slice, its loss, its backward, and the messages of the part.

The engine makes one ``PartRunner`` for each place (chunk) of its stage and hands it the actions of that chunk. A runner
holds no tensors: those of a batch are in its ``BatchInFlight``, by part, micro-batch and slice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

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

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.runtime.batch.in_flight import BatchInFlight, Key, MicroBatchInFlight, SliceInFlight
from terapipe_ds.runtime.batch.loss import weighted_loss
from terapipe_ds.runtime.batch.sliceable import Tensors, as_tuple
from terapipe_ds.runtime.engine.batch_results import accumulated, joined, sum_of_slices
from terapipe_ds.runtime.engine.deepspeed_faults import missing_loss_scale
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.failures.watchdog import Watchdog
from terapipe_ds.runtime.layers.activation_checkpointing import checkpointing_with_gradients
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.layout.layout import Place
from terapipe_ds.runtime.links.channel import MessageSpec, TensorSpec
from terapipe_ds.runtime.links.stage_links import StageLinks
from terapipe_ds.schedule.action import Action, Kind

logger = logging.getLogger("terapipe_ds")


@contextmanager
def ds_timed(engine: PipelineEngine, name: str) -> Iterator[None]:
    """One of DeepSpeed's timers, with ``wall_clock_breakdown``. Receives are timed while they are waited for."""
    if not engine.wall_clock_breakdown():
        yield
        return
    engine.timers(name).start()
    yield
    engine.timers(name).stop()


class PartRunner:
    """Runs the actions of one part.

    Args:
        engine: DeepSpeed's side of it: ``forward`` and ``backward`` of layers, the loss of the batch, results, timers.
        links: the channels of this part.
        store: of keys and values, shared by the parts of a stage (which have names of their own in it).
        weights: the weight gradients of the part's layers, for schedules that split backwards.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        place: Place,
        *,
        links: StageLinks,
        store: SliceStore,
        watchdog: Watchdog,
        weights: WeightGradients,
    ) -> None:
        self.place, self._weights = place, weights
        self._defers_nothing = False  # a batch with W has run, and no W had anything to do
        self._engine, self._links, self._store, self._watchdog = engine, links, store, watchdog
        self._batch: BatchInFlight | None = None

    def open_batch(self, batch: BatchInFlight | None) -> None:
        """Actions are those of ``batch`` from now on; None: of no batch."""
        self._batch = batch
        order = () if batch is None or not batch.training else batch.schedule.orders[batch.stage_id]
        split = any(a.kind is Kind.WEIGHT and a.chunk_id == self.place.chunk_id for a in order)
        self._products = 0 if split else -1

    def close_batch(self) -> None:
        """Say once where the schedule splits backwards and no layer does."""
        if self._products == 0 and not self._defers_nothing:
            self._defers_nothing = True
            logger.warning(
                "stage %d, chunk %d: the schedule splits backwards, but no layer here leaves weight gradients to W: "
                "only torch's own nn.Linear and layers with defer_weight_gradients() do, in the dtype of the weight "
                "and without autocast. Gradients are right; an unsplit schedule is as fast.",
                self._engine.stage_id, self.place.chunk_id,
            )  # fmt: skip

    def _open(self) -> BatchInFlight:
        assert self._batch is not None, "no batch is open"
        return self._batch

    @property
    def _tracer(self) -> Tracer:
        return self._engine._tracer  # benchmarks put one of their own there

    def _key(self, action: Action) -> Key:
        return (self.place.part_id, *action.unit)

    def _active(self, action: Action, mode: str) -> ActiveSlice:
        micro_batch = self._open().micro_batches[action.micro_batch_id]
        start, stop = micro_batch.plan.span(action.slice_id)
        return ActiveSlice(
            start=start, stop=stop, sequence_length=micro_batch.plan.sequence_length,
            micro_batch_id=action.micro_batch_id, slice_id=action.slice_id, part_id=self.place.part_id, mode=mode,
            store=self._store,
        )  # fmt: skip

    # -- F -----------------------------------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        """F: the layers of this part on one slice; on the last part its share of the loss as well."""
        batch, finite = self._open(), self._engine._finite
        micro_batch = batch.micro_batches[action.micro_batch_id]
        active = self._active(action, "train" if batch.training else "eval")
        inputs, packed = self._slice_inputs(action, active)
        with push_slice(active):
            outputs = self._layers(packed)
            if not batch.training:
                ds_checkpointing.reset()  # as the stock engine does between evaluation forwards
            loss = self._slice_loss(outputs, active, micro_batch) if self.place.is_last else None
            if finite is not None and batch.training and loss is not None:
                finite.look_at_loss(loss)
        if batch.training or not self.place.is_last:
            # the last part needs its loss only; the logits live on in the graph where it has them
            batch.put(self._key(action), SliceInFlight(inputs, None if self.place.is_last else outputs, loss))
        if active.stop == active.sequence_length:  # live slices have views of their own
            if self.place.is_first:
                micro_batch.inputs = None
            if self.place.is_last:
                micro_batch.labels = None
        if not self.place.is_last and not self._links.has_wire(Kind.FORWARD, self.place.chunk_id):
            self._links.hand_on(action, *self._outputs(action))
            self._after_handing_on(action)
        if not batch.training:
            self._after_eval_forward(action)

    def _layers(self, inputs: Any) -> Any:
        with checkpointing_with_gradients(self._engine.module):
            return DeepSpeedEngine.forward(self._engine, inputs)

    def _slice_inputs(self, action: Action, active: ActiveSlice) -> tuple[Tensors, Any]:
        """The leaves of this slice's graph, and what the layers get: copies, because a layer may work in place."""
        micro_batch = self._open().micro_batches[action.micro_batch_id]
        if self.place.is_first:
            assert micro_batch.inputs is not None
            leaves, is_tuple = micro_batch.inputs.span(active.start, active.stop), micro_batch.inputs.is_tuple
        else:
            spec, leaves = self._receive_input(action)
            is_tuple = spec.is_tuple
            for leaf, tensor in zip(leaves, spec.tensors, strict=True):
                leaf.requires_grad_(tensor.requires_grad)
        copies = tuple(leaf.clone() for leaf in leaves)
        return leaves, copies if is_tuple else copies[0]

    def _receive_input(self, action: Action) -> tuple[MessageSpec, Tensors]:
        waiting = self._watchdog.waiting(self._links.describe_wait(action))
        with waiting, ds_timed(self._engine, PIPE_RECV_INPUT_TIMER):
            message = self._links.receive_activation(action)
        self._tracer.input_is_here()
        return message

    def _slice_loss(self, outputs: Any, active: ActiveSlice, micro_batch: MicroBatchInFlight) -> Any:
        """The slice's share of its micro-batch's loss; books it for the batch's mean and for eval_batch's results."""
        engine = self._engine
        is_last_of_batch = micro_batch is self._open().micro_batches[-1]  # the one whose logits DeepSpeed returns
        if (engine.eval_return_logits and is_last_of_batch) or not engine._compute_loss:
            micro_batch.outputs.append(outputs)
        if not engine._compute_loss:
            return None
        assert micro_batch.labels is not None
        labels = micro_batch.labels.part(active.start, active.stop)
        weight = micro_batch.weights[active.slice_id]
        loss = engine.loss = weighted_loss(outputs, labels, weight, engine.module.loss_fn)
        if self._open().training:
            engine.total_loss = accumulated(engine.total_loss, loss)
            self._book_additional_losses(weight)
        micro_batch.losses.append(loss.detach() if torch.is_tensor(loss) else [part.detach() for part in loss])
        if active.stop == active.sequence_length:
            engine.fwd_outputs.append(sum_of_slices(micro_batch.losses))
        return loss

    def _book_additional_losses(self, weight: float) -> None:
        """Losses that the module reports beside its own (``PipelineModule.get_additional_losses``), for reporting only.

        They are weighted as the loss is; a slice without a valid label adds nothing.
        """
        engine = self._engine
        additional = engine.module.get_additional_losses()
        if additional is None:
            return
        if engine.total_additional_losses is None:
            engine.total_additional_losses = type(additional)()
        for name, loss in additional.items():
            total = engine.total_additional_losses.get(name)
            share = torch.zeros_like(loss) if weight == 0.0 else loss * weight
            engine.total_additional_losses[name] = accumulated(total, share)

    def _after_eval_forward(self, action: Action) -> None:
        """Evaluation has no backward that would give a slice's memory back."""
        engine, micro_batch = self._engine, self._open().micro_batches[action.micro_batch_id]
        if action.slice_id < micro_batch.plan.num_slices - 1:
            return
        self._store.release(self.place.part_id, action.micro_batch_id)
        if self.place.is_last and micro_batch.outputs:
            rows, dim = micro_batch.shape.rows, engine.terapipe_config.sequence_dim
            outputs = joined(micro_batch.outputs, micro_batch.plan, micro_batch.weights, rows, dim)
            micro_batch.outputs = []
            if engine.eval_return_logits:
                engine.outputs = outputs
            if not engine._compute_loss:
                engine.fwd_outputs.append(outputs)

    # -- B -----------------------------------------------------------------------------------------------------------

    def backward(self, action: Action) -> None:
        """B: the gradients of one slice. Slices of a micro-batch come in reverse, so its dK and dV are complete."""
        batch = self._open()
        slice_ = batch.get(self._key(action))
        gradients = () if self.place.is_last else self._receive_gradients(action)
        key = self._key(action)
        deferred = self._weights.deferred(key) if self._weights.splits(key) else nullcontext()
        with push_slice(self._active(action, "recompute")), deferred:
            if self.place.is_last:
                assert slice_.loss is not None
                scale = missing_loss_scale(self._engine.optimizer)
                DeepSpeedEngine.backward(self._engine, slice_.loss if scale == 1.0 else slice_.loss.float() * scale)
            else:
                self._backward_from(slice_.outputs, gradients)
            if self._engine._finite is not None:
                self._engine._finite.look_at_parameters()
        slice_.outputs = slice_.loss = None
        if self.place.is_first:
            self._after_backward(action)
        elif not self._links.has_wire(Kind.BACKWARD, self.place.chunk_id):
            gradients = self._input_gradients(action)
            self._links.hand_on(action, MessageSpec((), is_tuple=True), gradients)
            self._after_backward(action)
        if action.slice_id == 0:
            self._store.release(self.place.part_id, action.micro_batch_id)

    def _after_backward(self, action: Action) -> None:
        """B has run and its gradients are on their way: the slice is live as long as it has a W to come."""
        batch = self._open()
        if self._weights.splits(self._key(action)):
            batch.get(self._key(action)).inputs = ()
        else:
            batch.drop(self._key(action))

    def weight(self, action: Action) -> None:
        """W: the weight gradients that the B of this slice has left."""
        self._open().get(self._key(action))
        with push_slice(self._active(action, "weight")):
            self._products += self._weights.compute(self._key(action), self._weight_backward)
            if self._engine._finite is not None:
                self._engine._finite.look_at_parameters()
        self._open().drop(self._key(action))

    def _receive_gradients(self, action: Action) -> Tensors:
        waiting = self._watchdog.waiting(self._links.describe_wait(action))
        with waiting, ds_timed(self._engine, PIPE_RECV_GRAD_TIMER):
            gradients = self._links.receive_gradients(action)
        self._tracer.input_is_here()
        return gradients

    def _backward_from(self, outputs: Any, gradients: Tensors) -> None:
        """What ``DeepSpeedEngine.backward`` does around a loss, around gradients that came from the next stage.

        Its prologue runs from hooks on the outputs; the flag keeps the ZeRO optimizers from taking this for a user's
        own ``tensor.backward()``.
        """
        tensors = [t for t in as_tuple(outputs, "the outputs of a stage") if t.requires_grad]
        if not tensors:
            return
        with self._engine_backward():
            torch.autograd.backward(tensors, list(gradients))

    @contextmanager
    def _engine_backward(self) -> Iterator[None]:
        engine = self._engine
        engine._running_engine_backward = True
        try:
            yield
            engine._backward_epilogue()
        finally:
            engine._running_engine_backward = False

    @contextmanager
    def _weight_backward(self) -> Iterator[None]:
        """The same for W, on whose leaves no hook of an output is that would run the prologue."""
        with self._engine_backward():
            self._engine._backward_prologue()
            yield

    # -- messages ----------------------------------------------------------------------------------------------------

    def post_activation(self, action: Action) -> None:
        """Take the input of a later F in, beside what is computed."""
        self._links.post_activation(action)

    def post_gradients(self, action: Action) -> None:
        """Take the gradients of a later B in, beside what is computed."""
        self._links.post_gradients(action)

    def send_activation(self, action: Action) -> None:
        """Send what the layers gave; in evaluation nothing else holds it then."""
        spec, tensors = self._outputs(action)
        with ds_timed(self._engine, PIPE_SEND_OUTPUT_TIMER):
            self._links.send_activation(action, spec, tensors)
        self._after_handing_on(action)

    def _outputs(self, action: Action) -> tuple[MessageSpec, Tensors]:
        outputs = self._open().get(self._key(action)).outputs
        tensors = as_tuple(outputs, "the outputs of a stage")
        return MessageSpec(tuple(TensorSpec.of(t) for t in tensors), is_tuple=not torch.is_tensor(outputs)), tensors

    def _after_handing_on(self, action: Action) -> None:
        if not self._open().training:
            self._open().drop(self._key(action))

    def send_gradients(self, action: Action) -> None:
        """Send the gradients of what this slice received."""
        with ds_timed(self._engine, PIPE_SEND_GRAD_TIMER):
            self._links.send_gradients(action, self._input_gradients(action))
        self._after_backward(action)

    def _input_gradients(self, action: Action) -> Tensors:
        """Of what a slice received; zeros where the layers did not use it."""
        leaves = self._open().get(self._key(action)).inputs
        return tuple(
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves if leaf.requires_grad
        )
