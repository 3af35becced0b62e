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
    """Around a forward of a ``PipelineModule``: its checkpoints are those of :func:`checkpoint_with_gradients`.

    For that long only: DeepSpeed asks which function a module has by identity, to tell reentrant checkpointing.
    """
    given = getattr(module, "activation_checkpoint_func", None)
    if given is None:  # a measured module of another kind
        yield
        return
    module.activation_checkpoint_func = checkpoint_with_gradients(given)
    try:
        yield
    finally:
        module.activation_checkpoint_func = given


def checkpoint_with_gradients(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint``, but non-reentrant for ranges none of whose inputs requires a gradient, and recomputed as it ran.

    A reentrant checkpoint cuts such a range out of the graph, so that its parameters (an embedding fed by token ids)
    never get a gradient; stock DeepSpeed fails there. The non-reentrant kind saves the same memory and has no such
    limit.
    """

    def checkpoint_range(function: Callable[..., Any], *inputs: Any) -> Any:
        function = _under_the_same_autocast(function)
        if torch.is_grad_enabled() and not any(torch.is_tensor(t) and t.requires_grad for t in inputs):
            return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
        return checkpoint(function, *inputs)

    return checkpoint_range


def _under_the_same_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which recomputes under the autocast that is on now: DeepSpeed's checkpoints recompute without, so
    that another dtype comes out than in the forward."""
    device = get_accelerator().device_name()
    if not torch.is_autocast_enabled(device):
        return function
    dtype = torch.get_autocast_dtype(device)

    def run(*inputs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return function(*inputs)

    return run
