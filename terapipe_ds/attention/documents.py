"""Find where the documents of packed rows begin, and which tokens a slice of such rows sees.

A row of a micro-batch may hold several documents one after another. A token sees the tokens of its own document alone,
so that training on the row equals training on each document alone. Edges are plain numbers on the host: every layer and
every kernel asks for them, and none may wait for a device.

A query sees the keys [first, its own place], as far back as a window allows, and not beyond its document's start. The
first one never moves back from one query to the next, so the keys before the first key of a slice are out of reach for
all later slices, too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Span(NamedTuple):
    """Describe the queries [start, stop) of some rows of a micro-batch, all in one document.

    They see no key before `first_key`. All tokens count from the start of the sequence.
    """

    rows: slice
    first_key: int
    start: int
    stop: int

    def counted_from(self, token: int) -> Span:
        """Return the span with tokens that count from `token`."""
        return Span(self.rows, self.first_key - token, self.start - token, self.stop - token)


@dataclass(frozen=True)
class Reach:
    """Hold how far back the tokens of a layer see: `window` tokens with their own, or all; documents begin at `starts`.

    Each field is None if it limits nothing.
    """

    window: int | None = None
    starts: Starts | None = None

    @property
    def is_limited(self) -> bool:
        """Return whether some token does not see all tokens before it."""
        return self.window is not None or self.starts is not None

    def first_key(self, token: int) -> int:
        """Return the first key that any row sees from `token` on."""
        if self.starts is None:
            return self._in_window(0, token)
        # another row may still need a key that one row no longer sees
        documents = Documents(self.starts, token, token + 1)
        return self._in_window(min(documents.first_token(row) for row in range(len(self.starts))), token)

    def spans(self, start: int, stop: int, batch: int) -> tuple[Span, ...]:
        """Return the queries of a slice, document by document; rows with the same edges go together."""
        if self.starts is None:
            return (Span(slice(0, batch), self._in_window(0, start), start, stop),)
        return tuple(self._spans_of_documents(Documents(self.starts, start, stop)))

    def _spans_of_documents(self, documents: Documents) -> Iterator[Span]:
        def edges_of(row: int) -> tuple[int, ...]:
            return documents.first_token(row), documents.start, *documents.edges(row)

        # rows that are cut alike go to the kernel together
        for (first_token, *begins), group in itertools.groupby(range(len(documents.starts)), key=edges_of):
            rows = list(group)
            for begin, end in itertools.pairwise([*begins, documents.stop]):
                first = first_token if begin == documents.start else begin
                yield Span(slice(rows[0], rows[-1] + 1), self._in_window(first, begin), begin, end)

    def _in_window(self, first: int, token: int) -> int:
        return first if self.window is None else max(first, token - self.window + 1)
