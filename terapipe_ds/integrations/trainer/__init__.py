"""Run `transformers.Trainer` and TRL's `SFTTrainer` over pipeline stages, with the DeepSpeed JSON that names them.

TRL is imported only for `PipelineSFTTrainer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terapipe_ds.integrations.trainer.mixin import PipelineTrainer as PipelineTrainer
    from terapipe_ds.integrations.trainer.mixin import PipelineTrainerMixin as PipelineTrainerMixin
    from terapipe_ds.integrations.trainer.sft import PipelineSFTTrainer as PipelineSFTTrainer

_MODULE_OF = {"PipelineSFTTrainer": "sft", "PipelineTrainer": "mixin", "PipelineTrainerMixin": "mixin"}

__all__ = ["PipelineSFTTrainer", "PipelineTrainer", "PipelineTrainerMixin"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
