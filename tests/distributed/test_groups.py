"""Wires in groups of their own, as backends without tags need them, here over one that could do without."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from terapipe_ds.runtime import groups
from tests.distributed.engines import (
    EXACT,
    batches,
    differences,
    engine_of,
    gpt_layers,
    run_training,
    section,
    violations,
)
from tests.distributed.engines import train as train_engine
from tests.distributed.harness import rank_pool


def job_train(schedule: str, stages: int) -> tuple[dict[str, float], int]:
    """Against the stock engine; and how many groups carry activations."""
    with mock.patch.object(groups, "_keeps_order", lambda: True):
        with engine_of(gpt_layers(), section(schedule=schedule), stages=stages) as engine:
            ours = train_engine(engine, batches(2, num_micro_batches=4))
            made = engine._groups
    stock = run_training(gpt_layers, None, batches(2, num_micro_batches=4), stages=1)
    carriers: set[Any] = {id(pair[0]) for pair in made.more.values()} | {id(made.activations)}
    assert len(carriers & {id(pair[1]) for pair in made.more.values()}) == 0  # none for both directions
    return differences(ours, stock), len(carriers)


@pytest.mark.parametrize(("ranks", "schedule", "count"), [
    (2, "zbv", 2), (2, "chimera-seq", 2), (4, "seq1f1b", 2),
])  # fmt: skip
def test_every_wire_in_a_group_of_its_own(ranks: int, schedule: str, count: int) -> None:
    results = rank_pool(ranks).run(job_train, schedule=schedule, stages=ranks)
    assert not violations([errors for errors, _ in results], EXACT)
    assert [found for _, found in results] == [count] * ranks
