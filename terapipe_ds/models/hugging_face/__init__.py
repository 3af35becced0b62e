"""Train causal language models of transformers in pipeline stages and token slices, by their own code."""

from __future__ import annotations

from terapipe_ds import compat

compat.require_transformers("terapipe_ds.models.hugging_face")

from terapipe_ds.models.hugging_face.create import from_config, from_pretrained, skeleton  # noqa: E402
from terapipe_ds.models.hugging_face.module import HuggingFaceModule  # noqa: E402
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError  # noqa: E402
from terapipe_ds.models.hugging_face.saving import save_pretrained  # noqa: E402

__all__ = ["HuggingFaceModule", "ModelRefusedError", "from_config", "from_pretrained", "save_pretrained", "skeleton"]
