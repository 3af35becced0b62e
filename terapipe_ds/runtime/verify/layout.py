"""How a tensor of a whole sequence and the same tensor of its slices belong together.

Nobody says which dimension of a layer's output holds the tokens: hidden states may be [B, T, H], Megatron's [T, B, H],
flattened [B * T, H], or divided over tensor-parallel ranks. It is the dimension whose size goes with the length of the
slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.trials import Trials

Gather = Callable[[Tensor], Tensor]  # concatenates dimension 0 over the tensor-parallel ranks


@dataclass(frozen=True)
class TensorPeersOf:
    """The tensor-parallel ranks of this one: how many, which of them this is, and how to hear from all.

    Layers communicate in them, so that every decision has to be the same on all, also whether something failed.
    """

    size: int = 1
    rank: int = 0
    gather: Gather = lambda tensor: tensor
    exchange: Callable[[Any], list[Any]] = lambda mine: [mine]
    trials: Trials = field(default_factory=Trials)

    def any(self, flag: bool) -> bool:
        """Whether it is so on one of them."""
        return any(self.exchange(flag)) if self.size > 1 else flag

    def first(self, found: Any) -> Any:
        """What the first of them found that found anything; None where none did."""
        everyone = self.exchange(found) if self.size > 1 else [found]
        return next((one for one in everyone if one is not None), None)


@dataclass(frozen=True)
class TokenDim:
    """``dim`` holds the tokens; together with ``rows`` rows where both were flattened into it, and only those of one
    of ``shared_by`` ranks under sequence parallelism."""

    dim: int
    rows: int = 1
    rows_first: bool = True
    shared_by: int = 1

    def tokens_first(self, tensor: Tensor) -> Tensor:
        """[tokens, ...], of this rank."""
        if self.rows == 1:
            return tensor.movedim(self.dim, 0)
        sizes = (self.rows, -1) if self.rows_first else (-1, self.rows)
        return tensor.unflatten(self.dim, sizes).movedim(self.dim + int(self.rows_first), 0)

    def back(self, tensor: Tensor) -> Tensor:
        """What :meth:`tokens_first` was made of."""
        if self.rows == 1:
            return tensor.movedim(0, self.dim).contiguous()
        tensor = tensor.movedim(0, self.dim + int(self.rows_first))
        return tensor.flatten(self.dim, self.dim + 1).contiguous()

    def all_tokens(self, tensor: Tensor, peers: TensorPeersOf) -> Tensor:
        """[tokens, ...] of all ranks that share them."""
        own = self.tokens_first(tensor)
        return own if self.shared_by == 1 else peers.gather(own.contiguous())

    def cut(self, whole: Tensor, start: int, stop: int, peers: TensorPeersOf) -> Tensor:
        """Tokens [start, stop) of ``whole``, as a slice has them on this rank."""
        tokens = self.all_tokens(whole, peers)[start:stop]
        if self.shared_by > 1:
            tokens = tokens.chunk(self.shared_by)[peers.rank]
        return self.back(tokens)


@dataclass(frozen=True)
class Same:
    """No tokens: each slice has all of it (a mask, a scale)."""


@dataclass(frozen=True)
class PerSlice:
    """No tokens, but a value of its own for each slice, such as an auxiliary loss on its way; they add up to that of
    the whole sequence with the weights of the slices' losses."""

    values: tuple[Tensor, ...]


Layout = TokenDim | Same | PerSlice
ALONE = TensorPeersOf()


def token_dims(whole: Tensor, parts: Sequence[Tensor], plan: SlicePlan, peers: TensorPeersOf) -> list[TokenDim]:
    """All layouts by which the shapes of ``parts``, one per slice, are those of the slices of ``whole``."""
    found = []
    for shared_by in sorted({1, peers.size}):
        for dim in range(whole.dim()):
            rows, rest = divmod(whole.size(dim) * shared_by, plan.sequence_length)
            if rest or rows == 0:
                continue
            if all(_fits(whole, p, dim, rows * n, shared_by) for p, n in zip(parts, plan.lengths, strict=True)):
                found += [TokenDim(dim, rows, first, shared_by) for first in ((True, False) if rows > 1 else (True,))]
        if found:
            return found
    return found


def _fits(whole: Tensor, part: Tensor, dim: int, size: int, shared_by: int) -> bool:
    if part.dim() != whole.dim() or part.size(dim) * shared_by != size:
        return False
    return all(part.size(d) == whole.size(d) for d in range(whole.dim()) if d != dim)


def cut(layout: Layout, whole: Tensor, plan: SlicePlan, slice_id: int, peers: TensorPeersOf) -> Tensor:
    """What slice ``slice_id`` has of ``whole``; requires a gradient where ``whole`` does."""
    if isinstance(layout, TokenDim):
        part = layout.cut(whole.detach(), *plan.span(slice_id), peers)
    else:
        part = layout.values[slice_id] if isinstance(layout, PerSlice) else whole
    return part.detach().clone().requires_grad_(whole.requires_grad)


def share_of_gradient(
    layout: Layout, whole: Tensor, plan: SlicePlan, slice_id: int, weights: Sequence[float], peers: TensorPeersOf
) -> Tensor:
    """What a slice gets of ``whole``, the gradient of an output of the whole sequence."""
    if isinstance(layout, TokenDim):
        return layout.cut(whole, *plan.span(slice_id), peers)
    if isinstance(layout, PerSlice):
        return whole * weights[slice_id]
    return whole * (plan.lengths[slice_id] / plan.sequence_length)


def stand_together(
    layout: Layout, parts: Sequence[Tensor], weights: Sequence[float] | None, peers: TensorPeersOf
) -> Tensor:
    """The whole tensor that ``parts`` make up, comparable with :func:`alone`. ``weights`` None: gradients, which just
    add up."""
    if isinstance(layout, TokenDim):
        return torch.cat([layout.all_tokens(part, peers) for part in parts])
    if weights is None:
        return torch.stack([part.double() for part in parts]).sum(0)
    if isinstance(layout, Same):
        return parts[-1]
    return torch.stack([part.double() * w for part, w in zip(parts, weights, strict=True)]).sum(0)


def alone(layout: Layout, whole: Tensor, peers: TensorPeersOf) -> Tensor:
    """``whole`` with its tokens first, where it has any."""
    return layout.all_tokens(whole, peers) if isinstance(layout, TokenDim) else whole


def likely_layouts(
    outputs: Sequence[Tensor], plan: SlicePlan, dim: int, peers: TensorPeersOf, most: int = 8
) -> list[list[Layout]]:
    """How the tokens of a whole sequence may lie in ``outputs`` when no slices of them are there to tell: by the sizes
    alone, the likeliest first. None where no output has any.

    Args:
        dim: of the tokens in the batch.
    """
    each = [_likely(tensor, plan.sequence_length, dim, peers) for tensor in outputs]
    if not any(isinstance(layout, TokenDim) for layouts in each for layout in layouts):
        return []
    return [list(chosen) for chosen in itertools.islice(itertools.product(*each), most)]


def _likely(tensor: Tensor, tokens: int, dim: int, peers: TensorPeersOf) -> list[Layout]:
    dims = sorted(range(tensor.dim()), key=lambda d: d != dim)
    for shared_by in sorted({1, peers.size}):
        exact: list[Layout] = [TokenDim(d, 1, True, shared_by) for d in dims if tensor.size(d) * shared_by == tokens]
        flat: list[Layout] = [
            TokenDim(d, tensor.size(d) * shared_by // tokens, first, shared_by)
            for first in (dim > 0, dim == 0)
            for d in dims
            if tensor.size(d) and tensor.size(d) * shared_by % tokens == 0
        ]
        if exact or flat:
            return exact or flat
    return [Same()]
