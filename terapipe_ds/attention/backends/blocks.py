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
from typing import NamedTuple

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
from terapipe_ds.attention.buffers import TensorPair


class Block(NamedTuple):
    """Describe one call of a kernel: all queries see all keys, or (`is_causal`) query i sees the keys [0, i].

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
    # how the kernel wants keys for a number of query heads, and queries for a number of key heads
    expanded: Callable[[Tensor, int], Tensor] = staticmethod(expand_heads)
    folded: Callable[[Tensor, int], Tensor] = staticmethod(fold_groups)
    causal_tokens: int | None = None  # the largest causal block; None: all of a slice's own tokens at once
    prefix_bytes: int | None = None  # of dK of the prefix at a time in a backward; None: the whole prefix at once

    def run(self, block: Block) -> Attended:
        """Call the kernel's forward. There are as many key heads as query heads, or fewer if the kernel allows it."""
        raise NotImplementedError

    def run_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK, dV by the kernel's backward, from the merged output and log-sum-exp of the rows."""
        raise NotImplementedError

    def attend(self, block: Block) -> Attended:
        """Return `run` of a block. If keys and values have different head dims, zeros pad the smaller ones."""
        q, k, v = as_wide(*block[:3])
        attended = self.run(block._replace(q=q, k=k, v=v))
        return attended._replace(out=attended.out[..., : block.v.shape[3]])

    def attend_backward(self, grad: Tensor, block: Block, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Return `run_backward` of a block of any head dims."""
        dim, value_dim = block.k.shape[3], block.v.shape[3]
        grad, q, k, v, out = as_wide(grad, *block[:3], attended.out)
        dq, dk, dv = self.run_backward(grad, block._replace(q=q, k=k, v=v), attended._replace(out=out))
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]

    def forward(self, queries: Queries) -> Attended:
        """Attend in pieces of `causal_tokens` rows, each with all keys before it."""
        q, keys, values, start, scale = queries[:5]
        assert queries.dropout_p == 0, "calls on blocks would draw anew in each"
        batch, heads, tokens, _ = q.shape
        pieces = tuple(cut(tokens, self.causal_tokens))
        whole: TensorPair | None = None
        for row, row_stop in pieces:
            rows, own = q if len(pieces) == 1 else q[:, :, row:row_stop], slice(start + row, start + row_stop)
            own_k, own_v = (self.expanded(x[:, :, own], heads) for x in (keys, values))
            # the diagonal first: every query has a key there, so the log-sum-exp is finite
            attended = self.attend(Block(rows, own_k, own_v, True, scale))
            target = diagonal = attended[:2]
            # one piece stays in the kernel's memory if tokens come first there: a projection would copy it otherwise
            if whole is None and (len(pieces) > 1 or not diagonal[0].transpose(1, 2).is_contiguous()):
                wide = torch.float64 if q.dtype == torch.float64 else torch.float32
                shape = batch, tokens, heads
                out, lse = q.new_empty(*shape, values.shape[3]), q.new_empty(shape, dtype=wide)
                whole = out.transpose(1, 2), lse.transpose(1, 2)
            if whole is not None:
                target = whole[0][:, :, row:row_stop], whole[1][:, :, row:row_stop]
            if own.start == 0:
                if target is not diagonal:
                    target[0].copy_(diagonal[0])
                    target[1].copy_(diagonal[1])
                continue
            # all earlier keys are seen by all queries: grouped heads become further queries, and keys are not repeated
            before_k, before_v = keys[:, :, : own.start], values[:, :, : own.start]
            dense = self.attend(Block(self.folded(rows, keys.shape[1]), before_k, before_v, False, scale))
            dense_out, dense_lse = (unfold_groups(x, heads, row_stop - row) for x in dense[:2])
            merge(diagonal, (dense_out, dense_lse), target)
        return attended if whole is None else Attended(*whole, attended.state)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, block by block: first the prefix, then the slice's own tokens.

        Rows count from the slice's start, columns from the sequence's.
        """
        dtype, start = self.backward_dtype(queries.q.dtype), queries.start
        inputs = [x.to(dtype) for x in (grad, queries.q, attended.out)]
        batch, heads, tokens, dim = queries.q.shape
        kv_heads, total = queries.keys.shape[1], None
        own = tuple(own_blocks(0, tokens, self.causal_tokens))
        if start == 0 and len(own) > 1:  # otherwise the first block has all rows
            total = queries.q.new_zeros(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)

        def run(row: int, row_stop: int, column: int, column_stop: int, is_causal: bool, again: bool = False) -> None:
            """Run a block: on the diagonal, or where every query sees every key."""
            nonlocal total
            rows, lse = inputs, attended.lse
            if row_stop - row < tokens:
                rows, lse = [x[:, :, row:row_stop] for x in inputs], lse[:, :, row:row_stop]
            k, v = (x[:, :, column:column_stop].to(dtype) for x in (queries.keys, queries.values))
            if is_causal:
                k, v = self.expanded(k, heads), self.expanded(v, heads)
            else:
                rows = [self.folded(x, kv_heads) for x in rows]
            d_out, q, out = rows
            block = Block(q, k, v, is_causal, queries.scale)
            of_block = Attended(out, lse.reshape(q.shape[:3]), attended.state)
            dq, dk, dv = self.attend_backward(d_out, block, of_block)
            # queries gather gradients from every block, keys from this one alone
            dq = unfold_groups(dq, heads, row_stop - row)
            if total is None:
                total = dq.transpose(1, 2).contiguous().transpose(1, 2)
            else:
                total[:, :, row:row_stop].add_(dq)
            if is_causal:
                dk, dv = sum_groups(dk, kv_heads), sum_groups(dv, kv_heads)
            add_grads(column, dk, dv, again)

        for column, column_stop in cut(start, self._prefix_tokens(queries.keys, dtype)):
            run(0, tokens, column, column_stop, False)
        for row, row_stop, column in own:
            if column == row:
                run(row, row_stop, start + row, start + row_stop, True)
            else:
                run(row, row_stop, start + column, start + row, False, again=True)
        assert total is not None
        return total.to(queries.q.dtype)

    def backward_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the backward computes inputs of `dtype`, and in which dK and dV stay."""
        return dtype

    def _prefix_tokens(self, keys: Tensor, dtype: torch.dtype) -> int | None:
        """Return how many tokens of the prefix a backward takes at a time, a multiple of 512."""
        if self.prefix_bytes is None:
            return None
        per_token = keys.shape[0] * keys.shape[1] * keys.shape[3] * dtype.itemsize
        return max(1, self.prefix_bytes // per_token // 512) * 512


def as_wide(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with one head dim, the largest: the others are padded at the end with zeros."""
    dim = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1])) for x in tensors]


def cut(stop: int, length: int | None) -> Iterator[tuple[int, int]]:
    """Cut [0, stop) into pieces of at most `length`: one piece if that is None, no piece if stop is 0."""
    step = length or max(stop, 1)
    for begin in range(0, stop, step):
        yield begin, min(begin + step, stop)


def own_blocks(row: int, row_stop: int, largest: int | None) -> Iterator[tuple[int, int, int]]:
    """Cut the causal square of [row, row_stop) into causal blocks of at most `largest` rows and dense ones beside them.

    Yields (row, row_stop, column): the rows see all of [column, row), or each other causally where `column` is `row`.
    """
    if largest is None or row_stop - row <= largest:
        yield row, row_stop, row
        return
    middle = row + -(-(row_stop - row) // (2 * largest)) * largest
    yield from own_blocks(row, middle, largest)
    yield from own_blocks(middle, row_stop, largest)
    yield middle, row_stop, row


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
