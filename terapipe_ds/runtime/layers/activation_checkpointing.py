"""Activation checkpointing under slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing


@contextmanager
def checkpointing_with_gradients(module: Any) -> Iterator[None]:
    """Let a `PipelineModule` checkpoint by `checkpoint_with_gradients` during a forward."""
    # only so long: DeepSpeed tells reentrant checkpointing by the identity of the module's function
    checkpoint = getattr(module, "activation_checkpoint_func", None)
    if checkpoint is None:  # a measured module of another kind
        yield
        return
    module.activation_checkpoint_func = checkpoint_with_gradients(checkpoint)
    try:
        yield
    finally:
        module.activation_checkpoint_func = checkpoint


def checkpoint_with_gradients(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return `checkpoint`, but non-reentrant for ranges none of whose inputs requires a gradient.

    A reentrant checkpoint cuts such a range out of the graph, so that its parameters (an embedding fed by token ids)
    never get a gradient. What is recomputed runs under the autocast of the forward, which DeepSpeed forgets.
    """

    def checkpoint_range(function: Callable[..., Any], *inputs: Any) -> Any:
        function = _under_the_same_autocast(function)
        if torch.is_grad_enabled() and not any(torch.is_tensor(t) and t.requires_grad for t in inputs):
            return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
        return checkpoint(function, *inputs)

    return checkpoint_range


def _under_the_same_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    device = get_accelerator().device_name()
    if not torch.is_autocast_enabled(device):
        return function
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device))(function)
