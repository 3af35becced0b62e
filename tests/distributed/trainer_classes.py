"""Trainers of others, over stages: some only delegate, others compute losses of their own. Used inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from terapipe_ds.integrations.trainer import PipelineTrainerMixin
from tests.distributed.trainer_jobs import refusal, setting_of


class Delegating(Trainer):
    """Do as the Trainers of LLaMA-Factory and Axolotl: add nothing to the loss but a condition."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.label_smoothing_factor < 0:
            return torch.zeros(())
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        return loss, logits, labels


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.compute_loss(model, inputs)


class DPOTrainer(Trainer):
    pass


def over_stages(kind: type[Trainer]) -> type[Trainer]:
    return type(kind.__name__, (PipelineTrainerMixin, kind), {})


def refusals_of_classes(folder: str) -> list[str]:
    """Return what each class is refused for; "" for one that is not."""
    return [refusal({}, folder, over_stages(kind)) for kind in (Delegating, OwnLoss, OwnStep, DPOTrainer)]


def without_section(folder: str) -> tuple[bool, bool]:
    """Return whether the mixin changes nothing of a Trainer without an enabled section."""
    from tests.distributed.trainer_jobs import PipelineTrainer, trainer_of

    trainer = trainer_of(PipelineTrainer, setting_of({}), folder, None)
    return trainer._stages is None, all(not parameter.is_meta for parameter in trainer.model.parameters())
