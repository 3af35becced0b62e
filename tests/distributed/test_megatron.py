"""Same training: sliced Megatron layers over TP x PP x DP against megatron-core's own model, unsliced in one process."""

from __future__ import annotations

import functools
import os

import pytest

pytest.importorskip("megatron.core")

from tests.distributed import megatron_cases
from tests.distributed.harness import rank_pool
from tests.distributed.megatron_cases import Case, Record, violations
from tests.distributed.megatron_models import is_gated, job_ours, job_reference


CASES = megatron_cases.all_cases() if os.environ.get("TERAPIPE_TEST_FULL") == "1" else megatron_cases.default_cases()


@functools.cache
def reference(case: Case) -> Record:
    """The record of megatron-core's own model, run once for all cases that it serves."""
    assert case == case.reference()
    return rank_pool(1).run(job_reference, case=case)[0]


def ours(case: Case, **options: object) -> list[Record]:
    return rank_pool(case.world_size).run(job_ours, case=case, weights=reference(case.reference()).initial, **options)


def errors(case: Case, **options: object) -> dict[str, float]:
    return megatron_cases.errors(ours(case, **options), reference(case.reference()), is_gated(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_megatrons_own_model(case: Case) -> None:
    assert not violations(errors(case), case.limits())
