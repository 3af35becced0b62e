"""Same training: with any schedule and any plan, a step gives the loss, gradients and parameters of
DeepSpeed's own engine.

Each case trains a tiny GPT for a few steps with Adam (lr 1e-3, eps 1e-8), once by the stock PipelineEngine
without the plugin and with torch's own attention, once by ours, on the same data from the same weights.
Compared are the loss of every step, every parameter's gradient in the first and the last step, the parameters
after it, and evaluation in between and at the end. The default run covers every pair of values of all dimensions in
`tests/distributed/cases.py` and, in fp64, every triple of those that slices can get wrong; with
TERAPIPE_TEST_FULL=1 the whole product of the latter.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.distributed import cases, compare
from tests.distributed.cases import Case
from tests.distributed.compare import KINDS, RankRecord
from tests.distributed.harness import rank_pool
from tests.distributed.training import train_case

CASES = cases.all_cases() if cases.FULL else cases.default_cases()


@functools.cache
def stock_run(case: Case) -> list[RankRecord]:
    """The records of DeepSpeed's engine, run once for all cases that it serves."""
    assert case == case.stock()
    return rank_pool(case.world_size).run(train_case, case=case, system="stock")


def our_run(case: Case) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_case, case=case, system="terapipe")


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != "bf16"], ids=str)
def test_training_equals_the_stock_engine(case: Case) -> None:
    found = compare.errors(our_run(case), stock_run(case.stock()))
    assert not compare.violations(found, compare.contract(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "bf16"], ids=str)
@pytest.mark.sample(8)
def test_bf16_is_as_close_to_fp32_as_the_stock_engine_in_bf16(case: Case) -> None:
    # ZeRO's records, like those in bf16, have the gradients before clipping, and their norm
    exact = stock_run(replace(case, precision="fp32_zero1").stock())
    ours = compare.errors(our_run(case), exact)
    theirs = compare.errors(stock_run(case.stock()), exact)
    assert not compare.violations(ours, compare.bf16_limits(theirs))


class TestReference:
    """What the comparison stands on: the stock engine agrees with itself, and records hold what they say."""

    def test_the_stock_engine_repeats_itself(self) -> None:
        case = Case(stages=2, micro_batches=2, masked=True).stock()
        again = rank_pool(2).run(train_case, case=case, system="stock")
        assert {kind: worst.error for kind, worst in compare.errors(again, stock_run(case)).items()} == dict.fromkeys(
            KINDS, 0
        )

    @pytest.mark.parametrize("precision", ["fp64", "fp32"])
    def test_the_stock_engine_gives_the_same_with_any_number_of_stages(self, precision: str) -> None:
        one = Case(micro_batches=2, tied=True, precision=precision)
        for stages in (2, 3):
            more = replace(one, stages=stages)
            found = compare.errors(stock_run(more.stock()), stock_run(one.stock()))
            assert not compare.violations(found, compare.contract(more))

    def test_checkpointing_changes_nothing_in_the_stock_engine(self) -> None:
        plain = Case(stages=2, micro_batches=2)
        for checkpointing in ("reentrant", "non_reentrant"):
            found = compare.errors(
                stock_run(replace(plain, checkpointing=checkpointing).stock()), stock_run(plain.stock())
            )
            assert not compare.violations(found, compare.contract(plain))

    def test_the_stock_clip_norm_is_wrong_with_several_stages(self) -> None:
        """Why clipping is compared with one stage. When this fails, DeepSpeed is mended: compare plainly."""
        one = Case(clipping=True).stock()
        two = rank_pool(2).run(train_case, case=replace(one, stages=2), system="stock")
        assert compare.errors(two, stock_run(one))["gradient"].error > 1e-2

    def test_fp64_is_nowhere_rounded_to_fp32(self) -> None:
        [record] = stock_run(Case().stock())
        for tensors in (record.parameters, *record.gradients.values(), {"loss": np.array(record.losses)}):
            for value in tensors.values():
                numbers = value[value != 0]
                assert (numbers.astype(np.float32) != numbers).mean() > 0.5

    def test_clipping_is_at_work_in_every_step(self) -> None:
        [plain], [clipped] = stock_run(Case().stock()), stock_run(Case(clipping=True).stock())
        for step in (1, cases.NUM_STEPS):
            assert gradient_norm(plain, step) > 2 * cases.CLIP_NORM
            assert gradient_norm(clipped, step) == pytest.approx(cases.CLIP_NORM, rel=0.02)  # its eps is 1e-6

    def test_every_stage_and_step_is_in_the_record(self) -> None:
        records = stock_run(Case(stages=2, tied=True).stock())
        assert [record.engine for record in records] == ["PipelineEngine"] * 2
        assert [len(record.losses) for record in records] == [0, cases.NUM_STEPS]
        assert [len(record.evaluations) for record in records] == [0, 2]
        for record in records:
            assert len(record.returned) == cases.NUM_STEPS
            assert set(record.gradients) == {1, cases.NUM_STEPS}
            for gradients in record.gradients.values():
                assert set(gradients) == set(record.parameters)
        assert set(records[0].parameters) & set(records[1].parameters) == {"tied_modules.embedding.weight"}

    def test_masked_labels_leave_rows_and_slices_without_any(self) -> None:
        valid = [labels_per_row(step) for step in range(1, 4)]
        assert any(max(rows) >= 10 * max(min(rows), 1) for rows in valid)
        last_only = [rows for rows in valid if sum(rows) == 1]
        assert last_only, "one micro-batch has its only label in the last slice"

    def test_data_differ_between_steps_micro_batches_and_pipelines(self) -> None:
        from tests.distributed.training import batches

        case = Case(micro_batches=2)
        tokens = [data for pipeline in (0, 1) for step in (1, 2) for data, _ in batches(case, pipeline, step)]
        assert len(tokens) == 8
        assert not any((one == other).all() for one, other in itertools.combinations(tokens, 2))


def gradient_norm(record: RankRecord, step: int) -> float:
    return sum(float((gradient**2).sum()) for gradient in record.gradients[step].values()) ** 0.5


def labels_per_row(step: int) -> list[int]:
    from tests.distributed.training import IGNORE_INDEX, batches

    [(_, labels)] = batches(Case(masked=True), pipeline_id=0, step=step)
    return [int(count) for count in (labels != IGNORE_INDEX).sum(dim=1)]
