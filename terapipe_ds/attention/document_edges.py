"""Find where the documents of packed rows begin.

A row of a micro-batch may hold several documents one after another. A token sees the tokens of its own document alone,
so that training on the row equals training on each document alone. Edges are plain numbers on the host: every layer and
every kernel asks for them, and none may wait for a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Starts = tuple[tuple[int, ...], ...]
"""For each row of a micro-batch where its documents start, in tokens; the first one is 0."""


@dataclass(frozen=True)
class Documents:
    """Hold the documents of a micro-batch's rows, as the slice [start, stop) sees them.

    `starts` cover the whole rows: they are the same for all slices of a micro-batch.
    """

    starts: Starts
    start: int
    stop: int

    def first_token(self, row: int) -> int:
        """Return the start of the document that is open at the slice's start: the first key that the slice sees."""
        starts = self.starts[row]
        return starts[bisect_right(starts, self.start) - 1]

    def edges(self, row: int) -> tuple[int, ...]:
        """Return where documents of a row begin within the slice, after its first token."""
        starts = self.starts[row]
        return starts[bisect_right(starts, self.start) : bisect_right(starts, self.stop - 1)]

    def cu_seqlens(self, row: int) -> torch.Tensor:
        """Return the cumulative lengths of the parts of documents in the slice: int32, from 0 to T."""
        edges = [self.start, *self.edges(row), self.stop]
        return torch.tensor([edge - self.start for edge in edges], dtype=torch.int32, device="cpu")

    def position_ids(self, device: torch.device | None = None) -> torch.Tensor:
        """Return each token's place in its document: int64 [B, T], on the CPU or on `device`."""
        tokens = torch.arange(self.start, self.stop, device="cpu")
        # the documents of the slice alone: all of the row, for each slice, would take time quadratic in its length
        starts = [
            torch.tensor([self.first_token(row), *self.edges(row)], device="cpu") for row in range(len(self.starts))
        ]
        places = torch.stack([tokens - row[torch.searchsorted(row, tokens, right=True) - 1] for row in starts])
        # fewer bytes on their way
        return places if device is None else to_device(places.int(), device).long()


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor of the host to `device`. The host does not wait, even if the device is far behind."""
    # CUDA takes up to 64 KB at once from any memory of the host. Pinned memory is not asked for here: its allocation
    # may wait for all work of the device, even for receives that wait for this very rank.
    return x.to(device, non_blocking=True)


def are_position_ids(x: torch.Tensor) -> bool:
    """Return whether a tensor may be position ids of rows: integers [B, L], at least one."""
    is_real = x.is_floating_point() or x.is_complex()
    return x.dim() == 2 and x.numel() > 0 and not is_real and x.dtype != torch.bool


def starts_of(position_ids: torch.Tensor) -> Starts:
    """Return where documents start in rows of position ids ([B, L]): where one is not the one before + 1."""
    # edges are needed as numbers on the host, once per batch
    position_ids = position_ids.detach().to("cpu", torch.int64)  # in few bits the one before + 1 may wrap to 0
    return starts_at(position_ids[:, 1:] != position_ids[:, :-1] + 1)


def starts_at(edges: torch.Tensor) -> Starts:
    """Return where documents start, from `edges` ([B, L - 1]), which have a flag for each token after the first."""
    return tuple((0, *(row.nonzero().flatten() + 1).tolist()) for row in edges)


def have_edges(starts: Sequence[Sequence[int]]) -> bool:
    """Return whether any row holds more than one document."""
    return any(len(row) > 1 for row in starts)
