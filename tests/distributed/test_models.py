"""Test models that hand tuples on, freeze layers, bring their own loss, or checkpoint, against the stock engine."""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from terapipe_ds.models import gpt
from terapipe_ds.runtime.verify.loss import LossCheck
from tests.distributed.engines import (
    CHECKPOINTING,
    EXACT,
    FP32_SCALAR,
    IGNORE_INDEX,
    SMALL_STEPS,
    MicroBatch,
    Run,
    batches,
    both,
    differences,
    engine_of,
    error_of,
    fp32_layers,
    gpt_layers,
    micro_batch,
    raised_by,
    run_training,
    section,
    train,
    violations,
)
from tests.distributed.harness import rank_pool
from tests.distributed.training import loss_function
from tests.small_models import tuples

UNEVEN = [5, 17, 1]
Errors = dict[str, float]


@dataclass(frozen=True)
class Model:
    """Describe the model that both engines train."""

    layers: Callable[[], Sequence[Any]] = gpt_layers
    make: Callable[[int], MicroBatch] = micro_batch
    terapipe: dict[str, Any] = field(default_factory=dict)
    loss_fn: Any = gpt.gpt_loss
    stages: int = 2
    stock_stages: int = 2  # 1 where the stock engine cannot send what the layers hand on
    stock_loss_fn: Any = None  # where it is not `loss_fn`
    kinds: Sequence[str] = ("off",)  # of checkpointing, by our engine
    evaluated: bool = False  # before the training


def _transposed_layers() -> list[LayerSpec]:
    return [LayerSpec(tuples.Transposed, layer) for layer in gpt_layers()]


def _transposed(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return tokens.T.contiguous(), labels.T.contiguous()


def _first_without_labels(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed)
    return tokens, labels if seed else labels.fill_(IGNORE_INDEX)


REMEMBERED = functools.partial(tuples.guided_micro_batch, memory=True)
GUESSED = "a memory of the labels' length that is cut like tokens"
MODELS = {
    "one tensor twice, and detached": Model(tuples.doubling_layers, stock_stages=1, kinds=tuple(CHECKPOINTING)),
    "a number that every layer adds to": Model(
        tuples.summing_layers,
        functools.partial(micro_batch, masked=False),
        {"loss_reduction": "mean"},
        tuples.summed_loss,
        kinds=tuple(CHECKPOINTING),
        evaluated=True,
    ),
    "passengers of all kinds, through a middle stage": Model(
        tuples.guided_layers,
        tuples.guided_micro_batch,
        stages=3,
        stock_stages=1,
        kinds=tuple(CHECKPOINTING),
    ),
    "sliced_inputs says what is sliced": Model(
        tuples.guided_layers, REMEMBERED, {"sliced_inputs": [0, 1], "verify": "off"}, stock_stages=1
    ),
    GUESSED: Model(tuples.guided_layers, REMEMBERED, {"verify": "off"}, stock_stages=1),
    "a second float that the last stage leaves unused": Model(  # its gradient is sent as zeros
        tuples.scaled_layers, stock_stages=1, kinds=tuple(CHECKPOINTING)
    ),
    **{
        f"frozen {kind}": Model(functools.partial(tuples.frozen_layers, kind), stock_stages=1)
        for kind in ("all but the scale", "whole stage")
    },
    "another sequence_dim": Model(
        _transposed_layers, _transposed, {"slices": [2, 20, 1], "sequence_dim": 0}, stock_stages=1, evaluated=True
    ),
    "a first label without a sequence": Model(
        make=tuples.weighted_rows_micro_batch,
        terapipe={"loss_reduction": "mean"},
        loss_fn=tuples.WeightedRows(),
    ),
    "a loss that needs contiguous labels": Model(terapipe={"slices": 3}, loss_fn=tuples.viewing_loss),
    "a micro-batch without labels": Model(make=_first_without_labels, stock_loss_fn=tuples.patient_loss),
}


def job_model(name: str) -> dict[str, Errors]:
    """Return the differences of a training, and of an evaluation before it, for each kind of checkpointing."""
    model = MODELS[name]
    data = [[model.make(100 * step + index) for index in range(2)] for step in range(2)]

    def run(engine: PipelineEngine) -> tuple[Run, Any]:
        evaluated = None
        if model.evaluated:
            evaluated = engine.eval_batch(iter(data[0]), return_logits=True, bcast_loss=False)
        return train(engine, data), evaluated if engine.is_last_stage() else None

    found = {}
    with engine_of(
        model.layers(), None, stages=model.stock_stages, loss_fn=model.stock_loss_fn or model.loss_fn
    ) as engine:
        stock, expected = run(engine)
    for kind in model.kinds:
        terapipe = section(**{"slices": UNEVEN, **model.terapipe})
        options = {"stages": model.stages, "loss_fn": model.loss_fn, **CHECKPOINTING[kind]}
        with engine_of(model.layers(), terapipe, **options) as engine:
            ours, evaluated = run(engine)
        found[kind] = differences(ours, stock) | {
            "evaluation": 0.0 if evaluated is None else error_of(evaluated, expected)
        }
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in MODELS if name != GUESSED])
def test_a_model_trains_as_by_the_stock_engine(name: str) -> None:
    results = rank_pool(MODELS[name].stages).run(job_model, name=name)
    for kind in MODELS[name].kinds:
        assert violations([rank[kind] for rank in results]) == {}, kind


def test_without_sliced_inputs_the_size_decides() -> None:
    """Layers need the whole memory with each slice, so that cutting it shows."""
    assert min(rank["off"]["gradient"] for rank in rank_pool(2).run(job_model, name=GUESSED)) > 1e-3


# -- losses that the module reports --------------------------------------------------------------------------


def job_additional_losses() -> tuple[Errors, float, list[str]]:
    """Train with a first slice that has no label at all, so that its losses cannot be computed."""
    data = batches(2)
    for _, labels in itertools.chain(*data):
        labels[:, :6] = IGNORE_INDEX

    def run(engine: PipelineEngine) -> tuple[Run, list[dict[str, float]]]:
        reported, run = [], Run()
        for batch in data:
            run = train(engine, [batch])
            reported.append({name: float(value) for name, value in engine.get_additional_losses().items()})
        return run, reported

    (stock, stock_reported), (ours, reported) = both(
        run, terapipe=section(slices=UNEVEN), module_class=tuples.ReportingModule
    )
    return differences(ours, stock), error_of(reported, stock_reported), list(reported[0])


def test_additional_losses_are_reported() -> None:
    errors, reported, names = zip(*rank_pool(2).run(job_additional_losses), strict=True)
    assert violations(errors) == {}
    assert reported[0] <= FP32_SCALAR and reported[1] <= EXACT
    assert names == (["language", "size"],) * 2


REPORTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_valid": lambda each, valid: each[valid].mean(),
    "mean": lambda each, valid: each.mean(),
    "sum": lambda each, valid: each.sum() / 16,
    "largest": lambda each, valid: each.max(),
}


class AlsoReports(PipelineModule):
    """Reports a number about all logits beside the loss."""

    def __init__(self, *args: Any, reduction: str, report: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reported, self.reduction, self.report = torch.tensor(float("nan")), reduction, report
        self.loss_fn = self.loss

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.report != "of a layer":
            each = logits.detach().logsumexp(-1).square()
            self.reported = REPORTS[self.report](each, labels != IGNORE_INDEX)
        return loss_function(self.reduction)(logits, labels)

    def forward(self, forward_input: Any) -> Any:
        outputs = super().forward(forward_input)
        if self.report == "of a layer" and self.is_last_stage():
            self.reported = outputs.detach().square().max()
        return outputs

    def is_last_stage(self) -> bool:
        return bool(self.stage_id == self.num_stages - 1)

    def get_additional_losses(self) -> dict[str, Tensor]:
        return {"size": self.reported}


def job_report(reduction: str, report: str) -> tuple[float, str, float]:
    """Return how far the report is from the stock engine's; else the refusal, and how far it is where it is ignored."""
    data = batches(2)

    def run(engine: PipelineEngine) -> list[float]:
        reported = []
        for batch in data:
            engine.train_batch(iter(batch))
            reported.append(float(engine.get_additional_losses()["size"]))
        return reported

    def reported(terapipe: dict[str, Any] | None) -> list[float]:
        module = {"reduction": reduction, "report": report}
        with engine_of(gpt_layers(), terapipe, module_class=AlsoReports, module=module) as engine:
            return run(engine)

    stock, terapipe = reported(None), section(slices=UNEVEN, loss_reduction=reduction)
    refusal = raised_by(lambda: reported(terapipe))[1]
    with mock.patch.object(LossCheck, "_problem_of_reports", lambda *args: None) if refusal else nullcontext():
        return error_of(reported(terapipe), stock), refusal


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("reduction", "report"),
    [(a, b) for a in ("mean_valid", "mean", "sum") for b in (*REPORTS, "of a layer")],
)
def test_a_report_is_right_or_refused(reduction: str, report: str) -> None:
    """Check that a report reduced like the loss equals the stock engine's; else training in slices does not start."""
    for error, refusal in rank_pool(2).run(job_report, reduction=reduction, report=report):
        if reduction == report:
            assert error <= FP32_SCALAR and not refusal
        else:
            assert error > 1e-3, "nothing would be wrong"
            assert "get_additional_losses() reports 'size'" in refusal and "loss_fn" in refusal


# -- recomputation under autocast ----------------------------------------------------------------------------


def job_checkpointing_and_autocast() -> tuple[dict[str, Errors], list[Errors]]:
    """Compare each kind of checkpointing with none, and this and the stock engine's one with fp32."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "optimizer": SMALL_STEPS}
    options = {**autocast, **CHECKPOINTING["reentrant"], "module": {"checkpointable_layers": ["DecoderLayer"]}}
    run = functools.partial(run_training, fp32_layers, data=batches(2))
    exact, plain = run(terapipe=None, optimizer=SMALL_STEPS), run(terapipe=section(), **autocast)
    kinds = {
        kind: differences(run(terapipe=section(), **autocast, **CHECKPOINTING[kind]), plain)
        for kind in ("reentrant", "non_reentrant")
    }
    return kinds, [differences(run(terapipe=terapipe, **options), exact) for terapipe in (section(), None)]


def test_a_forward_under_autocast_is_recomputed_under_it() -> None:
    for kinds, (ours, stock) in rank_pool(2).run(job_checkpointing_and_autocast):
        assert {kind: errors for kind, errors in kinds.items() if max(errors.values()) > 0.0} == {}
        for name in ("returned", "gradient", "parameter"):
            assert 0 < ours[name] <= 2 * stock[name] + 1e-3
