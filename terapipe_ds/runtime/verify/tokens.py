"""Match a tensor of a whole sequence with the same tensor of its slices.

Layers do not say which dimension of their outputs holds the tokens (hidden states may be [B, T, H], [T, B, H],
[B * T, H], or divided over tensor-parallel ranks). It is the dimension whose size follows the length of the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from terapipe_ds.attention import ActiveSlice, SliceStore
from terapipe_ds.attention.document_edges import Documents, Starts
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.agreement import exchange
from terapipe_ds.runtime.batch.cut_tensors import Tensors
from terapipe_ds.runtime.failures.trials import Trials

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorRanks:
    """Represent the tensor-parallel ranks, including this one. Their layers communicate, so all must decide alike."""

    size: int = 1
    rank: int = 0
    group: Any = None
    trials: Trials = field(default_factory=Trials)  # handles a failure on one of them

    @classmethod
    def of(cls, grid: Any, trials: Trials) -> TensorRanks:
        size, rank = int(grid.get_slice_parallel_world_size()), int(grid.get_slice_parallel_rank())
        return cls(size, rank, grid.get_slice_parallel_group() if size > 1 else None, trials)

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate dimension 0 over the ranks."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        torch_dist.all_gather(everyone, tensor.contiguous(), group=self.group)
        return torch.cat(everyone)

    def exchange(self, value: _T) -> list[_T]:
        return exchange(value, self.group)

    def first(self, value: _T | None) -> _T | None:
        """Return the value of the first rank that has one."""
        return next((one for one in self.exchange(value) if one is not None), None)


@dataclass(frozen=True)
class TokenDim:
    """Say that tokens are in dimension `dim`, together with `rows` rows if both were flattened into it."""

    dim: int
    rows: int = 1
    rows_first: bool = True
    shared_by: int = 1  # number of ranks that share the tokens under sequence parallelism

    def tokens_first(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as [tokens, ...]."""
        if self.rows == 1:
            return tensor.movedim(self.dim, 0)
        sizes = (self.rows, -1) if self.rows_first else (-1, self.rows)
        return tensor.unflatten(self.dim, sizes).movedim(self.dim + int(self.rows_first), 0)

    def tokens_back(self, tensor: Tensor) -> Tensor:
        """Return the tensor in its own layout again: the inverse of `tokens_first`."""
        if self.rows == 1:
            return tensor.movedim(0, self.dim).contiguous()
        return tensor.movedim(0, self.dim + int(self.rows_first)).flatten(self.dim, self.dim + 1).contiguous()


@dataclass(frozen=True)
class Same:
    """Represent a tensor without tokens that each slice has as a whole (a mask, a scale)."""


@dataclass(frozen=True)
class PerSlice:
    """Represent values without tokens, one per slice (an auxiliary loss), which add up like the slices' losses."""

    values: tuple[Tensor, ...]


TensorLayout = TokenDim | Same | PerSlice


def alone(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


@dataclass(frozen=True)
class _Held:
    """Build a container like another one from new tensors; None stays None."""

    spec: Any
    are_tensors: tuple[bool, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        return tree_unflatten([next(rest) if is_tensor else None for is_tensor in self.are_tensors], self.spec)


def held_as(value: Any) -> _Held:
    """Return the function that builds a container like `value` from new tensors, where None stays None."""
    leaves, spec = tree_flatten(value)
    return _Held(spec, tuple(leaf is not None for leaf in leaves))


@dataclass(frozen=True)
class Activations:
    """Hold the inputs or outputs of a layer on the whole sequence, detached, and how slices are cut from them.

    `formed` returns such tensors as the next layer gets them.
    """

    tensors: Tensors
    formed: Callable[[Sequence[Tensor]], Any]
    layouts: tuple[TensorLayout, ...]

    @property
    def fits_a_message(self) -> bool:
        """Return whether another part can get them: a tensor, or a flat tuple or list."""
        held = self.formed(self.tensors)
        return torch.is_tensor(held) or (isinstance(held, (tuple, list)) and all(map(torch.is_tensor, held)))

    def for_another_part(self) -> Activations:
        """Return the activations as another part gets them: a message carries a tensor or a plain tuple."""
        return replace(self, formed=alone if torch.is_tensor(self.formed(self.tensors)) else tuple)

    def cut(self, slicing: Slicing, slice_id: int) -> Tensors:
        """Return a slice's share of each tensor, copies that require gradients if the tensors do."""
        pairs = zip(self.layouts, self.tensors, strict=True)
        return tuple(slicing.cut(*pair, slice_id) for pair in pairs)

    def gradients(self, slicing: Slicing, leaves: Sequence[Tensors]) -> list[Tensor]:
        """Return the gradients that the leaves of all slices got, joined, with tokens first."""
        of_slices = ([torch.zeros_like(t) if t.grad is None else t.grad for t in each] for each in leaves)
        return list(map(slicing.joined_gradients, self.layouts, zip(*of_slices, strict=True)))

    def to(self, device: torch.device) -> Activations:
        """Return copies on `device`, which share memory with nothing."""
        return self.changed(lambda t: t.detach().to(device, copy=True).requires_grad_(t.requires_grad))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Activations:
        """Return the activations with `change` made to each tensor, and to the values of slices."""
        layouts = tuple(
            PerSlice(tuple(map(change, layout.values))) if isinstance(layout, PerSlice) else layout
            for layout in self.layouts
        )
        return Activations(tuple(map(change, self.tensors)), self.formed, layouts)


@dataclass(frozen=True)
class Slicing:
    """Describe how sequences are sliced, on which ranks, and the weights of the slices' losses."""

    plan: SlicePlan
    weights: tuple[float, ...]
    ranks: TensorRanks = field(default_factory=TensorRanks)
    part_id: int = 0
    store: SliceStore = field(default_factory=SliceStore)
    starts: Starts | None = None  # where documents start in the rows
    wants_logits: bool = True  # of slices; for the whole sequence the last layer always returns logits
    keeps_attention: bool = False

    def whole(self) -> Slicing:
        """Return the slicing of the sequence into one slice."""
        return replace(self, plan=SlicePlan((self.plan.sequence_length,)), weights=(1.0,), wants_logits=True)

    def active(self, slice_id: int, mode: str = "train") -> ActiveSlice:
        """Return the facts about a slice that layers may read."""
        span, length, store = self.plan.span(slice_id), self.plan.sequence_length, self.store
        documents = None if self.starts is None else Documents(self.starts, *span)
        active = ActiveSlice(*span, length, slice_id=slice_id, part_id=self.part_id, mode=mode, store=store)
        return active.replace(documents=documents, wants_logits=self.wants_logits, keeps_attention=self.keeps_attention)

    def layouts_of(self, whole: Tensor, parts: Sequence[Tensor]) -> list[TokenDim]:
        """Return all layouts in which the shapes of `parts` fit slices of `whole`."""
        for shared_by in sorted({1, self.ranks.size}):
            layouts = []
            for dim in range(whole.dim()):
                # rows and tokens may be flattened into one dimension, in either order
                rows, rest = divmod(whole.size(dim) * shared_by, self.plan.sequence_length)
                shapes = [(*whole.shape[:dim], rows * n, *whole.shape[dim + 1 :]) for n in self.plan.lengths]
                sizes = [(*p.shape[:dim], p.size(dim) * shared_by, *p.shape[dim + 1 :]) for p in parts if p.dim() > dim]
                if rows and not rest and sizes == shapes:
                    orders = (True, False) if rows > 1 else (True,)
                    layouts += [TokenDim(dim, rows, rows_first, shared_by) for rows_first in orders]
            if layouts:
                return layouts
        return []

    def cut(self, layout: TensorLayout, whole: Tensor, slice_id: int) -> Tensor:
        """Return a slice's share of `whole`, a copy that requires a gradient if `whole` does."""
        part = whole.detach()
        if isinstance(layout, TokenDim):
            part = self._tokens(layout, part, slice_id)
        elif isinstance(layout, PerSlice) and self.plan.num_slices > 1:
            part = layout.values[slice_id]
        return part.clone().requires_grad_(whole.requires_grad)

    def share_of_gradient(self, layout: TensorLayout, whole: Tensor, slice_id: int) -> Tensor:
        """Return a slice's share of `whole`, the gradient of an output of the whole sequence."""
        if isinstance(layout, TokenDim):
            return self._tokens(layout, whole, slice_id)
        if isinstance(layout, PerSlice):
            return whole * self.weights[slice_id]
        return whole * (self.plan.lengths[slice_id] / self.plan.sequence_length)

    def joined(self, layout: TensorLayout, parts: Sequence[Tensor]) -> Tensor:
        """Return the joined values of the slices, with tokens first."""
        if isinstance(layout, TokenDim):
            return torch.cat([self._all_tokens(layout, part) for part in parts])
        if isinstance(layout, Same):
            return parts[-1]
        return torch.stack([part.double() * weight for part, weight in zip(parts, self.weights, strict=True)]).sum(0)

    def joined_gradients(self, layout: TensorLayout, parts: Sequence[Tensor]) -> Tensor:
        """Return the joined gradients of the slices, with tokens first; without tokens they add up.

        Gradients of values per slice weigh like the slices' losses, and a sum has the weight one for each slice.
        """
        if isinstance(layout, TokenDim):
            return self.joined(layout, parts)
        total = torch.stack([part.double() for part in parts]).sum(0)
        return total / (sum(self.weights) or 1.0) if isinstance(layout, PerSlice) else total

    def _all_tokens(self, layout: TokenDim, tensor: Tensor) -> Tensor:
        tokens = layout.tokens_first(tensor)
        return tokens if layout.shared_by == 1 else self.ranks.gather(tokens)

    def _tokens(self, layout: TokenDim, whole: Tensor, slice_id: int) -> Tensor:
        start, stop = self.plan.span(slice_id)
        tokens = self._all_tokens(layout, whole)[start:stop]
        return layout.tokens_back(tokens if layout.shared_by == 1 else tokens.chunk(layout.shared_by)[self.ranks.rank])
