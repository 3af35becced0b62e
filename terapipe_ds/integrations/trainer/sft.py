"""Define TRL's SFTTrainer over pipeline stages."""

from __future__ import annotations

from trl import SFTTrainer

from terapipe_ds.integrations.trainer.mixin import PipelineTrainerMixin


class PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer):
    """Be TRL's `SFTTrainer` over pipeline stages."""
