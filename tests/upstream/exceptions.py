"""List DeepSpeed's own tests that do not pass with our engine, and why, as `docs/stock-differences.md` does."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """Say why a test fails, and which words its failure shows: a failure without them is another one."""

    reason: str
    shows: str


EXCEPTIONS: dict[str, Known] = {}
