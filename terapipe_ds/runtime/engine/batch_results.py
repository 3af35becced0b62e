"""Combine the losses and outputs of slices into the losses and outputs of their batch.

A slice's share of the loss is the result of `loss_fn` times its weight: the share of the micro-batch's labels that it
has (`batch.loss_weights`). If it has none, its share is an exact zero and nobody calls `loss_fn`. B starts at this
share. `BatchResults.book` adds the share's value to the loss of the batch, which DeepSpeed reads.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention import ActiveSlice
from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.in_flight import BatchInFlight
from terapipe_ds.runtime.batch.loss_weights import (
    LossKindError,
    exact_zero,
    floating_tensors,
    require_graph,
    require_scalars,
    share_of,
    weighted_loss,
)
from terapipe_ds.runtime.layout.sequence_axis import gathered

_WIDE = (torch.float32, torch.float64)


class LossOfNaN(NamedTuple):
    """Name a slice whose loss is NaN although it counts; `is_of_loss_fn`: the input of the loss was finite."""

    problem: str
    is_of_loss_fn: bool


class BatchResults:
    """Collect the losses and outputs of one batch on one stage; a stage without the last part has none.

    When a micro-batch is complete, its losses and outputs go without a graph to DeepSpeed's attributes: `loss`,
    `fwd_outputs` and `outputs`, in training also `total_loss` and `total_additional_losses`. With `sums_outputs` this
    object keeps the sum of the outputs of each slice. If a loss is NaN, the sum tells whether the outputs were finite.
    """

    def __init__(
        self, engine: PipelineEngine, sequence_dim: int, sequence: SequenceRanks, sums_outputs: bool = False
    ) -> None:
        self._engine, self._sequence_dim, self._sequence = engine, sequence_dim, sequence
        self._sums_outputs = sums_outputs
        self.returns_each_loss = False  # the caller of an evaluation asks for each loss, not for their mean
        self.begin(None)

    def begin(self, batch: BatchInFlight | None) -> None:
        """Collect the results of `batch` from now on; with None, collect nothing."""
        self._batch = batch
        self.problem: str | None = None  # why a loss is no scalar
        self._total: Any = None
        self._total_additional: Any = None
        # the loss and the sum of the outputs, for the slices of a training batch that count
        self._counted: list[tuple[ActiveSlice, Any, torch.Tensor | None]] = []
        self._losses: dict[int, dict[int, Any]] = defaultdict(dict)  # by micro-batch, until it is complete, and slice
        self._outputs: dict[int, list[Any]] = defaultdict(list)

    @property
    def needs_logits(self) -> bool:
        """Return whether the caller of this batch wants more than its loss."""
        return bool(self._engine.eval_return_logits or not self._engine._compute_loss)

    def add(self, active: ActiveSlice, outputs: Any, of_hidden: Callable[..., torch.Tensor] | None = None) -> Any:
        """Add the last part's outputs for a slice. Return its share of the loss with its graph; None without a loss.

        If `of_hidden` computes the loss in training, its value is there after the slice's B: then `book` adds it.
        """
        assert self._batch is not None, "no batch is open"
        engine, micro_batch_id = self._engine, active.micro_batch_id
        is_last_of_batch = micro_batch_id == len(self._batch.micro_batches) - 1  # DeepSpeed returns its logits
        if (engine.eval_return_logits and is_last_of_batch) or not engine._compute_loss:
            self._outputs[micro_batch_id] += gathered(outputs, self._sequence)
        loss = self._loss_of(self._batch, active, outputs, of_hidden) if engine._compute_loss else None
        if loss is None and active.slice_id == self._batch.micro_batches[micro_batch_id].plan.num_slices - 1:
            self._hand_over(self._batch, micro_batch_id)
        elif loss is not None and (of_hidden is None or not self._batch.training):
            self.book(active, loss, outputs)
        return loss

    def _loss_of(self, batch: BatchInFlight, active: ActiveSlice, outputs: Any, of_hidden: Any) -> Any:
        micro_batch = batch.micro_batches[active.micro_batch_id]
        assert micro_batch.labels is not None
        labels = micro_batch.labels.part(active.start, active.stop)
        weight = micro_batch.weights[active.slice_id]
        if of_hidden is not None:
            loss = of_hidden(outputs, labels, weight)
        else:
            loss = self._loss_of_outputs(outputs, labels, weight, micro_batch.plan.num_slices, batch.training)
        if batch.training:
            self._add_additional_losses(weight)
        return loss

    def _loss_of_outputs(self, outputs: Any, labels: Any, weight: float, num_slices: int, training: bool) -> Any:
        """Return the share of the loss. If it is no scalar with a graph, return zero; all ranks raise later."""
        loss_fn = self._engine.module.loss_fn
        try:
            loss = weighted_loss(outputs, labels, weight, loss_fn, not training and self.returns_each_loss)
            if training:
                require_graph(loss, outputs, loss_fn)
            elif num_slices > 1 and isinstance(loss, list):
                require_scalars(loss, loss_fn)
            return loss
        except LossKindError as error:
            if loss_fn is None and training:
                raise
            self.problem = str(error)
            return exact_zero(outputs) if training else torch.zeros((), device=self._engine.device)

    def book(self, active: ActiveSlice, loss: Any, outputs: Any = None) -> None:
        """Add a slice's share of the loss, which has its value, to the results of its micro-batch.

        `outputs` are those that `loss_fn` got, if it is the user's.
        """
        batch, micro_batch_id = self._batch, active.micro_batch_id
        assert batch is not None, "no batch is open"
        micro_batch = batch.micro_batches[micro_batch_id]
        value = loss.detach() if torch.is_tensor(loss) else [part.detach() for part in loss]
        if batch.training:
            self._total = accumulated(self._total, value)
            if micro_batch.weights[active.slice_id] > 0.0:
                sums = self._sums_outputs and outputs is not None
                self._counted.append((active, value, _sum_of(outputs) if sums else None))
        self._losses[micro_batch_id][active.slice_id] = value
        if len(self._losses[micro_batch_id]) == micro_batch.plan.num_slices:
            self._hand_over(batch, micro_batch_id)

    def _add_additional_losses(self, weight: float) -> None:
        """Add the losses that `PipelineModule.get_additional_losses` reports, weighted like the trained loss."""
        additional = self._engine.module.get_additional_losses()
        if additional is not None and self._total_additional is None:
            self._total_additional = type(additional)()
        for name, loss in (additional or {}).items():
            share = torch.zeros_like(loss) if weight == 0.0 else share_of(loss, weight)
            self._total_additional[name] = accumulated(self._total_additional.get(name), share)

    def loss_of_nan(self) -> LossOfNaN | None:
        """Return the first slice whose loss is NaN although it counts. Read one number, and the others only then."""
        if self._total is None or not torch.isnan(self._total):
            return None
        for active, loss, total in sorted(self._counted, key=lambda each: (each[0].micro_batch_id, each[0].slice_id)):
            if torch.isnan(loss):
                is_of_loss_fn = total is not None and bool(torch.isfinite(total))
                cause = (
                    "The outputs of the last layer are finite there, so that loss_fn made it of them"
                    if is_of_loss_fn
                    else 'Or the layers gave NaN: "check_finite": "every_step" names the place'
                )
                return LossOfNaN(
                    f"the loss of micro-batch {active.micro_batch_id}, slice {active.slice_id} (tokens "
                    f"[{active.start}, {active.stop}) of {active.sequence_length}) is NaN, and it counts. Either "
                    "loss_fn ignores all its labels, which the terapipe section counts: set ignore_index to the label "
                    f"that loss_fn ignores, and loss_reduction to what it divides by. {cause}",
                    is_of_loss_fn,
                )
        return None

    def _hand_over(self, batch: BatchInFlight, micro_batch_id: int) -> None:
        """Add the results of a complete micro-batch to DeepSpeed's attributes."""
        by_slice = self._losses.pop(micro_batch_id, {})
        engine, losses = self._engine, [by_slice[slice_id] for slice_id in sorted(by_slice)]
        # like the stock engine for a micro-batch: its loss, and the sum of the batch so far
        if losses and self.problem is None:
            engine.loss = sum_of_slices(losses)
            engine.fwd_outputs.append(engine.loss)
        if batch.training:
            engine.total_loss, engine.total_additional_losses = self._total, self._total_additional
        # join the logits of slices, and of the sequence ranks' shares of them, to logits of whole sequences
        outputs = self._outputs.pop(micro_batch_id, [])
        if outputs:
            micro_batch = batch.micro_batches[micro_batch_id]
            size, rows = self._sequence.size, micro_batch.shape.rows
            whole = joined(outputs, micro_batch.plan.divided(size), micro_batch.all_weights, rows, self._sequence_dim)
            if engine.eval_return_logits:
                engine.outputs = whole
            if not engine._compute_loss:
                engine.fwd_outputs.append(whole)


def _sum_of(outputs: Any) -> torch.Tensor:
    """Return one number that is finite if all floating numbers of `outputs` are."""
    return functools.reduce(torch.add, [each.detach().sum(dtype=torch.float32) for each in floating_tensors(outputs)])


def accumulated(total: Any, loss: Any) -> Any:
    """Return `total + loss` without a graph, in fp32 at least; lists are added element by element."""
    if not torch.is_tensor(loss):
        return [accumulated(None if total is None else total[i], part) for i, part in enumerate(loss)]
    value = loss.detach() if loss.requires_grad else loss
    if value.dtype not in _WIDE:
        value = value.to(torch.promote_types(value.dtype, torch.float32))
    return value if total is None else total + value


def sum_of_slices(losses: list[Any]) -> Any:
    """Return the loss of a micro-batch from its slices' shares, in the same dtype on all replicas.

    Of several losses a slice without weight has one zero, which changes none of them.
    """
    several = [loss for loss in losses if not torch.is_tensor(loss)]
    return functools.reduce(accumulated, several or losses, None)


def joined(outputs: list[Any], plan: SlicePlan, weights: tuple[float, ...], rows: int, sequence_dim: int) -> Any:
    """Concatenate the outputs of a micro-batch's slices along the token dimension.

    Scalars are losses that the model returns itself: their weighted sum is returned. Logits of the shape
    `[rows * tokens, ...]`, which some models give, come back in the order of whole sequences.
    """
    if len(outputs) == 1:
        return outputs[0]
    if not torch.is_tensor(outputs[0]):
        return tuple(joined(list(parts), plan, weights, rows, sequence_dim) for parts in zip(*outputs, strict=True))
    if outputs[0].dim() == 0:
        shares = [output * weight for output, weight in zip(outputs, weights, strict=True) if weight != 0.0]
        return functools.reduce(torch.add, shares, torch.zeros_like(outputs[0]))
    slices = list(zip(outputs, plan.lengths, strict=True))
    has_rows_to_flatten = sequence_dim == 1 and rows > 1 and max(plan.lengths) > 1
    if has_rows_to_flatten and all(o.size(0) == rows * n for o, n in slices):
        return torch.cat([o.unflatten(0, (rows, n)) for o, n in slices], dim=1).flatten(0, 1)
    for dim in (sequence_dim, *range(outputs[0].dim())):
        if all(-o.dim() <= dim < o.dim() and o.size(dim) == n for o, n in slices):
            return torch.cat(outputs, dim=dim)
    return outputs[-1]  # nothing in it depends on the tokens
