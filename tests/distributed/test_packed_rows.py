"""Rows of several documents train through the engine as a plain loop over each document alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from tests import mutation_check
from tests.distributed import compare
from tests.distributed.cases import CARRIED, FULL, Case
from tests.distributed.compare import RankRecord
from tests.distributed.faults import FAULTS
from tests.distributed.harness import rank_pool
from tests.distributed.single_process import train_alone
from tests.distributed.training import train_case

PACKED = Case(slices=(7, 1, 4), kv_heads=2, masked=True, documents=True)
MIXED = [("attention", kind) for kind in CARRIED]
SCHEDULES = ("seq1f1b", "seq1f1b-zb", "zbv", "chimera-seq", "terapipe", "1f1b", "seq1f1b-interleaved")
CASES = [
    replace(PACKED, stages=stages, schedule=schedule, checkpointing=checkpointing, positions=positions, mixers=mixers)
    for stages in (2, 3)
    for schedule in SCHEDULES
    if stages == 2 or schedule != "chimera-seq"  # which wants an even number
    for checkpointing in ("off", "reentrant", "non_reentrant")
    for positions, mixers in (("rope", ("attention",)), ("learned", ("attention",)), *(("rope", m) for m in MIXED))
]
SAMPLE = [
    replace(PACKED, checkpointing="non_reentrant"),
    replace(PACKED, stages=3, schedule="seq1f1b-zb", positions="learned"),
    replace(PACKED, stages=1, data_parallel=2),
    replace(PACKED, schedule="seq1f1b-zb", mixers=MIXED[-1], checkpointing="reentrant"),
]


@functools.cache
def reference(case: Case) -> list[RankRecord]:
    return train_alone(case)


def of_alone(case: Case) -> Case:
    """What of a case the plain loop knows."""
    return replace(PACKED, data_parallel=case.data_parallel, positions=case.positions, mixers=case.mixers)


@pytest.mark.parametrize("case", dict.fromkeys([*SAMPLE, *CASES] if FULL else SAMPLE), ids=str)
def test_training_and_evaluation_equal_each_document_alone(case: Case) -> None:
    """Loss, gradients, parameters and evaluation, to 1e-10."""
    run = rank_pool(case.world_size).run(train_case, case=case)
    assert compare.contract(case)["gradient"] <= 1e-10
    assert not compare.violations(compare.errors(run, reference(of_alone(case))), compare.contract(case))


def test_slices_are_planned_from_measured_rows_of_one_document(tmp_path: Path) -> None:
    """What measures slices has position ids cut with the tokens, and leaves nothing behind for the training."""
    planned = {"slices": "auto", "granularity_tokens": 4, "planner": {"cache_dir": str(tmp_path)}}
    run = rank_pool(2).run(train_case, case=PACKED, **planned)
    assert not compare.violations(compare.errors(run, reference(of_alone(PACKED))), compare.contract(PACKED))
    assert len(list(tmp_path.glob("profile-*.json"))) == 1


@pytest.mark.parametrize("fault", ["edges_of_one_row_ignored", "edges_of_another_micro_batch", "no_edges_in_recompute"])
def test_wrong_edges_are_seen(fault: str) -> None:
    assert mutation_check.is_right(FAULTS[fault].configuration)
    assert mutation_check.caught_by(FAULTS[fault]).net != mutation_check.SURVIVED
