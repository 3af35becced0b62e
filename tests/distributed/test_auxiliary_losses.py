"""Test that experts with a balance loss and a z-loss train in slices as in a plain loop over whole sequences."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.distributed import cases, engines
from tests.distributed.cases import Case, RankRecord
from tests.distributed.harness import rank_pool
from tests.distributed.training import DrawnModule, train_alone, train_case
from tests.small_models.experts import LossWithAdded, Reporting, plain_experts, with_experts, with_shares

EXPERTS = Case(slices=(7, 1, 4), mixers=("attention", "experts"), masked=True, loss_reduction="sum")
CASES = [
    replace(EXPERTS, stages=stages, checkpointing=checkpointing, schedule=schedule)
    for stages in (2, 3)
    for checkpointing in ("off", "reentrant", "non_reentrant")
    for schedule in ("1f1b", "seq1f1b", "seq1f1b-zb", "zbv", "chimera-seq")
    if schedule != "chimera-seq" or stages % 2 == 0
]


@functools.cache
def reference() -> list[RankRecord]:
    return train_alone(EXPERTS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_and_evaluation_equal_a_plain_loop(case: Case) -> None:
    """Without slices, pipeline or engine, and with the losses by their formulas: all to 1e-10."""
    run = rank_pool(case.world_size).run(train_case, case=case, verify="first_batch")
    assert cases.contract(case)["gradient"] <= 1e-10
    assert not cases.violations(cases.errors(run, reference()), cases.contract(case))


def report_of(engine: PipelineEngine, data: list[engines.Batch]) -> tuple[engines.Run, list[dict[str, float]]]:
    run = engines.train(engine, data)
    return run, [{name: float(value) for name, value in engine.get_additional_losses().items()}]


def train_and_report() -> tuple[dict[str, float], float]:
    """Return how far a training in slices, and its report, are from the stock engine's with plain formulas."""
    data = [[(x, with_shares(labels)) for x, labels in batch] for batch in engines.batches(2)]
    results = []
    for terapipe in (None, engines.section(slices=[5, 17, 1], loss_reduction="sum")):
        layers = with_experts(engines.gpt_layers(), [2, 4], 16, torch.float64)
        options = {"loss_fn": LossWithAdded(), "module_class": DrawnReporting}
        plain = plain_experts() if terapipe is None else contextlib.nullcontext()
        with plain, engines.engine_of(layers, terapipe, **options) as engine:
            results.append(report_of(engine, data))
    (stock, expected), (ours, reported) = results
    return engines.differences(ours, stock), engines.error_of(reported, expected)


class DrawnReporting(DrawnModule, Reporting):  # type: ignore[misc, valid-type]
    """Reports both losses, and starts from weights that do not depend on the stages."""


def test_both_losses_are_reported_as_by_the_stock_engine() -> None:
    for errors, error in rank_pool(2).run(train_and_report):
        assert not engines.violations([errors]) and error <= engines.FP32_SCALAR
