"""A guard against attention that would silently see only the tokens of its own slice.

A model that still calls `F.scaled_dot_product_attention` (or `nn.MultiheadAttention`) trains without any error when its
sequence is cut in slices, and learns nothing across them. The engine holds the guard while slices run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from terapipe_ds.attention.active_slice import ActiveSlice, active_slice

_FUSED = F.scaled_dot_product_attention  # torch's own function, whatever names it is called by


class PlainAttentionError(RuntimeError):
    """Plain self-attention was called on one slice of a sequence."""


@contextmanager
def guard_plain_attention() -> Iterator[None]:
    """While in it, plain self-attention on a slice that is not the whole sequence raises PlainAttentionError.

    Guards `torch.nn.functional.scaled_dot_product_attention` and `multi_head_attention_forward` (that is
    `nn.MultiheadAttention`, whose shortcut around them in evaluation is switched off meanwhile). Cross-attention to a
    memory of another length passes. May be nested; what was there before comes back on exit.
    """
    attention, multi_head, fast_path = (
        F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    )  # fmt: skip
    F.scaled_dot_product_attention = _guarded(attention, token_dim=-2)
    F.multi_head_attention_forward = _guarded(multi_head, token_dim=0)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        F.multi_head_attention_forward = multi_head
        torch.backends.mha.set_fastpath_enabled(fast_path)


class GuardCapturedNames(TorchFunctionMode):
    """While in it, torch's fused attention is checked under whatever name it was imported.

    `from torch.nn.functional import scaled_dot_product_attention` binds the function before `guard_plain_attention` can
    stand in its place. A mode sees every torch function, which costs a little for each: the engine holds it for the
    first batch only. It does not see forwards that are recomputed inside a backward.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        active = active_slice()
        if func is _FUSED and active is not None and not active.is_whole:
            given = dict(zip(("query", "key"), args, strict=False)) | (kwargs or {})
            _check(active, given["query"].shape[-2], given["key"].shape[-2])
        return func(*args, **(kwargs or {}))


def _guarded(function: Callable[..., Any], token_dim: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        active = active_slice()
        if active is not None and not active.is_whole:
            _check(active, query.shape[token_dim], key.shape[token_dim])
        return function(query, key, *args, **kwargs)

    return guarded


def _check(active: ActiveSlice, query_tokens: int, key_tokens: int) -> None:
    if query_tokens == key_tokens == active.num_tokens:
        raise PlainAttentionError(
            f"plain attention was called on slice [{active.start}, {active.stop}) of a sequence of "
            f"{active.sequence_length} tokens: it would see only the slice's own {active.num_tokens} tokens. Call "
            f"terapipe_ds.attention.sliced_attention(q, k, v, layer) instead. (Attention that is not causal cannot be "
            f"sliced at all: train such a model with 'slices': 1.)"
        )
