"""Ranks that divide the tokens of each slice train as one process trains whole sequences, in fp64 on four ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import ProcessTopology

from tests.distributed import compare
from tests.distributed.cases import Case
from tests.distributed.compare import RankRecord
from tests.distributed.engines import engine_of
from tests.distributed.harness import RankPool, rank_pool
from tests.distributed.single_process import layers, train_alone
from tests.distributed.training import _train, options, terapipe_section

RANKS = 4
BASE = Case(slices=(6, 2, 4), masked=True)
PACKED = replace(BASE, documents=True, kv_heads=2)


def topology(stages: int, replicas: int = 1) -> ProcessTopology:
    return ProcessTopology(axes=["pipe", "data", "sequence"], dims=[stages, replicas, RANKS // stages // replicas])


@contextlib.contextmanager
def engine_on(case: Case, changes: dict[str, Any], **more: Any) -> Iterator[Any]:
    found = {**options(case), **more}
    found["module"] = {**found.get("module", {}), "topology": topology(case.stages, case.data_parallel)}
    with engine_of(layers(case), {**terapipe_section(case), **changes}, **found) as engine:
        yield engine


def train_on_sequence_ranks(case: Case, **changes: Any) -> RankRecord:
    with engine_on(case, changes) as engine:
        return _train(engine, case)


class TestSequenceRanks:
    @pytest.fixture(scope="class")
    def ranks(self) -> RankPool:
        return rank_pool(RANKS)

    @pytest.mark.parametrize(
        "case",
        [
            BASE,
            replace(BASE, kv_heads=2, schedule="seq1f1b-zb", checkpointing="non_reentrant"),
            replace(BASE, kv_heads=1, positions="learned", gpt3=True, loss_reduction="mean"),
            replace(BASE, stages=1, slices=(8, 4), kv_heads=2, checkpointing="reentrant", loss_reduction="sum"),
            replace(BASE, stages=1, data_parallel=2, clipping=True),
            replace(BASE, precision="fp32_zero1", clipping=True),
            PACKED,
            replace(PACKED, positions="learned", schedule="zbv"),
        ],
        ids=str,
    )
    def test_training_equals_one_process(self, ranks: RankPool, case: Case) -> None:
        """Losses, gradients, clipped norms, parameters and evaluation."""
        run = ranks.run(train_on_sequence_ranks, case=case)
        alone = replace(case, schedule="seq1f1b", checkpointing="off", stages=2)
        assert not compare.violations(compare.errors(run, train_alone(alone)), compare.contract(case))
