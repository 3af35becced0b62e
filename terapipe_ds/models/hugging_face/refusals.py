"""Say why a model of transformers cannot be cut into pipeline stages or run in token slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch.distributed as torch_dist
import transformers
from transformers import cache_utils

from terapipe_ds import compat

T = TypeVar("T")

# Rotary embeddings whose angles depend on the length of what is computed at once: of a slice, they would be others.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class ModelRefusedError(ValueError):
    """A model that cannot be trained in token slices; the message says what of it, and what to do."""


def gathered(value: T) -> list[T]:
    """Return the values that all ranks give, by rank. A collective on the CPU: ranks may have no device yet."""
    group = None if torch_dist.get_backend() == "gloo" else torch_dist.new_group(backend="gloo")
    values = [value] * torch_dist.get_world_size()
    torch_dist.all_gather_object(values, value, group=group)
    if group is not None:
        torch_dist.destroy_process_group(group)
    return values


@contextlib.contextmanager
def refused_on_all_ranks() -> Iterator[None]:
    """Raise what some rank refuses on all ranks, since the others would wait for it. A collective at its end."""
    problem, own = "", None
    try:
        yield
    except Exception as error:
        is_said = isinstance(error, (ValueError, OSError)) and str(error)
        problem, own = str(error) if is_said else f"{type(error).__name__}: {error}", error
        if torch_dist.get_world_size() == 1:
            raise
    problems = gathered(problem)
    if any(problems):
        raise ModelRefusedError(next(filter(None, problems))) from own


def check_config(config: Any) -> None:
    """Raise ModelRefusedError where the config alone shows that the model cannot be trained in slices."""
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ModelRefusedError(
            "output_router_logits asks for a loss over the routers of all decoder layers, which are on several stages. "
            "Set it to False"
        )
    layerdrop = getattr(config.get_text_config(), "layerdrop", 0) or 0
    if layerdrop:
        raise ModelRefusedError(
            f"layerdrop is {layerdrop}: whole decoder layers would be left out at random, in one slice and not in the "
            "next. Set it to 0"
        )
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
