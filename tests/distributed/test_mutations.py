"""It fails when it should: an implementation that is broken in one place does not pass the comparison.

Each case is first trained as it is, and passes. What a mutation leaves alone is asserted as well: a backward
that is wrong gives the right loss in the first step, so that a comparison of losses alone would come late or
never.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.distributed import compare
from tests.distributed.cases import Case
from tests.distributed.compare import RankRecord, Worst
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.mutations import train_mutated
from tests.distributed.training import train_case

TWO_STAGES = Case(stages=2, micro_batches=2, plan="uneven")
ONE_STAGE = Case(plan="single_last", schedule="terapipe")
CHECKPOINTED = replace(TWO_STAGES, checkpointing="non_reentrant", gqa=True, tied=True)
CASES = (ONE_STAGE, TWO_STAGES, CHECKPOINTED)
GROSS = 1e-3  # far above the contract in fp64 and in fp32


@functools.cache
def stock_run(case: Case) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_case, case=case, system="stock")


def errors(case: Case, mutation: str) -> dict[str, Worst]:
    run = rank_pool(case.world_size).run(train_mutated, case=case, mutation=mutation)
    return compare.errors(run, stock_run(case.stock()))


def first_loss_error(case: Case, mutation: str) -> float:
    run = rank_pool(case.world_size).run(train_mutated, case=case, mutation=mutation)
    [ours], [theirs] = (
        [record.losses[0] for record in each if record.losses] for each in (run, stock_run(case.stock()))
    )
    return abs(ours - theirs) / abs(theirs)


@pytest.mark.parametrize("case", [*CASES, replace(TWO_STAGES, plan="equal", masked=True)], ids=str)
def test_nothing_broken_passes(case: Case) -> None:
    assert not compare.violations(errors(case, "none"), compare.contract(case))


@pytest.mark.parametrize("case", CASES, ids=str)
class TestBackwardInForwardOrder:
    def test_the_store_refuses_it_at_once(self, case: Case) -> None:
        with pytest.raises(RankFailure, match="SliceStoreError") as failure:
            rank_pool(case.world_size).run(train_mutated, case=case, mutation="backward_in_forward_order", timeout_s=60)
        assert "out of order" in str(failure.value)

    def test_the_comparison_sees_it(self, case: Case) -> None:
        found = errors(case, "backward_in_forward_order_unnoticed")
        assert found["gradient"].error > GROSS
        assert compare.violations(found, compare.contract(case))
        assert first_loss_error(case, "backward_in_forward_order_unnoticed") < 1e-12, "only the backward is wrong"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_missing_position_offset_is_seen(case: Case) -> None:
    found = errors(case, "missing_position_offset")
    for kind in ("loss", "gradient", "evaluation"):
        assert found[kind].error > GROSS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_dropped_kv_gradient_is_seen(case: Case) -> None:
    found = errors(case, "dropped_kv_gradient")
    assert found["gradient"].error > GROSS
    assert first_loss_error(case, "dropped_kv_gradient") < 1e-12, "only the backward is wrong"


@pytest.mark.parametrize("case", [*CASES, replace(TWO_STAGES, plan="equal", masked=True)], ids=str)
def test_unweighted_slice_losses_are_seen(case: Case) -> None:
    found = errors(case, "unweighted_losses")
    for kind in ("loss", "gradient", "evaluation"):
        assert found[kind].error > GROSS


@pytest.mark.parametrize("mutation", ["missing_position_offset", "dropped_kv_gradient", "unweighted_losses"])
def test_bf16_excuses_none_of_these(mutation: str) -> None:
    exact = stock_run(replace(TWO_STAGES, precision="fp32_zero1").stock())
    case = replace(TWO_STAGES, precision="bf16")
    run = rank_pool(2).run(train_mutated, case=case, mutation=mutation)
    assert compare.errors(run, exact)["gradient"].error > 2 * compare.BF16_GRADIENT_CAP


def test_equal_slices_without_masks_would_hide_unweighted_losses() -> None:
    """Why the cases above are uneven or masked: there the weights are equal anyway."""
    case = replace(TWO_STAGES, plan="equal")
    assert not compare.violations(errors(case, "unweighted_losses"), compare.contract(case))
