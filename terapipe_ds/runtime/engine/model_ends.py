"""Let DeepSpeed find the ends of the model, sum over sequence ranks, and save a loss module.

DeepSpeed asks its first and last stage, but the ends may be on others. It does not know ranks that divide the tokens of
each slice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as stock_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.messages import logger
from terapipe_ds.runtime.checkpoints.manifest import CheckpointError
from terapipe_ds.runtime.layout.layout import Layout, Place
from terapipe_ds.runtime.layout.sequence_axis import counted_as_replicas, mean_over_ranks
from terapipe_ds.runtime.layout.tied_and_copied import sum_over_places
from terapipe_ds.runtime.links.groups import PipelineGroups


class ModelEndsEngine(PipelineEngine):
    """Adapt DeepSpeed's pipeline engine to first and last parts on any stage, and to an axis `sequence`.

    Each of N sequence ranks has N times its share of the loss, so that means over them equal those of the whole slice.
    """

    _is_built = False  # until then DeepSpeed builds its own engine, in which the last stage has the loss
    _place: Place | None = None  # of the part that runs now
    _layout: Layout
    _groups: PipelineGroups
    _sequence = SequenceRanks()
    total_loss: Any
    total_additional_losses: Any

    def is_last_stage(self) -> bool:
        """Return whether the loss of a batch is known here: on the stage of the last part."""
        return self.stage_id == self._layout.loss_stage if self._is_built else bool(super().is_last_stage())

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self._layout.loss_stage))

    def _aggregate_total_loss(self) -> Any:
        # stages with copies of the last part have the losses of other micro-batches
        if self._layout.has_copies:
            booked = self.total_loss, self.total_additional_losses
            ranks, control = self._groups.ranks, self._groups.control
            booked = sum_over_places(booked, self._layout, self.stage_id, ranks, control, self.device)
            self.total_loss, self.total_additional_losses = booked
        if self.is_last_stage():
            booked = self.total_loss, self.total_additional_losses
            self.total_loss, self.total_additional_losses = mean_over_ranks(booked, self._sequence)
        default = torch.get_default_dtype()
        # as the loss is sent: DeepSpeed receives in the default
        torch.set_default_dtype(torch.empty(0, device="cpu").float().dtype)
        try:
            return super()._aggregate_total_loss()
        finally:
            torch.set_default_dtype(default)

    def _reduce_outputs(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._compute_loss:  # else they are logits, of whole sequences on each rank
            outputs = mean_over_ranks(outputs, self._sequence)
        return super()._reduce_outputs(outputs, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save as DeepSpeed does. Only one of the sequence ranks, which have the same layers, saves them."""
        with counted_as_replicas(self.grid, self._sequence):
            return super().save_checkpoint(*args, **kwargs)

    def _exec_reduce_grads(self) -> None:
        with counted_as_replicas(self.grid, self._sequence):
            super()._exec_reduce_grads()

    def _bf16_reduce_grads(self) -> None:
        """Reduce the sums of each parameter group by themselves, in buckets of DeepSpeed's size.

        DeepSpeed casts all of a group at once, and first copies the sums of several groups into one tensor.
        """
        size = stock_engine.MEMORY_OPT_ALLREDUCE_SIZE
        for sums in self.optimizer.get_grads_for_reduction()[0]:
            for piece in sums.split(size):
                self.buffered_allreduce_fallback(grads=[piece], elements_per_buffer=size)

    def set_dataloader(self, loader: Any) -> None:
        """Keep a loader if this stage draws data."""
        if self.stage_id in self._layout.drawing_stages:
            self.training_dataloader, self.data_iterator = loader, iter(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Keep an iterator if this stage draws data."""
        if self.stage_id in self._layout.drawing_stages:
            self.training_dataloader, self.data_iterator = None, iterator

    def module_state_dict(self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        """Save the layers as DeepSpeed does, and a loss module on one rank that has seen all its gradients."""
        saved = super().module_state_dict(*args, exclude_frozen_parameters=exclude_frozen_parameters, **kwargs)
        loss_fn = self.module.loss_fn
        if isinstance(loss_fn, nn.Module) and self.is_last_stage() and self.grid.data_parallel_id == 0:
            frozen = {name for name, each in loss_fn.named_parameters() if not each.requires_grad}
            left_out = frozen if exclude_frozen_parameters else ()
            state = {name: each for name, each in loss_fn.state_dict().items() if name not in left_out}
            if state:
                self.checkpoint_engine.save(state_dict=state, path=self._path_of_loss())
        return saved

    def load_module_state_dict(self, checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        """Load a loss module, then the layers; the ranks meet at the end.

        Raises:
            CheckpointError: with `strict`, the checkpoint lacks the loss's trained parameters, like DeepSpeed's own.
        """
        loss_fn = self.module.loss_fn
        if isinstance(loss_fn, nn.Module) and loss_fn.state_dict():
            # a file for each tensor-parallel rank; its name also depends on the axis of sequence ranks
            paths = sorted(Path(self._path_of_loss()).parent.glob("loss_fn*-model_states.pt"))
            trained = [f"loss_fn.{name}" for name, each in loss_fn.named_parameters() if each.requires_grad]
            if paths:
                path = str(paths[self.grid.get_slice_parallel_rank() % len(paths)])
                loss_fn.load_state_dict(self.checkpoint_engine.load(path, map_location="cpu"), strict=strict)
            elif trained and strict:
                raise CheckpointError(
                    f"the checkpoint has no values of {', '.join(trained[:4])}, trained parameters of the loss module: "
                    "DeepSpeed's own engine and older versions of this package save layers alone. Give "
                    "the module its values yourself and load with load_module_strict=False, which leaves them as they "
                    "are"
                )
            elif self.global_rank == 0:
                kind = type(loss_fn).__name__
                logger.warning("the checkpoint has no values of loss_fn (%s), which keeps its own", kind)
        super().load_module_state_dict(checkpoint, strict, *args, **kwargs)

    def _path_of_loss(self) -> str:
        """Return this tensor-parallel rank's file of the loss, named as a layer's file is."""
        path = Path(self.module.ckpt_layer_path(str(self._curr_ckpt_path), 0))
        return str(path.with_name(re.sub(r"^layer_\d+", "loss_fn", path.name)))

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        """Divide the loss by the number of micro-batches, but not gradients that come back from other parts."""
        if self._place is None or self._place.is_last:  # `PipelineEngine` would go by the stage
            return super(PipelineEngine, self)._backward_prologue_per_tensor(grad)
        return grad
