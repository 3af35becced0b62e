"""Define the interface of attention backends, and lay out grouped query heads for a kernel without groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from terapipe_ds.attention.reach import Span

Tensor = torch.Tensor
AddGrads = Callable[..., None]  # SliceEntry.add_grads(offset, dk, dv, again=False, rows=None)


class Need(NamedTuple):
    """List what a call asks of a backend, beyond the device, dtype and head dim of its queries."""

    dropout: bool = False
    window: bool = False
    softcap: bool = False
    documents: bool = False
    value_dim: int | None = None  # where the values have another head dim than queries and keys

    def __str__(self) -> str:
        """Return what the call needs beyond plain causal attention, as the end of a list: ", window, dropout"."""
        needs = [name for name in ("window", "softcap", "documents", "dropout") if getattr(self, name)]
        needs += [f"head dim {self.value_dim} of values"] * (self.value_dim is not None)
        return "".join(f", {name}" for name in needs)


class Queries(NamedTuple):
    """The queries of a slice and the keys in their reach: query i sees the keys (start + i - window, start + i].

    `q` is [B, H, T, D]; `keys` are [B, H_kv, start + T, D], `values` [B, H_kv, start + T, D_v], views of the store.
    With a `softcap`, a score s becomes softcap * tanh(s / softcap). A backend that takes documents gets `spans`, which
    say for the queries of each row from which key on they see keys. Tokens in spans count from the first key.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    start: int
    scale: float
    dropout_p: float = 0.0
    window: int | None = None
    softcap: float | None = None
    spans: tuple[Span, ...] = ()

    def first_key(self, row: int) -> int:
        """Return the first key that query `row` sees."""
        return 0 if self.window is None else max(0, self.start + row + 1 - self.window)


class Attended(NamedTuple):
    """The result of a forward: the output [B, H, T, D_v] and the log-sum-exp of the scaled scores [B, H, T].

    `state` holds what a backward needs in addition to tensors: seeds, the random state of the kernel.
    """

    out: Tensor
    lse: Tensor
    state: tuple[Any, ...] = ()


class Backend(Protocol):
    """One way to attend with the queries of a slice to all tokens up to its end, causally."""

    name: str
    takes_documents: bool  # in one call; else each span of a document is a call of its own

    def is_available(self) -> bool:
        """Return whether this machine can run the backend."""

    def refusal(self, q: Tensor, need: Need) -> str | None:
        """Return why the backend refuses such queries or needs, as the end of a sentence; None where it takes them."""

    def forward(self, queries: Queries) -> Attended:
        """Attend; `backward` gets the same queries and the result back."""

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ; the gradients of the keys and values [0, start + T) go to `add_grads` in pieces.

        `attended` may have been merged with further keys since (a sink); these enter through output and log-sum-exp.
        """


def fold_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """Turn the G query heads of a group into further queries of their key head: [B, H, T, D] -> [B, H_kv, G * T, D].

    This is exact if every query sees every key, and the keys need not be repeated.
    """
    batch, heads, tokens, dim = x.shape
    if heads == num_kv_heads:
        return x
    return x.reshape(batch, num_kv_heads, heads // num_kv_heads * tokens, dim)


def unfold_groups(x: Tensor, num_heads: int, tokens: int) -> Tensor:
    """Undo `fold_groups`, for [B, H_kv, G * T, D] as well as for [B, H_kv, G * T] (a log-sum-exp)."""
    if x.shape[1] == num_heads:
        return x
    return x.unflatten(2, (num_heads // x.shape[1], tokens)).flatten(1, 2)


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each key head for its group: [B, H_kv, T, D] -> [B, H, T, D]."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def sum_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """Sum over each group, which is the gradient of `expand_heads`."""
    return x if x.shape[1] == num_kv_heads else x.unflatten(1, (num_kv_heads, -1)).sum(2)
