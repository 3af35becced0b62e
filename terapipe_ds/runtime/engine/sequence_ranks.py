"""Sum losses and gradients over the ranks that divide the tokens of each slice, as DeepSpeed's own engine does not."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention.exchange import SequenceRanks
from terapipe_ds.runtime.layout.sequence_axis import counted_as_replicas, mean_over_ranks


class SequenceRanksEngine(PipelineEngine):
    """DeepSpeed's pipeline engine on a topology with the axis `sequence`.

    Each of N sequence ranks has N times its share of the loss, so that means over them are what the whole slice gives.
    """

    _sequence = SequenceRanks()
    total_loss: Any
    total_additional_losses: Any

    def _aggregate_total_loss(self) -> Any:
        if self.is_last_stage():
            booked = self.total_loss, self.total_additional_losses
            self.total_loss, self.total_additional_losses = mean_over_ranks(booked, self._sequence)
        return super()._aggregate_total_loss()

    def _reduce_outputs(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._compute_loss:  # else they are logits, of whole sequences on each rank
            outputs = mean_over_ranks(outputs, self._sequence)
        return super()._reduce_outputs(outputs, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save as DeepSpeed does, the layers by one of the sequence ranks, which all have the same."""
        with counted_as_replicas(self.grid, self._sequence):
            return super().save_checkpoint(*args, **kwargs)

    def _exec_reduce_grads(self) -> None:
        with counted_as_replicas(self.grid, self._sequence):
            super()._exec_reduce_grads()
