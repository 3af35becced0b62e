"""Run `transformers.Trainer` and TRL's `SFTTrainer` over pipeline stages, with the DeepSpeed JSON that names them.

TRL is imported only for `PipelineSFTTrainer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terapipe_ds import compat

compat.require_transformers("terapipe_ds.integrations.trainer")

from terapipe_ds.integrations.trainer.mixin import PipelineTrainer, PipelineTrainerMixin  # noqa: E402

if TYPE_CHECKING:
    from terapipe_ds.integrations.trainer.sft import PipelineSFTTrainer as PipelineSFTTrainer

__all__ = ["PipelineSFTTrainer", "PipelineTrainer", "PipelineTrainerMixin"]


def __getattr__(name: str) -> Any:
    if name != "PipelineSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    compat.require_trl(name)
    from terapipe_ds.integrations.trainer.sft import PipelineSFTTrainer

    return PipelineSFTTrainer
