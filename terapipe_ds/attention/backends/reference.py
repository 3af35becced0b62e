"""Compute sliced attention in plain torch: this backend takes everything, caps and attention dropout too."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from terapipe_ds.attention.backends.base import (
    AddGrads,
    Attended,
    Need,
    Queries,
    Tensor,
    fold_groups,
    unfold_groups,
)


@dataclass(frozen=True)
class Tile:
    """The scores of the queries [row, row_stop) of a slice for the keys [column, column_stop); `index` counts tiles."""

    index: int
    row: int
    row_stop: int
    column: int
    column_stop: int


class Reference:
    """Compute tiles of scores with one softmax over all tiles: any device, dtype and head dim, and dropout.

    The dropout mask of a tile comes from a generator of its own. The seed of a call is drawn from torch's generator of
    the device: a recomputed forward, which finds that generator restored, has the same seed and so the same masks.
    Half precision is computed in fp32.
    """

    name = "reference"
    takes_documents = False
    tile_tokens = 512

    def is_available(self) -> bool:
        return True

    def refusal(self, q: Tensor, need: Need) -> str | None:
        return None

    def forward(self, queries: Queries) -> Attended:
        q, values, dropout_p = queries.q, queries.values, queries.dropout_p
        seed = draw_seed(q.device) if dropout_p > 0 else 0
        out = q.new_empty(*q.shape[:3], values.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        # a row of tiles at a time: scores of the whole slice would be the L x L matrix again
        for tiles in self._rows_of_tiles(queries):
            row, row_stop = tiles[0].row, tiles[0].row_stop
            rows, highest = _fold(q, row, row_stop, values.shape[1]), lse.new_full((), -math.inf)
            total = weighted = lse.new_zeros(())
            for tile in tiles:  # the first one holds the diagonal, where each query sees itself
                scores, _ = _scores(queries, rows, tile)
                # the softmax goes on: earlier sums are scaled to the new largest score
                before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
                probs, fade = scores.sub_(highest).exp_(), (before - highest).exp_()
                total = total * fade + probs.sum(-1, keepdim=True)
                if dropout_p > 0:
                    probs.mul_(dropout_factors(probs, seed + tile.index, dropout_p))
                weighted = weighted * fade + probs @ _widen(values[:, :, tile.column : tile.column_stop])
            sizes = q.shape[1], row_stop - row
            out[:, :, row:row_stop] = unfold_groups(weighted / total, *sizes)
            lse[:, :, row:row_stop] = unfold_groups((highest + total.log()).squeeze(-1), *sizes)
        return Attended(out, lse, (seed,))

    def backward(self, grad: Tensor, queries: Queries, attended: Attended, add_grads: AddGrads) -> Tensor:
        q, keys, values = queries[:3]
        dq = torch.empty_like(q)
        # the last queries first, which reach all keys: their pieces are copied, the others added
        for tiles in reversed(list(self._rows_of_tiles(queries))):
            row, row_stop = tiles[0].row, tiles[0].row_stop
            rows, d_out, out = (_fold(x, row, row_stop, keys.shape[1]) for x in (q, grad, attended.out))
            delta = (d_out * out).sum(-1, keepdim=True)
            lse = attended.lse[:, :, row:row_stop].reshape(rows.shape[:3]).unsqueeze(-1)
            d_rows = torch.zeros_like(rows)
            for tile in tiles:
                columns = slice(tile.column, tile.column_stop)
                scores, slope = _scores(queries, rows, tile)
                probs, d_probs = scores.sub_(lse).exp_(), d_out @ _widen(values[:, :, columns]).mT
                kept = probs
                if queries.dropout_p > 0:
                    factors = dropout_factors(probs, attended.state[0] + tile.index, queries.dropout_p)
                    kept = probs * factors
                    d_probs.mul_(factors)
                # the derivative of a softmax, then of the cap: in place, as tiles are the largest tensors here
                d_scores = d_probs.sub_(delta).mul_(probs).mul_(queries.scale)
                if slope is not None:
                    d_scores.mul_(slope)
                d_rows.add_(d_scores @ _widen(keys[:, :, columns]))
                # the last queries come first: without a window they see all keys
                add_grads(tile.column, d_scores.mT @ rows, kept.mT @ d_out, again=row_stop < q.shape[2])
            dq[:, :, row:row_stop] = unfold_groups(d_rows, q.shape[1], row_stop - row)
        return dq

    def _rows_of_tiles(self, queries: Queries) -> Iterator[list[Tile]]:
        """Yield the tiles of `tile_tokens` queries at a time, from their diagonal to the first key in reach."""
        index, size, tokens = 0, self.tile_tokens, queries.q.shape[2]
        for row in range(0, tokens, size):
            row_stop, first = min(row + size, tokens), queries.first_key(row)
            tiles = []
            for column_stop in range(queries.start + row_stop, first, -size):
                tiles.append(Tile(index, row, row_stop, max(first, column_stop - size), column_stop))
                index += 1
            yield tiles


def draw_seed(device: torch.device) -> int:
    """Draw a seed from torch's generator of the device, whose state is on the host: no wait for the device."""
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "cpu" else module.get_rng_state(device)
    torch.rand((), device=device)  # the next call finds another state
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest())


def dropout_factors(probs: Tensor, seed: int, dropout_p: float) -> Tensor:
    """Return factors 0 and 1 / (1 - p) with the shape and device of `probs`, the same for the same seed."""
    generator = torch.Generator(device=probs.device).manual_seed(seed)
    kept = torch.rand(probs.shape, generator=generator, device=probs.device) >= dropout_p
    return kept.to(probs.dtype).mul_(1.0 / (1.0 - dropout_p))


def _scores(queries: Queries, rows: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Return the scores of a tile, [B, H_kv, G * n, columns], -inf out of reach; and the slope of a softcap."""
    scores = (rows @ _widen(queries.keys[:, :, tile.column : tile.column_stop]).mT).mul_(queries.scale)
    slope = None
    if queries.softcap is not None:
        scores.div_(queries.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(queries.softcap)
    own = torch.arange(queries.start + tile.row, queries.start + tile.row_stop, device=scores.device).unsqueeze(1)
    key = torch.arange(tile.column, tile.column_stop, device=scores.device)
    hidden = key > own
    if queries.window is not None:
        hidden |= key <= own - queries.window
    scores.unflatten(2, (-1, tile.row_stop - tile.row)).masked_fill_(hidden, -math.inf)
    return scores, slope


def _fold(x: Tensor, row: int, row_stop: int, kv_heads: int) -> Tensor:
    return _widen(fold_groups(x[:, :, row:row_stop], kv_heads))


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
