"""Losses and outputs of a batch, put together from those of its slices."""

from __future__ import annotations

import functools
from typing import Any

import torch

from terapipe_ds.plan import SlicePlan


def accumulated(total: Any, loss: Any) -> Any:
    """``total + loss`` without a graph, in fp32 at least; lists element by element."""
    if not torch.is_tensor(loss):
        return [accumulated(None if total is None else total[i], part) for i, part in enumerate(loss)]
    value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
    return value if total is None else total + value


def sum_of_slices(losses: list[Any]) -> Any:
    """The loss of a micro-batch from its slices' shares; lists element by element."""
    if torch.is_tensor(losses[0]):
        return functools.reduce(torch.add, losses)
    return [functools.reduce(torch.add, parts) for parts in zip(*losses, strict=True)]


def joined(outputs: list[Any], plan: SlicePlan, weights: tuple[float, ...], rows: int, sequence_dim: int) -> Any:
    """The outputs of a micro-batch's slices put together along the dimension that has the slice's tokens.

    Scalars are losses (the model returns them itself): their weighted sum. ``[rows * tokens, ...]``, as some models
    give their logits, comes back in the order that it has for the whole sequence.
    """
    if len(outputs) == 1:
        return outputs[0]
    if not torch.is_tensor(outputs[0]):
        return tuple(joined(list(parts), plan, weights, rows, sequence_dim) for parts in zip(*outputs, strict=True))
    if outputs[0].dim() == 0:
        shares = [output * weight for output, weight in zip(outputs, weights, strict=True) if weight != 0.0]
        return functools.reduce(torch.add, shares, torch.zeros_like(outputs[0]))
    slices = list(zip(outputs, plan.lengths, strict=True))
    has_rows_to_flatten = sequence_dim == 1 and rows > 1 and max(plan.lengths) > 1
    if has_rows_to_flatten and all(o.size(0) == rows * n for o, n in slices):
        return torch.cat([o.unflatten(0, (rows, n)) for o, n in slices], dim=1).flatten(0, 1)
    for dim in (sequence_dim, *range(outputs[0].dim())):
        if all(-o.dim() <= dim < o.dim() and o.size(dim) == n for o, n in slices):
            return torch.cat(outputs, dim=dim)
    return outputs[-1]  # nothing in it depends on the tokens
