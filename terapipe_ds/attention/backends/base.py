"""What a backend of sliced attention is, and how grouped query heads are laid out for a kernel that knows no groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
State = tuple[Any, ...]  # what a backward needs besides tensors of the forward: seeds, the kernel's random state
AddGrads = Callable[..., None]  # SliceEntry.add_grads(offset, dk, dv, again=False)


class Backend(Protocol):
    """One way to attend with the queries of a slice to all tokens up to its end, causally.

    q, out and their gradients are [B, H, T, D]; keys and values are [B, H_kv, start + T, D], views of the slice store.
    Query i sees the keys [0, start + i]. `lse` is the log-sum-exp of the scaled scores, [B, H, T].
    """

    name: str

    def is_available(self) -> bool:
        """Whether this machine can run it."""

    def refusal(self, q: Tensor, dropout_p: float) -> str | None:
        """Why it does not take such queries, as the end of a sentence; None where it does."""

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        """The output, its log-sum-exp, and the state that `backward` gets back."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor,
        start: int,
        scale: float,
        dropout_p: float,
        state: State,
        add_grads: AddGrads,
    ) -> Tensor:
        """The gradient of the queries; those of the keys and values [0, start + T) go to `add_grads` in pieces."""


def fold_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B, H_kv, G * T, D]: the G query heads of a group become more queries of their key head.

    Where every query sees every key this is exact, and the keys need not be repeated.
    """
    batch, heads, tokens, dim = x.shape
    if heads == num_kv_heads:
        return x
    return x.reshape(batch, num_kv_heads, heads // num_kv_heads * tokens, dim)


def unfold_groups(x: Tensor, num_heads: int, tokens: int) -> Tensor:
    """The inverse of `fold_groups`, for [B, H_kv, G * T, D] as well as for [B, H_kv, G * T] (a log-sum-exp)."""
    if x.shape[1] == num_heads:
        return x
    return x.unflatten(2, (num_heads // x.shape[1], tokens)).flatten(1, 2)


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, H_kv, T, D] -> [B, H, T, D], each key head repeated for its group."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def sum_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of `expand_heads`: the sum over each group."""
    return x if x.shape[1] == num_kv_heads else x.unflatten(1, (num_kv_heads, -1)).sum(2)
