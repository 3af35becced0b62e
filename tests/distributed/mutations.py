"""Broken implementations for one training run against the stock engine: the comparison has to notice each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

from tests.distributed.cases import Case
from tests.distributed.compare import RankRecord
from tests.distributed.faults import FAULTS

Mutation = Callable[[], contextlib.AbstractContextManager[None]]
MUTATIONS: dict[str, Mutation] = {
    "none": contextlib.nullcontext,
    "missing_position_offset": FAULTS["rotary_positions_not_offset"].broken,
    **{name: fault.broken for name, fault in FAULTS.items()},
}


def train_mutated(case: Case, mutation: str) -> RankRecord:
    """Train a case by our engine, broken, on every rank. The engine's own check of the first batch is off: it would
    refuse wrong weights, and it is the comparison that is looked at."""
    from terapipe_ds.runtime.verify import FirstBatchCheck
    from tests.distributed.training import train_case

    with MUTATIONS[mutation](), mock.patch.object(FirstBatchCheck, "run", lambda *arguments: None):
        return train_case(case, system="terapipe")
