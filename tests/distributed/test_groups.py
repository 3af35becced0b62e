"""Wires in groups of their own, as backends without tags need them, here over one that could do without."""

from __future__ import annotations

from unittest import mock

import pytest

from terapipe_ds.runtime.links import groups
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


def job_train(schedule: str, stages: int) -> tuple[dict[str, float], list[int], list[int]]:
    """Against the stock engine; and of each channel of this stage the group it uses, by activations and gradients."""
    with mock.patch.object(groups, "_keeps_order", lambda: True):
        with engine_of(gpt_layers(), section(schedule=schedule), stages=stages) as engine:
            ours = train_engine(engine, batches(2, num_micro_batches=4))
            channels = engine._stage.links._channels
            activations = [c for each in channels for c in (each.activations_in, each.activations_out)]
            gradients = [c for each in channels for c in (each.gradients_in, each.gradients_out)]
            used = [[id(c.wire.group) for c in found if c is not None] for found in (activations, gradients)]
    stock = run_training(gpt_layers, None, batches(2, num_micro_batches=4), stages=1)
    return differences(ours, stock), *used


@pytest.mark.parametrize(("ranks", "schedule", "count"), [
    (2, "zbv", 2), (2, "chimera-seq", 2), (2, "interleaved", 1), (4, "seq1f1b", 2),
])  # fmt: skip
def test_every_wire_in_a_group_of_its_own(ranks: int, schedule: str, count: int) -> None:
    """``count``: wires of a stage with neighbours on both sides, or to one other stage."""
    results = rank_pool(ranks).run(job_train, schedule=schedule, stages=ranks)
    assert not violations([errors for errors, *_ in results], EXACT)
    for _, activations, gradients in results:
        assert len(set(activations + gradients)) == len(activations) + len(gradients)
    assert max(len(activations) for _, activations, _ in results) == count
