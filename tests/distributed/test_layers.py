"""Test layers of all kinds in the engine: attention with options, carried states, experts, heads that predict ahead."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from terapipe_ds.attention.call import Call
from terapipe_ds.costs.profile import Profile
from tests.distributed import cases, engines
from tests.distributed.cases import FULL, Case, RankRecord
from tests.distributed.harness import rank_pool
from tests.distributed.training import DrawnModule, train_alone, train_case
from tests.small_models.experts import LossWithAdded, Reporting, plain_experts, with_experts, with_shares
from tests.small_models.mixers import MIXERS, OPTIONS, Ahead, AheadLoss, MixerLayer

FEW = cases.layer_cases(2)
MANY = cases.layer_cases(4) if FULL else FEW
EXPERTS = Case(slices=(7, 1, 4), mixers=("attention", "experts"), masked=True, loss_reduction="sum")
EXPERT_CASES = [
    replace(EXPERTS, stages=stages, checkpointing=checkpointing, schedule=schedule)
    for stages in (2, 3)
    for checkpointing in ("off", "reentrant", "non_reentrant")
    for schedule in ("1f1b", "seq1f1b", "seq1f1b-zb", "zbv", "chimera-seq")
    if schedule != "chimera-seq" or stages % 2 == 0
]


@functools.cache
def reference(case: Case) -> list[RankRecord]:
    return train_alone(case)


def check(case: Case, **section: Any) -> None:
    """Compare with a run without slices, pipeline or engine: loss, gradients, parameters, evaluation, to 1e-10."""
    run = rank_pool(case.world_size).run(engines.with_few_rounds, job=train_case, case=case, **section)
    alone = reference(replace(case, stages=2, schedule="seq1f1b", checkpointing="off", slices=3))
    assert cases.contract(case)["gradient"] <= 1e-10
    assert not cases.violations(cases.errors(run, alone), cases.contract(case))


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_training_and_evaluation_equal_a_plain_loop(case: Case) -> None:
    """Of rows of several documents, each document alone."""
    check(case, **({"verify": None} if FULL else {}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_experts_with_a_balance_loss_and_a_z_loss_equal_a_plain_loop(case: Case) -> None:
    """With the losses by their formulas, on whole sequences."""
    check(case, verify="first_batch")


def test_what_is_tried_is_what_there_is() -> None:
    assert tuple(MIXERS) == cases.CARRIED and tuple(OPTIONS) == cases.OPTIONS
    kinds = {kind for case in FEW for kind in case.mixers}
    assert {"+".join(cases.OPTIONS), "attention", *cases.CARRIED} <= kinds
    assert {(case.schedule, case.stages) for case in FEW} == {
        (schedule, stages) for schedule in cases.LAYER_SCHEDULES for stages in (2, 3)
    } - {("chimera-seq", 3)}  # which wants an even number


# -- experts ----------------------------------------------------------------------------------------------------


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


# -- a head that predicts further ahead ------------------------------------------------------------------------------


class DoubleAhead(Ahead):  # type: ignore[misc, valid-type]
    """In fp64, on hidden states of `engines.gpt_layers`."""

    def __init__(self, ahead: int) -> None:
        super().__init__(9, 16, engines.VOCAB_SIZE, ahead)
        self.double()


def layers_with_a_head_ahead(ahead: int) -> list[Any]:
    mixer = LayerSpec(MixerLayer, "gated_delta_rule", 3, 16, 4, torch.float64)
    return [*engines.gpt_layers()[:-2], mixer, LayerSpec(DoubleAhead, ahead)]


def errors_of(layers: Callable[[], list[Any]], terapipe: dict[str, Any], **options: Any) -> dict[str, float]:
    """Return the largest errors on this rank against the stock engine, which has one stage and so knows all losses."""
    data, options = engines.batches(2), {"module_class": DrawnModule, **options}
    stock = engines.run_training(layers, None, data, stages=1, **options)
    return engines.differences(engines.run_training(layers, terapipe, data, **options), stock)


@pytest.mark.parametrize("schedule", ["seq1f1b-zb", "zbv"])
def test_a_head_ahead_equals_the_stock_engine(schedule: str) -> None:
    """The second slice is shorter than the head looks ahead."""
    given = {"layers": functools.partial(layers_with_a_head_ahead, 3), "loss_fn": AheadLoss(3)}
    errors = rank_pool(2).run(errors_of, terapipe=engines.section(schedule=schedule, slices=[9, 2, 12]), **given)
    assert not engines.violations(errors)


# -- recomputed layers that keep their attention -----------------------------------------------------------------------


class StateAndWindow(nn.Sequential):
    """Two mixers within one checkpointed range."""

    def __init__(self) -> None:
        mixers = ("gated_delta_rule", 1), ("window", 2)
        super().__init__(*(MixerLayer(kind, index, 16, 4, torch.float64) for kind, index in mixers))


def mixed_layers() -> list[Any]:
    first, *_, norm, head = engines.gpt_layers()
    kinds = enumerate(("retention", "sinks", "gated_linear_attention", "convolution", "values"), 3)
    mixers = [LayerSpec(MixerLayer, kind, index, 16, 4, torch.float64) for index, kind in kinds]
    return [first, LayerSpec(StateAndWindow), *mixers, norm, head]


def train_mixed(**changes: Any) -> tuple[dict[str, float], list[str]]:
    """Return the errors of a training that keeps attention, and the modes in which kernels ran."""
    attend, modes = Call._attend, []  # type: ignore[var-annotated]

    def noted(self: Call, *tensors: Any) -> Any:
        modes.append(self.active.mode)
        return attend(self, *tensors)

    again = {"recompute": "full", "keep_attention": True, "slices": [9, 2, 12], "partition": [0, 4, 9]}
    with mock.patch.object(Call, "_attend", noted):
        return errors_of(mixed_layers, engines.section(**again, verify="off", **changes)), modes


@pytest.mark.parametrize("changes", [{"schedule": "seq1f1b-zb"}, {"offload_activations": True}], ids=str)
def test_kept_attention_beside_states_equals_the_stock_engine(changes: dict[str, Any]) -> None:
    ranks = rank_pool(2).run(train_mixed, **changes)
    assert not engines.violations([errors for errors, _ in ranks])
    assert all(modes and "recompute" not in modes for _, modes in ranks)


# -- measured and planned ----------------------------------------------------------------------------------------------


def layers_with_states() -> list[Any]:
    first, *_, norm, head = engines.gpt_layers()
    kinds = enumerate((*MIXERS, "window"), 10)
    mixers = [LayerSpec(MixerLayer, kind, index, 16, 4, torch.float64) for index, kind in kinds]
    return [first, *mixers, norm, head]


def test_a_measured_profile_knows_the_bytes_of_states_and_windows(tmp_path: Path) -> None:
    """Probes run slices whose prefix never ran, and leave nothing behind for the training that follows."""
    planned = engines.section(slices="auto", granularity_tokens=4, planner={"cache_dir": str(tmp_path)})
    errors = rank_pool(2).run(engines.with_few_rounds, job=errors_of, layers=layers_with_states, terapipe=planned)
    assert not engines.violations(errors)
    (file,) = tmp_path.glob("profile-*.json")
    rows, recurrent, convolution = 2, 4 * 4 * 4 * 8, 3 * 16 * 8  # bytes: heads * D * D or taps * width, in fp64
    parts = [part.memory or {} for part in Profile.load(file).parts]
    carried = [part["carried_bytes_per_slice"] for part in parts]
    assert carried == [rows * (2 * recurrent + convolution), rows * recurrent]
    keys_values = rows * 2 * 16 * 8
    names = "store_bytes_per_token", "windowed_store_bytes_per_token", "windowed_grad_bytes_per_token", "window_tokens"
    assert [[part[name] for name in names] for part in parts] == [[0] * 4, [*[keys_values] * 3, 3]]
