"""Activation checkpointing under slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing


def checkpoint_with_gradients(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint``, but non-reentrant for ranges none of whose inputs requires a gradient.

    A reentrant checkpoint cuts such a range out of the graph, so that its parameters (an embedding fed by token ids)
    never get a gradient; stock DeepSpeed fails there. The non-reentrant kind saves the same memory and has no such
    limit.
    """
    if checkpoint is ds_checkpointing.non_reentrant_checkpoint:
        return checkpoint

    def checkpoint_range(function: Callable[..., Any], *inputs: Any) -> Any:
        if torch.is_grad_enabled() and not any(torch.is_tensor(t) and t.requires_grad for t in inputs):
            return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
        return checkpoint(function, *inputs)

    return checkpoint_range
