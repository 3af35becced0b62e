"""Random configurations train as a plain loop in one process does: loss, gradients, parameters, evaluation.

The configurations are drawn by hypothesis with a fixed seed, so they are the same in every run; `single_process.py` has
no pipeline, no slices and no engine. Fourteen that cover most pairs of values run by default, all of them with
TERAPIPE_TEST_FULL=1.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import numpy as np
import pytest

from tests.distributed import compare, configurations
from tests.distributed.cases import CARRIED, CLIP_NORM, OPTIONS, Case
from tests.distributed.compare import RankRecord
from tests.distributed.configurations import COUNT
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.single_process import IGNORE_INDEX, micro_batches, train_alone
from tests.distributed.training import train_case

BLOCK = 20


@functools.cache
def reference(case: Case) -> list[RankRecord]:
    return train_alone(case)


def problems(case: Case) -> list[str]:
    """What is above the contract; empty where both trainings are the same."""
    run = rank_pool(case.world_size).run(train_case, case=case)
    return compare.violations(compare.errors(run, reference(case)), compare.contract(case))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", configurations.covering(14), ids=lambda c: f"seed{c.data_seed}")
def test_training_equals_a_plain_loop(case: Case) -> None:
    assert not problems(case), str(case)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, COUNT, BLOCK))
def test_all_configurations(first: int) -> None:
    wrong = {}
    for case in configurations.drawn()[first : first + BLOCK]:
        try:
            found = problems(case)
        except RankFailure as failure:
            found = [str(failure)]
        if found:
            wrong[str(case)] = found
    assert not wrong


class TestConfigurations:
    """What is drawn is what the comparison claims to cover."""

    def test_every_schedule_and_every_value_occurs_in_the_default_run_too(self) -> None:
        few, many = configurations.covering(14), configurations.drawn()
        assert len(set(many)) == COUNT and all(sum(c.world_size == n for c in many) >= COUNT // 4 for n in (2, 4))
        assert {each.schedule for each in few} == set(configurations.SCHEDULES)
        kinds = {part for each in few for kind in each.mixers for part in kind.split("+")}
        assert kinds == {"attention", *CARRIED, *OPTIONS} and any(len(set(each.mixers)) > 2 for each in few)
        numbers = {"stages", "micro_batches", "rows", "length", "slices", "schedule", "steps", "data_seed", "mixers"}
        for name in {field.name for field in fields(Case)} - numbers - {"decoder_layers"}:
            values = {getattr(each, name) for each in many if each.world_size == 2}
            assert {getattr(each, name) for each in few} == values and len(values) > 1, name

    def test_masks_leave_a_label_in_each_micro_batch_and_empty_some_slices(self) -> None:
        masked = [each for each in configurations.drawn() if each.masked and isinstance(each.slices, tuple)]
        empty = 0
        for each in masked:
            for _, labels in micro_batches(each, replica=0, step=1):
                parts = (labels != IGNORE_INDEX).split(list(each.slices), dim=1)
                counts = [int(part.sum()) for part in parts]
                assert sum(counts) > 0
                empty += counts.count(0)
        assert empty > len(masked)


class TestReference:
    def test_clipping_and_the_hook_are_at_work(self) -> None:
        plain = Case()
        clipped, doubled = replace(plain, clipping=True), replace(plain, hook=True)
        norms = [norm(reference(each)[0]) for each in (plain, clipped, doubled)]
        assert norms[0] > 2 * CLIP_NORM
        assert norms[1] == pytest.approx(CLIP_NORM, rel=1e-4)  # its eps is 1e-6
        assert norms[2] == pytest.approx(2 * norms[0])


def norm(record: RankRecord) -> float:
    return float(np.sqrt(sum((gradient**2).sum() for gradient in record.gradients[1].values())))
