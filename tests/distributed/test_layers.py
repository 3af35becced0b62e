"""Test layers of all kinds in the engine: attention with options, alone and together, and carried states."""

import functools
from dataclasses import replace

import pytest

from tests.distributed import cases
from tests.distributed.cases import FULL, Case, RankRecord
from tests.distributed.harness import rank_pool
from tests.distributed.training import train_alone, train_case
from tests.small_models import mixers

FEW = cases.layer_cases(2)
MANY = cases.layer_cases(4) if FULL else FEW
SAMPLE = 4


@functools.cache
def reference(case: Case) -> list[RankRecord]:
    return train_alone(case)


@pytest.mark.sample(SAMPLE)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_training_and_evaluation_equal_a_plain_loop(case: Case) -> None:
    """Without slices, pipeline or engine, each document alone: loss, gradients, parameters, evaluation, to 1e-10."""
    run = rank_pool(case.world_size).run(train_case, case=case)
    alone = reference(replace(case, stages=2, schedule="seq1f1b", checkpointing="off"))
    assert cases.contract(case)["gradient"] <= 1e-10
    assert not cases.violations(cases.errors(run, alone), cases.contract(case))


def test_what_is_tried_is_what_there_is() -> None:
    assert tuple(mixers.MIXERS) == cases.CARRIED and tuple(mixers.OPTIONS) == cases.OPTIONS
    kinds = {kind for case in FEW for kind in case.mixers}
    assert {"+".join(cases.OPTIONS), "attention", *cases.CARRIED} <= kinds
    assert {(case.schedule, case.stages) for case in FEW} == {
        (schedule, stages) for schedule in cases.LAYER_SCHEDULES for stages in (2, 3)
    } - {("chimera-seq", 3)}  # which wants an even number
