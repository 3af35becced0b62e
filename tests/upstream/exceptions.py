"""Which of DeepSpeed's own tests do not pass with our engine, and why; as in `docs/stock-differences.md`."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """Why a test fails, and what its failure shows: another failure of it is not the known one."""

    reason: str
    shows: str


EXCEPTIONS: dict[str, Known] = {}
