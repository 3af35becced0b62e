"""Train causal language models of transformers in pipeline stages and token slices, by their own code."""

from __future__ import annotations

from terapipe_ds.models.hugging_face.module import HuggingFaceModule, from_config
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError

__all__ = ["HuggingFaceModule", "ModelRefusedError", "from_config"]
