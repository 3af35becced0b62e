"""Test that the comparison with the stock engine fails for an implementation that is broken in one place.

The tests also assert which values a fault leaves alone: with a wrong backward the first step's loss is right, so
that a comparison of losses alone would notice it late or never.
"""

import functools
from dataclasses import replace

import pytest

from tests.distributed import cases
from tests.distributed.cases import Case, RankRecord
from tests.distributed.faults import train_broken
from tests.distributed.harness import rank_pool
from tests.distributed.training import train_case

TWO_STAGES = Case(stages=2, micro_batches=2, slices=(5, 10, 2, 7))
GROSS = 1e-3  # far above the contract in fp64 and in fp32
ALL_KINDS = ("loss", "gradient", "evaluation")
SEEN = {  # the kinds of errors that must be gross; a wrong backward does not change the first loss
    "backward_in_forward_order_unnoticed": ("gradient",),
    "dropped_kv_gradient": ("gradient",),
    "rotary_positions_not_offset": ALL_KINDS,
    "unweighted_losses": ALL_KINDS,
}


@functools.cache
def stock_run(case: Case) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_case, case=case, system="stock")


def broken_run(case: Case, fault: str | None) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_broken, case=case, fault=fault)


def first_loss(run: list[RankRecord]) -> float:
    (loss,) = (record.losses[0] for record in run if record.losses)
    return float(loss)


@pytest.mark.parametrize("case", [TWO_STAGES, replace(TWO_STAGES, slices=3, masked=True)], ids=str)
def test_nothing_broken_passes(case: Case) -> None:
    found = cases.errors(broken_run(case, None), stock_run(case.stock()))
    assert not cases.violations(found, cases.contract(case))


@pytest.mark.parametrize("fault", SEEN)
def test_what_is_broken_is_seen(fault: str) -> None:
    run, stock = broken_run(TWO_STAGES, fault), stock_run(TWO_STAGES.stock())
    found = cases.errors(run, stock)
    assert cases.violations(found, cases.contract(TWO_STAGES))
    assert min(found[kind].error for kind in SEEN[fault]) > GROSS
    same = abs(first_loss(run) - first_loss(stock)) < 1e-12 * abs(first_loss(stock))
    assert same == (SEEN[fault] == ("gradient",))


@pytest.mark.parametrize("fault", ["rotary_positions_not_offset", "dropped_kv_gradient", "unweighted_losses"])
def test_bf16_excuses_none_of_these(fault: str) -> None:
    exact = stock_run(replace(TWO_STAGES, precision="fp32_zero1").stock())
    run = broken_run(replace(TWO_STAGES, precision="bf16"), fault)
    assert cases.errors(run, exact)["gradient"].error > 2 * cases.BF16_GRADIENT_CAP


def test_equal_slices_without_masks_would_hide_unweighted_losses() -> None:
    """Why the cases above are uneven or masked: there the weights are equal anyway."""
    case = replace(TWO_STAGES, slices=3)
    found = cases.errors(broken_run(case, "unweighted_losses"), stock_run(case.stock()))
    assert not cases.violations(found, cases.contract(case))
