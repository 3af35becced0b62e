"""Say why a model of transformers cannot be cut into pipeline stages or run in token slices."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import cache_utils

from terapipe_ds import compat

# Rotary embeddings whose angles depend on the length of what is computed at once: of a slice, they would be others.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class ModelRefusedError(ValueError):
    """A model that cannot be trained in token slices; the message says what of it, and what to do."""


def check_config(config: Any) -> None:
    """Raise ModelRefusedError where the config alone shows that the model cannot be trained in slices."""
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ModelRefusedError(
            "output_router_logits asks for a loss over the routers of all decoder layers, which are on several stages. "
            "Set it to False"
        )
    if getattr(config.get_text_config(), "layerdrop", 0.0):
        raise ModelRefusedError("layerdrop leaves out layers by a draw for each call, so for each slice. Set it to 0")
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(family, "_is_stateful", False) and not hasattr(cache_utils, "LinearAttentionCacheLayerMixin"):
        raise ModelRefusedError(
            f"transformers {transformers.__version__} has a cache of a kind of its own for the states of its layers; "
            f"{compat.TESTED_VERSIONS['transformers']} has one for all"
        )
    kinds = sorted(_rope_types(config))
    refused = [kind for kind in kinds if kind in _LENGTH_DEPENDENT]
    if refused:
        raise ModelRefusedError(
            f"rope_type {refused[0]!r} computes other angles for short inputs than for long ones, "
            "so that those of a slice are not those of the sequence; fixed ones are 'linear', 'llama3' and 'yarn'"
        )


def _rope_types(config: Any) -> set[str]:
    config = config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_types = [each for each in scaling.values() if isinstance(each, dict)]  # one for each type of layer
    return {str(each.get("rope_type", each.get("type", "default"))) for each in (of_types or [scaling])}
