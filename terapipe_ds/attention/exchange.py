"""Exchange tokens for heads between the ranks that divide the tokens of a slice (DeepSpeed-Ulysses).

Between attentions each of N sequence ranks has T / N contiguous tokens of a slice, with all heads. In attention it has
all T tokens of H / N heads: one all-to-all brings queries, keys and values there, a second one brings the output back.
So the slice store of a rank holds the whole prefix of H_kv / N heads. The backward of an all-to-all is the inverse one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.attention.active_slice import ActiveSlice, active_slice, push_slice
from terapipe_ds.attention.document_edges import Documents


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that divide the tokens of each slice, this one among them.

    `all_to_all(received, sent)` sends row r of a tensor to rank r, and receives a row from each. `group` is theirs for
    other collectives, None where a rank is alone.
    """

    size: int = 1
    rank: int = 0
    all_to_all: Callable[[Tensor, Tensor], object] = Tensor.copy_
    group: Any = None

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the tokens of [start, stop) that this rank has. Raises ValueError if they do not divide evenly."""
        tokens, rest = divmod(stop - start, self.size)
        if rest:
            raise ValueError(
                f"slice [{start}, {stop}) has {stop - start} tokens, which {self.size} sequence ranks cannot divide "
                f"evenly; cut slices of a multiple of {self.size} tokens"
            )
        return start + self.rank * tokens, start + (self.rank + 1) * tokens

    def part_of(self, whole: ActiveSlice) -> ActiveSlice:
        """Return the slice as layers of this rank see it: its own tokens, and how they reach those on other ranks."""
        if self.size == 1:
            return whole
        start, stop = self.span(whole.start, whole.stop)
        documents = whole.documents
        own = None if documents is None else Documents(documents.starts, start, stop)
        exchange = functools.partial(attend_by_heads, whole, self)
        return replace(whole, start=start, stop=stop, documents=own, exchange=exchange)


def attend_by_heads(
    whole: ActiveSlice,
    ranks: SequenceRanks,
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Hashable,
    sinks: Tensor | None,
) -> Tensor:
    """Return `attention` of the rank's tokens to all tokens of the sequence so far; `ranks` divide the slice `whole`.

    q: [B, H, T / N, D]; k, v: [B, H_kv, T / N, D], as the caller has checked. `attention` gets all T tokens of H / N
    heads, and the sinks of these heads, while the whole slice is the active one.

    Raises ValueError if H is no multiple of N.
    """
    size, rank = ranks.size, ranks.rank
    if q.shape[1] % size:
        raise ValueError(
            f"layer {layer!r}: {q.shape[1]} query heads cannot be divided over {size} sequence ranks: give the "
            f"topology a 'sequence' axis that divides {q.shape[1]}, or a model with a multiple of {size} heads "
            f"(q {tuple(q.shape)}, k {tuple(k.shape)})"
        )
    repeats = size // math.gcd(k.shape[1], size)  # with fewer key heads than ranks some ranks read the same ones
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    # each rank has the sinks of its heads; their gradients are summed like the gradients of other parameters
    if sinks is not None:
        sinks = sinks.chunk(size)[rank]
    q, k, v = to_heads((q, k, v), ranks)
    # the store and the kernels see all tokens, and know nothing of ranks
    active = active_slice()
    with push_slice(whole if active is None or active.kept is None else whole.replace(kept=active.kept)):
        out = attention(q, k, v, sinks=sinks)
    return to_tokens(out, ranks)


def to_heads(tensors: Sequence[Tensor], ranks: SequenceRanks) -> tuple[Tensor, ...]:
    """Return [B, H / N, T, D] for each [B, H, T / N, D]: all tokens of this rank's heads, in one message per rank."""
    exchanged: tuple[Tensor, ...] = _Exchange.apply(ranks, 1, 2, *tensors)
    return exchanged


def to_tokens(out: Tensor, ranks: SequenceRanks) -> Tensor:
    """Return [B, H, T / N, D] for [B, H / N, T, D]: all heads of this rank's tokens."""
    (exchanged,) = _Exchange.apply(ranks, 2, 1, out)
    return exchanged  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: SequenceRanks, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inverse = ranks, join, split
        return _exchange(tensors, ranks, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchange(grads, *ctx.inverse)


def _exchange(tensors: Sequence[Tensor], ranks: SequenceRanks, split: int, join: int) -> tuple[Tensor, ...]:
    """Send share r of dimension `split` to rank r, and join along `join` what the ranks send, in their order."""
    with torch.no_grad():
        # one message per rank for all tensors: latency counts more than the copy
        shares = [x.chunk(ranks.size, dim=split) for x in tensors]
        sent = torch.stack([torch.cat([x[to].flatten() for x in shares]) for to in range(ranks.size)])
        received = torch.empty_like(sent)
        ranks.all_to_all(received, sent)
        sizes = [x[0].numel() for x in shares]
        from_ranks = [row.split(sizes) for row in received]
        return tuple(
            torch.cat([row[index].view(share[0].shape) for row in from_ranks], dim=join)
            for index, share in enumerate(shares)
        )
