"""Find which tokens a slice sees: those in its window, and of its own document in packed rows.

A query sees the keys [first, its own place], as far back as a window allows, and not beyond its document's start. The
first one never moves back from one query to the next, so the keys before the first key of a slice are out of reach for
all later slices, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from terapipe_ds.attention.document_edges import Documents, Starts


class Span(NamedTuple):
    """Describe the queries [start, stop) of some rows of a micro-batch, all in one document.

    They see no key before `first_key`. All tokens count from the start of the sequence.
    """

    rows: slice
    first_key: int
    start: int
    stop: int

    def counted_from(self, token: int) -> Span:
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
