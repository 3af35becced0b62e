"""Compute a window with a fused kernel that takes a mask: bands of queries, each with the keys in its reach.

Query i sees `window` keys up to its own. All bands of n queries look alike, so that one mask serves all of them and one
call computes many, side by side in the kernel's batch dimension; their keys overlap in memory and are not copied:

                    keys
    band 0     |  . . . .            the first band begins where a query no longer sees all keys:
               |    . . . .          those before it are plainly causal
    band 1     |      . . . .
               |        . . . .
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from terapipe_ds.attention.backends.base import AddGrads, Attended, Queries, Tensor, fold_groups, unfold_groups
from terapipe_ds.attention.backends.blocks import Block, BlockKernel


@dataclass(frozen=True)
class Bands:
    """`count` bands of `size` queries from query `row` on; `columns` keys each, the first ones from `column` on."""

    row: int
    count: int
    size: int
    column: int
    columns: int

    @property
    def row_stop(self) -> int:
        """Return where the queries of the last band end."""
        return self.row + self.count * self.size

    def queries_of(self, x: Tensor, batch_row: int, kv_heads: int) -> Tensor:
        """Return the queries of [B, H, T, D], or what belongs to them, as [count, H_kv, G * size, D]."""
        rows = x[batch_row, :, self.row : self.row_stop].unflatten(1, (self.count, self.size)).transpose(0, 1)
        return fold_groups(rows, kv_heads)

    def keys_of(self, x: Tensor, batch_row: int) -> Tensor:
        """Return the keys or values of [B, H_kv, P + T, D] as a view [count, H_kv, columns, D] whose bands overlap."""
        stop = self.column + (self.count - 1) * self.size + self.columns
        return x[batch_row, :, self.column : stop].unfold(1, self.columns, self.size).permute(1, 0, 3, 2)

    def put(self, target: Tensor, batch_row: int, x: Tensor) -> None:
        """Write [count, H_kv, G * size, D] to the queries' places in [B, H, T, D]."""
        place = target[batch_row, :, self.row : self.row_stop].unflatten(1, (self.count, self.size)).transpose(0, 1)
        place.copy_(unfold_groups(x, target.shape[1], self.size))


class BandKernel(BlockKernel):
    """A block kernel that takes a mask, and so a window."""

    most_band_tokens = 128

    def forward(self, queries: Queries) -> Attended:
        """Attend in bands if there is a window; the first queries see all keys and need no band."""
        if queries.window is None:
            return super().forward(queries)
        q, values = queries.q, queries.values
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, values.shape[3]).transpose(1, 2)
        lse = q.new_empty(batch, tokens, heads, dtype=torch.promote_types(q.dtype, torch.float32)).transpose(1, 2)
        # before the window fills there is nothing to mask
        if free := _see_all(queries):
            plain = super().forward(_plain(queries, free))
            out[:, :, :free], lse[:, :, :free] = plain[:2]
        for bands in self._bands(queries):
            for row in range(batch):
                attended = self.attend(self._block(bands, queries, row, q.dtype))
                bands.put(out, row, attended.out)
                bands.put(lse.unsqueeze(-1), row, attended.lse.unsqueeze(-1))
        return Attended(out, lse)

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        """Return dQ, band by band. All gradients are added: bands have keys in common."""
        if queries.window is None:
            return super().backward(grad, queries, attended, add_grads)
        dtype, kv_heads = self.backward_dtype(queries.q.dtype), queries.keys.shape[1]
        dq = torch.empty_like(queries.q)
        if free := _see_all(queries):
            of_free = Attended(attended.out[:, :, :free], attended.lse[:, :, :free])
            dq[:, :, :free] = super().backward(grad[:, :, :free], _plain(queries, free), of_free, add_grads)
        for bands in self._bands(queries):
            for row in range(dq.shape[0]):
                block = self._block(bands, queries, row, dtype)
                d_out, out = (bands.queries_of(x, row, kv_heads).to(dtype) for x in (grad, attended.out))
                lse = bands.queries_of(attended.lse.unsqueeze(-1), row, kv_heads).squeeze(-1)
                d_rows, dk, dv = self.attend_backward(d_out, block, Attended(out, lse))
                bands.put(dq, row, d_rows)
                for i in range(bands.count):
                    column = bands.column + i * bands.size
                    add_grads(column, dk[i : i + 1], dv[i : i + 1], again=True, rows=slice(row, row + 1))
        return dq

    def _bands(self, queries: Queries) -> Iterator[Bands]:
        """Yield bands of equal size, as many as the kernel takes at once, and the rest as a smaller band."""
        tokens, kv_heads, window = queries.q.shape[2], queries.keys.shape[1], queries.window
        assert window is not None
        # as many bands side by side as fit into the memory that a backward may take
        size = self.band_tokens(window)
        per_band = kv_heads * (window - 1 + size) * queries.keys.shape[3] * queries.keys.element_size()
        most = max(1, (self.prefix_bytes or per_band) // per_band)
        row = _see_all(queries)
        while row < tokens:
            count, rows = (min(most, (tokens - row) // size), size) if row + size <= tokens else (1, tokens - row)
            yield Bands(row, count, rows, queries.start + row + 1 - window, window - 1 + rows)
            row += count * rows

    def band_tokens(self, window: int) -> int:
        """Return how many queries make a band: large ones compute more masked scores, small ones make slow products."""
        return min(self.most_band_tokens, max(32, window // 8))

    def _block(self, bands: Bands, queries: Queries, batch_row: int, dtype: torch.dtype) -> Block:
        q, keys, values = queries[:3]
        window, groups = queries.window, q.shape[1] // keys.shape[1]
        assert window is not None
        mask = None
        if bands.size > 1:
            mask = band_mask(self.band_tokens(window), window, dtype, q.device)
            mask = mask[: bands.size, : bands.columns].repeat(groups, 1)
        rows = bands.queries_of(q, batch_row, keys.shape[1]).to(dtype)
        k, v = (bands.keys_of(x, batch_row).to(dtype) for x in (keys, values))
        return Block(rows, k, v, False, queries.scale, mask)


@functools.lru_cache(maxsize=4)
def band_mask(size: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [size, window - 1 + size]: 0 where query i sees key j, which is i <= j < i + window, else -inf.

    The mask of a smaller band is its upper left corner.
    """
    with torch.inference_mode(False):
        query, key = (torch.arange(n, device=device) for n in (size, window - 1 + size))
        hidden = (key < query.unsqueeze(1)) | (key >= query.unsqueeze(1) + window)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


def _see_all(queries: Queries) -> int:
    """Return how many of the first queries see all keys before them."""
    assert queries.window is not None
    return min(max(0, queries.window - queries.start), queries.q.shape[2])


def _plain(queries: Queries, free: int) -> Queries:
    keys, values = (x[:, :, : queries.start + free] for x in queries[1:3])
    return queries._replace(q=queries.q[:, :, :free], keys=keys, values=values, window=None)
