"""Keep orders that were found in `planner.cache_dir`, so that a second start searches for nothing."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import STRICT, JsonError, parse_as
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.runtime.planning.choice import Choice
from terapipe_ds.schedule import SEARCH, ScheduleError

logger = logging.getLogger("terapipe_ds")

VERSION = 1  # grows when another search would find another order


class _File(BaseModel):
    model_config = STRICT

    format: Literal["terapipe_ds.order"] = "terapipe_ds.order"
    question: str
    slices: Annotated[list[list[int]], Field(min_length=1)]
    order: str
    log: list[str]


@dataclass(frozen=True)
class KeptOrder:
    """A file for the order of one question: costs, sizes, limit, version."""

    path: Path
    question: str

    @classmethod
    def of(cls, folder: str | None, question: Mapping[str, Any]) -> KeptOrder | None:
        """Return the file in a folder; None where there is no folder."""
        if folder is None:
            return None
        text = json.dumps({**question, "version": VERSION}, sort_keys=True)
        return cls(Path(folder) / f"order-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json", text)

    def read(self) -> tuple[Choice, list[str]] | None:
        """Return the order and what the log said of it; None, with a warning, for a file that holds none."""
        if not self.path.exists():
            return None
        try:
            file = parse_as(_File, read_bytes(self.path))
            choice = Choice(tuple(SlicePlan(tuple(lengths)) for lengths in file.slices), SEARCH, file.order)
            counts = () if choice.order is None else choice.order.num_slices
            if file.question == self.question and counts == tuple(map(len, file.slices)):
                return choice, file.log
            problem = "it is of another question"
        except (OSError, JsonError, ScheduleError, ValueError) as error:
            problem = str(error)
        logger.warning(
            "terapipe.planner.cache_dir: %s holds no order (%s); it is searched for again", self.path, problem
        )
        return None

    def write(self, choice: Choice, slices: list[list[int]], log: list[str]) -> None:
        """Write the order; what cannot be written is one warning."""
        assert choice.order_csv is not None
        file = _File(question=self.question, slices=slices, order=choice.order_csv, log=log)
        with Diagnostic(f"terapipe.planner.cache_dir: cannot write {self.path}").attempt():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, file.model_dump_json(indent=1) + "\n")
