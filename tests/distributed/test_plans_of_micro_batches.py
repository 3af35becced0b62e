"""Test `"slices": [[...], [...]]`: each micro-batch of a step in slices of its own, trained as by the stock engine."""

from typing import Any

import pytest
from torch import Tensor, nn

from terapipe_ds import SlicePlan
from tests.distributed import engines
from tests.distributed.harness import rank_pool

LISTS = [[9, 8, 6], [engines.LENGTH], [4, 10, 5, 4]]


def job_train(schedule: str, lists: list[list[int]], **changes: Any) -> tuple[dict[str, float], list[list[int]], float]:
    terapipe = engines.section(schedule=schedule, slices=lists, **changes)
    with engines.engine_of(engines.gpt_layers(), terapipe, gradient_accumulation_steps=3) as engine:
        data = engines.batches(2, 3)
        ours = engines.train(engine, data)
        plans = [list(engine.slice_plan(engines.LENGTH, m).lengths) for m in range(4)]
        seven = [one for batch in engines.batches(3, 3) for one in batch][:7]
        before = float(engine.eval_batch(iter(seven), num_micro_batches=7))  # in turns
        engine.use_slice_plan(SlicePlan((engines.LENGTH,)))
        whole = float(engine.eval_batch(iter(seven), num_micro_batches=7))
    return engines.differences(ours, engines.stock_run(num_micro_batches=3)), plans, abs(before - whole) / abs(whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["seq1f1b-zb", "seq1f1b", "zbv", "terapipe"])
def test_trains_as_the_stock_engine(schedule: str) -> None:
    for errors, plans, of_evaluation in rank_pool(2).run(job_train, schedule=schedule, lists=LISTS):
        assert not engines.violations([errors])
        assert plans == [*LISTS, LISTS[0]]
        assert of_evaluation < 1e-6


def job_by_hand() -> tuple[dict[str, float], list[int], list[tuple[str, str]]]:
    with engines.engine_of(engines.gpt_layers(), engines.section(), gradient_accumulation_steps=3) as engine:
        engine.use_slice_plan([SlicePlan(tuple(lengths)) for lengths in LISTS], "seq1f1b-zb")
        calls = [SlicePlan((engines.LENGTH,))] * 2, [engines.LENGTH]
        refused = [engines.raised_by(lambda plans=plans: engine.use_slice_plan(plans)) for plans in calls]
        ours = engines.train(engine, engines.batches(2, 3))
        counts = [engine.slice_plan(engines.LENGTH, m).num_slices for m in range(3)]
    return engines.differences(ours, engines.stock_run(num_micro_batches=3)), counts, refused


def test_set_by_hand() -> None:
    for errors, counts, refused in rank_pool(2).run(job_by_hand):
        assert not engines.violations([errors]) and counts == [3, 1, 4]
        assert [kind for kind, _ in refused] == ["PlanError"] * 2
        (_, text), (_, of_numbers) = refused
        assert "2 plans" in text and "each of the 3 micro-batches" in text and "give a SlicePlan, or" in of_numbers


def job_refused() -> list[tuple[str, str]]:
    problems = []
    with engines.engine_of(
        engines.gpt_layers(), engines.section(slices=LISTS), gradient_accumulation_steps=3
    ) as engine:
        problems.append(engines.step_error(engine, engines.batches(1, 3, length=engines.LENGTH - 1)[0]))
        engine.set_train_batch_size(4)
        problems.append(engines.step_error(engine, engines.batches(1, 2)[0]))
    return problems


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for problems in rank_pool(2).run(job_refused):
        assert "each list adds up to 23 tokens, but a sequence has 22" in problems[0][1]
        assert "3 lists for 2 micro-batches" in problems[1][1]


class RightInSlicesOfFive(nn.Module):
    """Add a value that depends on tokens' places in their slice, unless slices have five tokens, or all."""

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        return hidden if length in (5, 13, engines.LENGTH) else hidden + hidden.new_tensor(range(length))[:, None]


def job_verified() -> list[tuple[str, str]]:
    """Return the check's reports for lists that the layer tolerates, and for another list of the second micro-batch."""
    said: list[tuple[str, str]] = []
    for other in ([5, 5, 13], [5, 6, 12]):
        terapipe = engines.section(schedule="seq1f1b", slices=[[5, 5, 13], other, [5, 5, 13]], verify="first_batch")
        layers = engines.gpt_layers()
        layers.insert(2, RightInSlicesOfFive())
        with engines.engine_of(layers, terapipe, gradient_accumulation_steps=3) as engine:
            kind, text = engines.step_error(engine, engines.batches(1, 3)[0])
        said.append((kind, text))
    return said


def test_the_check_of_the_first_batch_takes_each_list() -> None:
    right, wrong = zip(*rank_pool(2).run(job_verified), strict=True)
    assert right == (("", ""),) * 2
    kind, text = engines.of_rank_0(list(wrong))
    assert kind == "VerifyError" and "3 slices (5 + 6 + 12)" in text and "RightInSlicesOfFive" in text
