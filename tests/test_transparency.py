"""Same training: with any schedule and any plan, a step gives the loss, gradients and parameters of
DeepSpeed's own engine.

Each case trains a tiny GPT for a few steps with AdamW, once by the stock PipelineEngine without the plugin and with
torch's own attention, once by ours, on the same data from the same weights.
Compared are the loss of every step, every parameter's gradient in every step, the parameters after the last one, and
evaluation in between and at the end. `tests/distributed/cases.py` has cases that cover every pair of values of all
dimensions, in fp64 that of all that slices can get wrong. The default run takes a sample of them; with
TERAPIPE_TEST_FULL=1 it is the whole product of the latter.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.cases import Case, RankRecord
from tests.distributed.harness import rank_pool
from tests.distributed.training import train_case

CASES = cases.all_cases() if cases.FULL else cases.default_cases()
CHECK = {"verify": None} if cases.FULL else {}  # the usual run leaves the check to the tests of the check


@functools.cache
def stock_run(case: Case) -> list[RankRecord]:
    """The records of DeepSpeed's engine, run once for all cases that it serves."""
    assert case == case.stock()
    return rank_pool(case.world_size).run(train_case, case=case, system="stock")


def our_run(case: Case) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_case, case=case, **CHECK)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != "bf16"], ids=str)
def test_training_equals_the_stock_engine(case: Case) -> None:
    found = cases.errors(our_run(case), stock_run(case.stock()))
    assert not cases.violations(found, cases.contract(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "bf16"], ids=str)
@pytest.mark.sample(1)
def test_bf16_is_as_close_to_fp32_as_the_stock_engine_in_bf16(case: Case) -> None:
    # ZeRO's records, like those in bf16, have the gradients before clipping, and their norm
    exact = stock_run(replace(case, precision="fp32_zero1").stock())
    ours = cases.errors(our_run(case), exact)
    theirs = cases.errors(stock_run(case.stock()), exact)
    assert not cases.violations(ours, cases.bf16_limits(theirs))


class TestReference:
    """What the comparison stands on: the stock engine agrees with itself, and records hold what they say."""

    def test_the_stock_clip_norm_is_wrong_with_several_stages(self) -> None:
        """Why clipping is compared with one stage. When this fails, DeepSpeed is mended: compare plainly."""
        one = Case(clipping=True).stock()
        two = rank_pool(2).run(train_case, case=replace(one, stages=2), system="stock")
        assert cases.errors(two, stock_run(one))["gradient"].error > 1e-2

    def test_fp64_is_nowhere_rounded_to_fp32(self) -> None:
        [record] = stock_run(Case(stages=1).stock())
        for tensors in (record.parameters, *record.gradients.values(), {"loss": np.array(record.losses)}):
            for value in tensors.values():
                numbers = value[value != 0]
                assert (numbers.astype(np.float32) != numbers).mean() > 0.5

    def test_every_stage_and_step_is_in_the_record(self) -> None:
        case = Case(tied=True).stock()
        records = stock_run(case)
        assert [record.engine for record in records] == ["PipelineEngine"] * 2
        assert [len(record.losses) for record in records] == [0, case.steps]
        assert [len(record.evaluations) for record in records] == [0, 2]
        for record in records:
            assert len(record.returned) == case.steps
            assert [set(each) for each in record.gradients.values()] == [set(record.parameters)] * case.steps
        assert set(records[0].parameters) & set(records[1].parameters) == {"tied_modules.embedding.weight"}
