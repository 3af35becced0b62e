"""Find the positions of a slice, and turn each pair of numbers of a query or key by its rotary angle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.document_edges import Starts


def first_position() -> int:
    """Return the position of the first token of a layer's inputs: where the active slice starts, or 0."""
    active = active_slice()
    return 0 if active is None else active.start


def document_places(device: torch.device | None = None) -> Tensor | None:
    """Return each token's place in its document, int64 [B, T], on the CPU or on `device`; None: rows are documents."""
    active = active_slice()
    return None if active is None or active.documents is None else active.documents.position_ids(device)


def places(of: Tensor) -> Tensor:
    """Return each token's position, int64 [B, T], for tokens [B, T] or hidden states [B, T, H]."""
    # positions count from each document's start, as on the document alone
    if (in_documents := document_places(of.device)) is not None:
        return in_documents
    start = first_position()
    return torch.arange(start, start + of.shape[1], device=of.device).expand(len(of), -1)


def check_learned_positions(stop: int, table_size: int, error: type[ValueError]) -> None:
    """Raise `error` if a sequence of `stop` tokens or more needs learned positions that the table lacks."""
    if stop > table_size:
        problem = f"a sequence of at least {stop} tokens, with learned positions for {table_size}"
        raise error(f"{problem}: give max_sequence_length >= {stop} or shorter sequences")


def longest_run(inputs: Tensor | tuple[Tensor, ...], starts: Starts | None) -> int:
    """Return the tokens of the longest row, or of the longest document: how many positions a batch needs."""
    return longest_document((inputs if torch.is_tensor(inputs) else inputs[0]).shape[1], starts)


def longest_document(length: int, starts: Starts | None) -> int:
    """Return the tokens of the longest document of rows of `length` tokens."""
    return max((b - a for row in starts or () for a, b in itertools.pairwise((*row, length))), default=length)


class RowsOfTable(torch.autograd.Function):
    """Return the rows [start, stop) of a table of learned positions, and hand their gradient to `add`.

    Autograd's own gradient is as large as the table, for each slice: work that is quadratic in the sequence.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, start: int, stop: int, add: Callable[[int, Tensor], None]) -> Tensor:
        ctx.add, ctx.start = add, start
        return table[start:stop].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.add(ctx.start, grad)
        return None, None, None, None


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn x [B, T, H, D] by `turns` [T, 1, D/2] (Su et al. 2021, arXiv 2104.09864, eq. 34).

    Neighbours (2i, 2i + 1) are one complex number and a turn is one complex product. On a CPU that takes a third of
    the time of the same rotation in real numbers, which compiled layers use. Half precision is turned in fp32.
    """
    if not turns.is_complex():
        (even, odd), (cos, sin) = x.to(turns.dtype).unflatten(-1, (-1, 2)).unbind(-1), turns.unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
    wide = x.to(turns.dtype.to_real())
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def turns_of_slice(head_dim: int, base: float, like: Tensor) -> Tensor:
    """Return the turns of the running slice for `like` [B, T, ...].

    torch's compiler gets them as pairs of real numbers [T, 1, D/2, 2], for positions that it does not know.
    """
    if not torch.compiler.is_compiling():
        return rotary_turns(head_dim, base, first_position(), like)
    # an operator gives them when the graph runs; the table of turns would be a constant of the graph
    positions: Tensor = torch.ops.terapipe_ds.row_positions(like)
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device) / head_dim)
    angles = positions.to(torch.float64)[:, None] * frequencies
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.stack((angles.cos(), angles.sin()), -1).to(wide).unsqueeze(1)


def rotary_turns(head_dim: int, base: float, start: int, like: Tensor) -> Tensor:
    """Return the turns of positions [start, start + T) for `like` [B, T, ...], [T, 1, D/2] complex.

    It is a view of a table that all layers share, complex128 where `like` is fp64; the table grows with positions.
    """
    stop, active = start + like.shape[1], active_slice()
    dtype = torch.complex128 if like.dtype == torch.float64 else torch.complex64
    kind = head_dim, base, dtype, like.device
    # a longer table takes the place of a shorter one, and the first slice makes it for the whole sequence
    if kind not in _tables or _tables[kind].shape[0] < stop:
        length = max(stop, active.sequence_length if active is not None else 0)
        _tables[kind] = _turn_table(head_dim, base, 1 << max(10, (length - 1).bit_length()), dtype, like.device)
    return _tables[kind][start:stop]


_tables: dict[tuple[int, float, torch.dtype, torch.device], Tensor] = {}


def _turn_table(head_dim: int, base: float, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `exp(i * position * base^(-2j/D))` [length, 1, D/2], no buffer, so that checkpoints do not carry it.

    The angles are taken in fp64: in fp32 they would be off by some 1e-7 of the position.
    """
    with torch.inference_mode(False):  # a table that was first needed in inference must serve training later
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies)
        return torch.polar(torch.ones_like(angles), angles).to(device, dtype).unsqueeze(1)
