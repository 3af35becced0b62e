"""Where the ends of the model stand: what DeepSpeed asks its first and last stage, when parts stand elsewhere."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.runtime.layout.layout import Layout, Place
from terapipe_ds.runtime.layout.tied_and_copied import sum_losses
from terapipe_ds.runtime.links.groups import PipelineGroups


class StageEnds(PipelineEngine):
    """A base of ``TeraPipeEngine``: data is drawn where inputs or labels are needed, and the loss of a batch is known
    where the last part stands."""

    _layout: Layout
    _groups: PipelineGroups
    _place: Place | None
    total_loss: Any  # of the batch so far: DeepSpeed's attributes, without types
    total_additional_losses: Any

    def is_last_stage(self) -> bool:
        """True where the loss of a batch is known: on the stage of the last part, once this engine is built."""
        if "_parts" not in vars(self):
            return super().is_last_stage()  # DeepSpeed's own start, neighbour by neighbour
        return self.stage_id == self._layout.loss_stage

    def _aggregate_total_loss(self) -> Any:
        if self._layout.has_copies:
            sum_losses(self, self._layout, self._groups)
        return super()._aggregate_total_loss()

    def set_dataloader(self, loader: Any) -> None:
        """Kept where data is drawn."""
        if self.stage_id in self._layout.drawing_stages:
            self.training_dataloader = loader
            self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Kept where data is drawn."""
        if self.stage_id in self._layout.drawing_stages:
            self.training_dataloader = None
            self.data_iterator = iterator

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self._layout.loss_stage))

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        """The loss is divided by the number of micro-batches, and not once more what comes back from other parts."""
        if self._place is None or self._place.is_last:
            return super(PipelineEngine, self)._backward_prologue_per_tensor(grad)
        return grad
