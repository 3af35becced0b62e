"""Sliced attention from a fused kernel that only knows "no mask" and "causal, square".

The keys of a slice are its prefix, which needs no mask, and its own tokens, where the mask is plainly causal:

                    prefix [0, start)      own [start, stop)
    queries    |  . . . . . . . . . .  |  .
    of the     |  . . . . . . . . . .  |  . .
    slice      |  . . . . . . . . . .  |  . . .

Partial results over different keys are merged by their log-sum-exp. With P = exp(S - lse) and delta = rowsum(dO * O) of
the merged result, the kernel's own backward gives each block its exact share (FlashAttention, Dao et al. 2022,
arXiv 2205.14135, appendix B: the other keys enter a row only through lse and delta).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from terapipe_ds.attention.backends.base import (
    AddGrads,
    State,
    Tensor,
    expand_heads,
    fold_groups,
    sum_groups,
    unfold_groups,
)

TensorPair = tuple[Tensor, Tensor]


class BlockKernel:
    """A backend made of calls of a fused kernel; a subclass says how to call it."""

    causal_tokens: int | None = None  # the largest causal block; None: all of a slice's own tokens at once
    prefix_bytes: int | None = None  # of dK of the prefix at a time in a backward; None: the whole prefix at once

    def run(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, State]:
        """The kernel's forward on one block: output, log-sum-exp, state. With as many key heads as query heads, or with
        fewer where the kernel says so."""
        raise NotImplementedError

    def run_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
        state: State,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's backward on one block with the merged `out` and `lse`: dQ, dK, dV."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, dropout_p: float
    ) -> tuple[Tensor, Tensor, State]:
        """See `Backend.forward`. The slice goes in pieces of `causal_tokens` rows, each with all keys before it."""
        batch, heads, tokens, dim = q.shape
        out = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
        lse = q.new_empty(batch, tokens, heads, dtype=_lse_dtype(q)).transpose(1, 2)
        state: State = ()
        for row, row_stop in cut(tokens, self.causal_tokens):
            rows, own = q[:, :, row:row_stop], slice(start + row, start + row_stop)
            own_k, own_v = expand_heads(keys[:, :, own], heads), expand_heads(values[:, :, own], heads)
            *diagonal, state = self.run(rows, own_k, own_v, True, scale)
            target = out[:, :, row:row_stop], lse[:, :, row:row_stop]
            if own.start == 0:
                target[0].copy_(diagonal[0])
                target[1].copy_(diagonal[1])
                continue
            before_k, before_v = keys[:, :, : own.start], values[:, :, : own.start]
            dense = self.run(fold_groups(rows, keys.shape[1]), before_k, before_v, False, scale)
            dense_out, dense_lse = (unfold_groups(x, heads, row_stop - row) for x in dense[:2])
            merge((diagonal[0], diagonal[1]), (dense_out, dense_lse), target)
        return out, lse, state

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
        """See `Backend.backward`."""
        dtype = self.backward_dtype(q.dtype)
        rows = grad.to(dtype), q.to(dtype), out.to(dtype)
        call = _BlockBackward(self, rows, lse, keys, values, start, scale, state, add_grads)
        for column, column_stop in cut(start, self._prefix_tokens(keys, dtype)):
            call.dense(0, q.shape[2], column, column_stop)
        call.diagonal(0, q.shape[2])
        return call.dq.to(q.dtype)

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the kernel's backward computes inputs of `dtype` in; the gradients of keys and values stay in it."""
        return dtype

    def _prefix_tokens(self, keys: Tensor, dtype: torch.dtype) -> int | None:
        """How many tokens of the prefix a backward takes at a time, a multiple of 512."""
        if self.prefix_bytes is None:
            return None
        per_token = keys.shape[0] * keys.shape[1] * keys.shape[3] * dtype.itemsize
        return max(1, self.prefix_bytes // per_token // 512) * 512


class _BlockBackward:
    """One backward, block by block. Rows count from the slice's start, columns from the sequence's."""

    def __init__(
        self,
        kernel: BlockKernel,
        rows: tuple[Tensor, Tensor, Tensor],
        lse: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int,
        scale: float,
        state: State,
        add_grads: AddGrads,
    ) -> None:
        self.kernel, self.rows, self.lse, self.keys, self.values = kernel, rows, lse, keys, values
        self.start, self.scale, self.state, self.add_grads = start, scale, state, add_grads
        batch, heads, tokens, dim = rows[1].shape
        self.dq = rows[1].new_zeros(batch, tokens, heads, dim).transpose(1, 2)

    def dense(self, row: int, row_stop: int, column: int, column_stop: int, again: bool = False) -> None:
        """A block in which every query sees every key."""
        kv_heads = self.keys.shape[1]
        k, v = self._keys_values(column, column_stop)
        grad, q, out = (fold_groups(x[:, :, row:row_stop], kv_heads) for x in self.rows)
        lse = self.lse[:, :, row:row_stop].reshape(q.shape[:3])
        dq, dk, dv = self.kernel.run_backward(grad, q, k, v, out, lse, False, self.scale, self.state)
        self.dq[:, :, row:row_stop].add_(unfold_groups(dq, self.dq.shape[1], row_stop - row))
        self.add_grads(column, dk, dv, again)

    def diagonal(self, row: int, row_stop: int) -> None:
        """A causal block; while it is too large, two halves and the dense block below the first of them."""
        largest, tokens = self.kernel.causal_tokens, row_stop - row
        if largest is None or tokens <= largest:
            self._causal(row, row_stop)
            return
        middle = row + -(-tokens // (2 * largest)) * largest
        self.diagonal(row, middle)
        self.diagonal(middle, row_stop)
        self.dense(middle, row_stop, self.start + row, self.start + middle, again=True)

    def _causal(self, row: int, row_stop: int) -> None:
        heads, kv_heads = self.dq.shape[1], self.keys.shape[1]
        k, v = (expand_heads(x, heads) for x in self._keys_values(self.start + row, self.start + row_stop))
        grad, q, out = (x[:, :, row:row_stop] for x in self.rows)
        lse = self.lse[:, :, row:row_stop]
        dq, dk, dv = self.kernel.run_backward(grad, q, k, v, out, lse, True, self.scale, self.state)
        self.dq[:, :, row:row_stop].add_(dq)
        self.add_grads(self.start + row, sum_groups(dk, kv_heads), sum_groups(dv, kv_heads))

    def _keys_values(self, column: int, column_stop: int) -> TensorPair:
        columns, dtype = slice(column, column_stop), self.dq.dtype
        return self.keys[:, :, columns].to(dtype), self.values[:, :, columns].to(dtype)


def cut(stop: int, length: int | None) -> Iterator[tuple[int, int]]:
    """[0, stop) in pieces of `length`, the last one shorter; one piece for None, none where stop is 0."""
    step = length or max(stop, 1)
    for begin in range(0, stop, step):
        yield begin, min(begin + step, stop)


def merge(first: TensorPair, second: TensorPair, target: TensorPair) -> None:
    """Write to `target` (output, log-sum-exp) the attention over two sets of keys from the attention over each.

    The weight of the second is exp(lse_2) / (exp(lse_1) + exp(lse_2)) = sigmoid(lse_2 - lse_1). Half precision is
    merged in fp32.
    """
    (out, lse), (second_out, second_lse) = first, second
    weight = torch.sigmoid(second_lse - lse).unsqueeze(-1)
    torch.logaddexp(lse, second_lse, out=target[1])
    if out.dtype == weight.dtype:
        torch.lerp(out, second_out, weight, out=target[0])
    else:
        target[0].copy_(torch.lerp(out.to(weight.dtype), second_out.to(weight.dtype), weight))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
