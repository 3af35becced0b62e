"""Find which system of a benchmark failed, so that a failure costs that system's rows only.

After a failure all ranks are ended and start again without that system: the ranks of a failed step wait for one
another, and some messages will never be received.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terapipe_ds.bench.cases import LeftOut
from terapipe_ds.files.atomic import write_text


class Position:
    """Keep what this rank is doing in a file that outlives the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"position{rank}.json"
        self._place: dict[str, int | str] = {}

    def at(self, **place: int | str | None) -> None:
        """Note what begins: a `case` (at one `accumulation`), the costs of a `cut`, or (no argument) work for all."""
        self._write({key: value for key, value in place.items() if value is not None})

    def failed(self, error: BaseException) -> None:
        """Write down why this rank ends, and when."""
        said = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
        self._write(self._place, reason=reason, time_s=time.monotonic())  # a clock that all processes share

    def _write(self, place: dict[str, int | str], **said: str | float) -> None:
        self._place = place
        write_text(self._path, json.dumps({**place, **said}))  # whole: this rank may be killed in any line

    def read(self) -> dict[str, Any]:
        """Return what was noted last, by this rank or by one that has ended."""
        return dict(json.loads(self._path.read_text(encoding="utf-8"))) if self._path.exists() else {}


def find_failure(folder: Path, exit_codes: Mapping[int, int]) -> LeftOut | None:
    """Return what ended the ranks, whose `Position`s are in `folder`; None where it concerns all systems."""
    said = {rank: Position(folder, rank).read() for rank in exit_codes}
    # a rank that left no reason failed first: the others' errors may be consequences of its end
    rank = min(said, key=lambda rank: said[rank].pop("time_s", 0.0))
    code, names = exit_codes[rank], {-known: known.name for known in signal.Signals}
    ended = f"exit code {code}" if code >= 0 else f"signal {names.get(code, -code)}"
    said[rank].setdefault("reason", f"rank {rank} ended with {ended}")
    return LeftOut(**said[rank]) if {"case", "cut"} & set(said[rank]) else None
