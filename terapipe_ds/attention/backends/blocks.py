"""Compute sliced attention with a fused kernel that only knows "no mask" and "causal, square".

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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from terapipe_ds.attention.backends.base import (
    AddGrads,
    Attended,
    Queries,
    Tensor,
    expand_heads,
    fold_groups,
    sum_groups,
    unfold_groups,
)

TensorPair = tuple[Tensor, Tensor]


class Block(NamedTuple):
    """What one call of a kernel computes: all queries see all keys, or (`is_causal`) query i sees the keys [0, i].

    A kernel that takes a `mask` adds it to the scores; it is [T, keys].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    scale: float
    mask: Tensor | None = None


class BlockKernel:
    """A backend made of calls of a fused kernel; a subclass says how to call it."""

    takes_documents = False
    # keys as the kernel wants them beside so many query heads, and queries beside so many key heads
    expanded: Callable[[Tensor, int], Tensor] = staticmethod(expand_heads)
    folded: Callable[[Tensor, int], Tensor] = staticmethod(fold_groups)
    causal_tokens: int | None = None  # the largest causal block; None: all of a slice's own tokens at once
    prefix_bytes: int | None = None  # of dK of the prefix at a time in a backward; None: the whole prefix at once

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward. There are as many key heads as query heads, or fewer where the kernel says so."""
        raise NotImplementedError

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK, dV by the kernel's backward, given the merged output and log-sum-exp of the rows."""
        raise NotImplementedError

    def attend(self, block: Block) -> Attended:
        """Return `run` of a block. Of keys and values of different head dims the smaller ones get zeros behind."""
        dim, value_dim = block.k.shape[3], block.v.shape[3]
        if dim == value_dim:
            return self.run(block)
        attended = self.run(_widened(block, max(dim, value_dim)))
        return attended._replace(out=attended.out[..., :value_dim])

    def attend_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Return `run_backward` of a block of any head dims."""
        dim, value_dim = block.k.shape[3], block.v.shape[3]
        if dim == value_dim:
            return self.run_backward(grad, block, attended)
        widest = max(dim, value_dim)
        grad, out = widen(grad, widest), widen(attended.out, widest)
        dq, dk, dv = self.run_backward(grad, _widened(block, widest), attended._replace(out=out))
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]

    def forward(self, queries: Queries) -> Attended:
        """Attend in pieces of `causal_tokens` rows, each with all keys before it."""
        q, keys, values, start, scale = queries[:5]
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, values.shape[3]).transpose(1, 2)
        lse = q.new_empty(
            batch, tokens, heads, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
        ).transpose(1, 2)
        state: tuple[Any, ...] = ()
        for row, row_stop in cut(tokens, self.causal_tokens):
            rows, own = q[:, :, row:row_stop], slice(start + row, start + row_stop)
            own_k, own_v = (self.expanded(x[:, :, own], heads) for x in (keys, values))
            # the diagonal first: every query has a key there, so the log-sum-exp is finite
            *diagonal, state = self.attend(Block(rows, own_k, own_v, True, scale))
            target = out[:, :, row:row_stop], lse[:, :, row:row_stop]
            if own.start == 0:
                target[0].copy_(diagonal[0])
                target[1].copy_(diagonal[1])
                continue
            # all earlier keys are seen by all queries: grouped heads become further queries, and keys are not repeated
            before_k, before_v = keys[:, :, : own.start], values[:, :, : own.start]
            dense = self.attend(Block(self.folded(rows, keys.shape[1]), before_k, before_v, False, scale))
            dense_out, dense_lse = (unfold_groups(x, heads, row_stop - row) for x in dense[:2])
            merge((diagonal[0], diagonal[1]), (dense_out, dense_lse), target)
        return Attended(out, lse, state)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, block by block: first the prefix, then the slice's own tokens."""
        call = _BlockBackward(self, grad, queries, attended, add_grads)
        tokens = queries.q.shape[2]
        for column, column_stop in cut(queries.start, self._prefix_tokens(queries.keys, call.dq.dtype)):
            call.dense(0, tokens, column, column_stop)
        call.diagonal(0, tokens)
        return call.dq.to(queries.q.dtype)

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the backward computes inputs of `dtype`, and in which dK and dV stay."""
        return dtype

    def _prefix_tokens(self, keys: Tensor, dtype: torch.dtype) -> int | None:
        """Return how many tokens of the prefix a backward takes at a time, a multiple of 512."""
        if self.prefix_bytes is None:
            return None
        per_token = keys.shape[0] * keys.shape[1] * keys.shape[3] * dtype.itemsize
        return max(1, self.prefix_bytes // per_token // 512) * 512


class _BlockBackward:
    """One backward, block by block. Rows count from the slice's start, columns from the sequence's."""

    def __init__(
        self, kernel: BlockKernel, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads
    ) -> None:
        self.kernel, self.queries, self.attended, self.add_grads = kernel, queries, attended, add_grads
        dtype = kernel.backward_dtype(queries.q.dtype)
        self.rows = grad.to(dtype), queries.q.to(dtype), attended.out.to(dtype)
        batch, heads, tokens, dim = queries.q.shape
        self.dq = self.rows[1].new_zeros(batch, tokens, heads, dim).transpose(1, 2)

    def dense(self, row: int, row_stop: int, column: int, column_stop: int, again: bool = False) -> None:
        """Run a block in which every query sees every key."""
        k, v = self._keys_values(column, column_stop)
        grad, q, out = (self.kernel.folded(x[:, :, row:row_stop], k.shape[1]) for x in self.rows)
        lse = self.attended.lse[:, :, row:row_stop].reshape(q.shape[:3])
        # queries gather gradients from every block, keys from this one alone
        dq, dk, dv = self._run(grad, Block(q, k, v, False, self.queries.scale), out, lse)
        self.dq[:, :, row:row_stop].add_(unfold_groups(dq, self.dq.shape[1], row_stop - row))
        self.add_grads(column, dk, dv, again)

    def diagonal(self, row: int, row_stop: int) -> None:
        """Run a causal block; split one that is too large into two causal halves and a dense block."""
        largest, tokens, start = self.kernel.causal_tokens, row_stop - row, self.queries.start
        if largest is not None and tokens > largest:
            middle = row + -(-tokens // (2 * largest)) * largest
            self.diagonal(row, middle)
            self.diagonal(middle, row_stop)
            self.dense(middle, row_stop, start + row, start + middle, again=True)
            return
        heads, kv_heads = self.dq.shape[1], self.queries.keys.shape[1]
        k, v = (self.kernel.expanded(x, heads) for x in self._keys_values(start + row, start + row_stop))
        grad, q, out = (x[:, :, row:row_stop] for x in self.rows)
        lse = self.attended.lse[:, :, row:row_stop]
        dq, dk, dv = self._run(grad, Block(q, k, v, True, self.queries.scale), out, lse)
        self.dq[:, :, row:row_stop].add_(dq)
        self.add_grads(start + row, sum_groups(dk, kv_heads), sum_groups(dv, kv_heads))

    def _run(self, grad: Tensor, block: Block, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.attend_backward(grad, block, Attended(out, lse, self.attended.state))

    def _keys_values(self, column: int, column_stop: int) -> TensorPair:
        columns, dtype = slice(column, column_stop), self.dq.dtype
        return self.queries.keys[:, :, columns].to(dtype), self.queries.values[:, :, columns].to(dtype)


def widen(x: Tensor, dim: int) -> Tensor:
    """Return [..., D] with zeros behind up to `dim`."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def as_wide(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with one head dim, the largest."""
    dim = max(x.shape[-1] for x in tensors)
    return [widen(x, dim) for x in tensors]


def _widened(block: Block, dim: int) -> Block:
    return block._replace(q=widen(block.q, dim), k=widen(block.k, dim), v=widen(block.v, dim))


def cut(stop: int, length: int | None) -> Iterator[tuple[int, int]]:
    """Cut [0, stop) into pieces of at most `length`; into one for None, into none where stop is 0."""
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
