"""Test models that hand tuples on, freeze layers, bring their own loss, or checkpoint, against the stock engine."""

import contextlib
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
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.verify.loss import LossCheck
from tests.distributed import engines
from tests.distributed.harness import RankFailure, RankPool, rank_pool
from tests.distributed.training import loss_function
from tests.small_models import tuples
from tests.small_models.parts import Embedding, Head, Mlp
from tests.zoo.attentions import SLICED

UNEVEN = [5, 17, 1]
Errors = dict[str, float]


@dataclass(frozen=True)
class Model:
    """Describe the model that both engines train."""

    layers: Callable[[], Sequence[Any]] = engines.gpt_layers
    make: Callable[[int], engines.MicroBatch] = engines.micro_batch
    terapipe: dict[str, Any] = field(default_factory=dict)
    loss_fn: Any = gpt.gpt_loss
    stages: int = 2
    stock_stages: int = 2  # 1 where the stock engine cannot send what the layers hand on
    stock_loss_fn: Any = None  # where it is not `loss_fn`
    kinds: Sequence[str] = ("off",)  # of checkpointing, by our engine
    evaluated: bool = False  # before the training


def _transposed_layers() -> list[LayerSpec]:
    return [LayerSpec(tuples.Transposed, layer) for layer in engines.gpt_layers()]


def _transposed(seed: int) -> engines.MicroBatch:
    tokens, labels = engines.micro_batch(seed)
    return tokens.T.contiguous(), labels.T.contiguous()


def _first_without_labels(seed: int) -> engines.MicroBatch:
    tokens, labels = engines.micro_batch(seed)
    return tokens, labels if seed else labels.fill_(engines.IGNORE_INDEX)


def _with_memory(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.tanh()


def _detaching(inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Let the memory get the gradient of its first use alone."""
    x, memory = inputs
    first = memory * 2.0
    memory.detach_()
    return x * memory.sigmoid() + first


REMEMBERED = functools.partial(tuples.guided_micro_batch, memory=True)
GUESSED = "a memory of the labels' length that is cut like tokens"
MODELS = {
    "one tensor twice, and detached": Model(tuples.doubling_layers, stock_stages=1, kinds=tuple(engines.CHECKPOINTING)),
    "a number that every layer adds to": Model(
        tuples.summing_layers,
        functools.partial(engines.micro_batch, masked=False),
        {"loss_reduction": "mean"},
        tuples.summed_loss,
        kinds=tuple(engines.CHECKPOINTING),
        evaluated=True,
    ),
    "passengers of all kinds, through a middle stage": Model(
        tuples.guided_layers,
        tuples.guided_micro_batch,
        stages=3,
        stock_stages=1,
        kinds=tuple(engines.CHECKPOINTING),
    ),
    "sliced_inputs says what is sliced": Model(
        tuples.guided_layers, REMEMBERED, {"sliced_inputs": [0, 1], "verify": "off"}, stock_stages=1
    ),
    GUESSED: Model(tuples.guided_layers, REMEMBERED, {"verify": "off"}, stock_stages=1),
    "a second float that the last stage leaves unused": Model(  # its gradient is sent as zeros
        tuples.scaled_layers, stock_stages=1, kinds=tuple(engines.CHECKPOINTING)
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
    "a memory that is detached in place": Model(
        lambda: [LayerSpec(Embedding), SLICED, _with_memory, _detaching, LayerSpec(Mlp), LayerSpec(Head)],
        stock_stages=1,
    ),
    "a loss that needs contiguous labels": Model(terapipe={"slices": 3}, loss_fn=tuples.viewing_loss),
    "a micro-batch without labels": Model(make=_first_without_labels, stock_loss_fn=tuples.patient_loss),
}


def job_model(name: str) -> dict[str, Errors]:
    """Return the differences of a training, and of an evaluation before it, for each kind of checkpointing."""
    model = MODELS[name]
    data = [[model.make(100 * step + index) for index in range(2)] for step in range(2)]

    def run(engine: PipelineEngine) -> tuple[engines.Run, Any]:
        evaluated = None
        if model.evaluated:
            evaluated = engine.eval_batch(iter(data[0]), return_logits=True, bcast_loss=False)
        return engines.train(engine, data), evaluated if engine.is_last_stage() else None

    found = {}
    with engines.engine_of(
        model.layers(), None, stages=model.stock_stages, loss_fn=model.stock_loss_fn or model.loss_fn
    ) as engine:
        stock, expected = run(engine)
    for kind in model.kinds:
        check = {"verify": "off"} if found else {}  # the check of the first batch looks at the layers once
        terapipe = engines.section(**{"slices": UNEVEN, **check, **model.terapipe})
        options = {"stages": model.stages, "loss_fn": model.loss_fn, **engines.CHECKPOINTING[kind]}
        with engines.engine_of(model.layers(), terapipe, **options) as engine:
            ours, evaluated = run(engine)
        found[kind] = engines.differences(ours, stock) | {
            "evaluation": 0.0 if evaluated is None else engines.error_of(evaluated, expected)
        }
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in MODELS if name != GUESSED])
def test_a_model_trains_as_by_the_stock_engine(name: str) -> None:
    results = rank_pool(MODELS[name].stages).run(job_model, name=name)
    for kind in MODELS[name].kinds:
        assert engines.violations([rank[kind] for rank in results]) == {}, kind


def test_without_sliced_inputs_the_size_decides() -> None:
    """Layers need the whole memory with each slice, so that cutting it shows."""
    assert min(rank["off"]["gradient"] for rank in rank_pool(2).run(job_model, name=GUESSED)) > 1e-3


# -- losses that the module reports --------------------------------------------------------------------------


def job_additional_losses() -> tuple[Errors, float, list[str]]:
    """Train with a first slice that has no label at all, so that its losses cannot be computed."""
    data = engines.batches(2)
    for _, labels in itertools.chain(*data):
        labels[:, :6] = engines.IGNORE_INDEX

    def run(engine: PipelineEngine) -> tuple[engines.Run, list[dict[str, float]]]:
        reported, run = [], engines.Run()
        for batch in data:
            run = engines.train(engine, [batch])
            reported.append({name: float(value) for name, value in engine.get_additional_losses().items()})
        return run, reported

    (stock, stock_reported), (ours, reported) = engines.both(
        run, terapipe=engines.section(slices=UNEVEN), module_class=tuples.ReportingModule
    )
    return engines.differences(ours, stock), engines.error_of(reported, stock_reported), list(reported[0])


def test_additional_losses_are_reported() -> None:
    errors, reported, names = zip(*rank_pool(2).run(job_additional_losses), strict=True)
    assert engines.violations(errors) == {}
    assert reported[0] <= engines.FP32_SCALAR and reported[1] <= engines.EXACT
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
            self.reported = REPORTS[self.report](each, labels != engines.IGNORE_INDEX)
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
    data = engines.batches(2)

    def run(engine: PipelineEngine) -> list[float]:
        reported = []
        for batch in data:
            engine.train_batch(iter(batch))
            reported.append(float(engine.get_additional_losses()["size"]))
        return reported

    def reported(terapipe: dict[str, Any] | None) -> list[float]:
        module = {"reduction": reduction, "report": report}
        with engines.engine_of(engines.gpt_layers(), terapipe, module_class=AlsoReports, module=module) as engine:
            return run(engine)

    stock, terapipe = reported(None), engines.section(slices=UNEVEN, loss_reduction=reduction)
    refusal = engines.raised_by(lambda: reported(terapipe))[1]
    with mock.patch.object(LossCheck, "_problem_of_reports", lambda *args: None) if refusal else nullcontext():
        return engines.error_of(reported(terapipe), stock), refusal


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("reduction", "report"),
    [(a, b) for a in ("mean_valid", "mean", "sum") for b in (*REPORTS, "of a layer")],
)
def test_a_report_is_right_or_refused(reduction: str, report: str) -> None:
    """Check that a report reduced like the loss equals the stock engine's; else training in slices does not start."""
    errors, refusals = zip(*rank_pool(2).run(job_report, reduction=reduction, report=report), strict=True)
    if reduction == report:
        assert max(errors) <= engines.FP32_SCALAR and not any(refusals)
    else:
        assert min(errors) > 1e-3, "nothing would be wrong"
        assert "get_additional_losses() reports 'size'" in refusals[0] and "loss_fn" in refusals[0]
        assert "first in loss_fn; the error of rank 0" in refusals[1]


# -- recomputation under autocast ----------------------------------------------------------------------------


def job_checkpointing_and_autocast() -> tuple[dict[str, Errors], list[Errors]]:
    """Compare each kind of checkpointing with none, and this and the stock engine's one with fp32."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "optimizer": engines.SMALL_STEPS}
    options = {**autocast, **engines.CHECKPOINTING["reentrant"], "module": {"checkpointable_layers": ["DecoderLayer"]}}
    run = functools.partial(engines.run_training, engines.fp32_layers, data=engines.batches(2))
    exact, plain = run(terapipe=None, optimizer=engines.SMALL_STEPS), run(terapipe=engines.section(), **autocast)
    again = {
        "reentrant": run(terapipe=engines.section(), **options),
        "non_reentrant": run(terapipe=engines.section(), **autocast, **engines.CHECKPOINTING["non_reentrant"]),
    }
    stock = run(terapipe=None, **options)
    kinds = {kind: engines.differences(ours, plain) for kind, ours in again.items()}
    return kinds, [engines.differences(each, exact) for each in (again["reentrant"], stock)]


def test_a_forward_under_autocast_is_recomputed_under_it() -> None:
    for kinds, (ours, stock) in rank_pool(2).run(job_checkpointing_and_autocast):
        assert {kind: errors for kind, errors in kinds.items() if max(errors.values()) > 0.0} == {}
        for name in ("returned", "gradient", "parameter"):
            assert 0 < ours[name] <= 2 * stock[name] + 1e-3


# -- inputs that layers get themselves, or a copy if they work in place on them --------------------------------


PLAN = engines.section(slices=[8, 9, 6])


class Scaled(nn.Module):
    """The first layer of stage 1: a product, in place or not."""

    writes = False
    writes_later = False  # from the second slice on, as to add a state
    detaches = False
    was_handed: list[bool] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            Scaled.was_handed.append(hidden.is_leaf and hidden.requires_grad)
        if Scaled.detaches:
            return hidden * 1.5 + hidden.detach_()
        active = active_slice()
        has_state = Scaled.writes_later and active is not None and active.start > 0
        return hidden.mul_(1.5) if Scaled.writes or has_state else hidden * 1.5


def layers() -> list[Any]:
    """0 embedding, 1 to 3 decoder | 4 `Scaled`, 5 decoder, 6 norm, 7 head."""
    embedding, *decoder, norm, head = engines.gpt_layers()
    return [embedding, *decoder[:3], LayerSpec(Scaled), *decoder[3:], norm, head]


@functools.cache
def stock_of_scaled(writes: bool) -> engines.Run:
    assert Scaled.writes == writes
    return engines.run_training(layers, None, engines.batches(2), stages=1)


def job_train(writes: bool, terapipe: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, float], list[bool]]:
    """Return the errors against the stock engine with one stage, and whether each forward got the leaf."""
    Scaled.writes = writes
    stock = stock_of_scaled(writes)
    Scaled.was_handed = []
    with engines.engine_of(layers(), terapipe, **options) as engine:
        ours, handed = engines.train(engine, engines.batches(2)), Scaled.was_handed
        Scaled.was_handed = []
        return engines.differences(ours, stock), handed


def job_write_later(how: str) -> None:
    Scaled.writes = False
    with engines.engine_of(layers(), PLAN) as engine:
        engines.train(engine, engines.batches(1))
        setattr(Scaled, how, True)
        engines.train(engine, engines.batches(1))


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slices": ({}, {}),
    "W apart": ({"schedule": "seq1f1b-zb"}, {}),
    "recomputed": ({}, {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}),
    "reentrant": ({}, {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("writes", [False, True])
def test_training_equals_the_stock_engine(writes: bool, name: str) -> None:
    """In place or not: the first micro-batch of a stage runs on copies, and later ones too where it was written to."""
    changes, options = SETTINGS[name]
    ranks = rank_pool(2).run(job_train, writes=writes, terapipe={**PLAN, **changes}, options=options)
    assert not engines.violations([errors for errors, _ in ranks])
    handed = ranks[1][1]
    assert len(handed) >= 12 and not any(handed[:3])
    if name in ("slices", "W apart"):  # behind the runs of the check of the first batch
        assert handed[-12:] == [False] * 3 + [not writes] * 9


def double_in_place(layer: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].mul_(2.0)


def job_later(change: str) -> dict[str, float]:
    """Train batches in which no layer works in place, and others in which it does; return the errors."""
    Scaled.writes, Scaled.writes_later = False, change == "slices"
    hooks: list[Any] = []

    def before_step(engine: Any, step: int) -> None:
        while hooks:
            hooks.pop().remove()
        if change == "slices" and isinstance(engine, TeraPipeEngine):
            engine.use_slice_plan(SlicePlan((8, 9, 6) if step else (23,)))
        is_hooked = {"hook": step > 0, "hook in turns": step % 2 == 0}.get(change)
        for layer in engine.module.modules() if is_hooked else ():
            if isinstance(layer, Scaled):
                hooks.append(layer.register_forward_pre_hook(double_in_place))

    data = engines.batches(3)
    ours, stock = (
        engines.run_training(layers, terapipe, data, before_step=before_step, stages=stages)
        for terapipe, stages in ((PLAN, 2), (None, 1))
    )
    Scaled.writes_later = False
    return engines.differences(ours, stock)


@pytest.mark.parametrize("change", ["slices", "hook", "hook in turns"])
def test_a_layer_that_works_in_place_in_some_batches_gets_copies(change: str) -> None:
    """Because sequences are first cut in the second batch, or because a program adds or removes a hook."""
    assert not engines.violations(rank_pool(2).run(job_later, change=change))


@pytest.mark.parametrize("how", ["writes", "detaches"])
def test_a_layer_that_begins_to_work_in_place_ends_the_job_with_the_cause(how: str) -> None:
    with contextlib.closing(RankPool(2)) as pool, pytest.raises(RankFailure) as raised:  # its ranks end
        pool.run(job_write_later, how=how)
    said = str(raised.value)
    for rank in (0, 1):
        assert f"rank {rank} (stage {rank}) ends" in said
    assert "WrittenInputError: a layer changes its input in place" in said
    assert "change a copy in the layer (inputs = inputs.clone())" in said
