"""Test that content of a `PipelineModule` outside its layers trains as in one stage, is saved, or refused by name."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

import terapipe_ds
from terapipe_ds.models.gpt import gpt_loss
from tests.distributed import engines
from tests.distributed.checkpoint_states import states_of
from tests.distributed.harness import rank_pool

# with a loss of one's own the first batch would have the layers checked in each test
PLAIN, BOTH_WAYS = engines.unchecked(), engines.unchecked(schedule="chimera-seq")


class Temperature(nn.Module):
    """Compute a loss with a learned temperature, drawn differently on each rank, and frozen class weights."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__()
        self.log_t = nn.Parameter(torch.full((1,), 0.1 * torch.distributed.get_rank(), dtype=getattr(torch, dtype)))
        self.shift = nn.Parameter(torch.zeros_like(self.log_t), requires_grad=False)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return gpt_loss(logits * self.log_t.exp() + self.shift, labels)


class OnOneRank(Temperature):
    """Use the temperature that the last stage of `Temperature` has."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__(dtype)
        nn.init.constant_(self.log_t, 0.1)


# -- training ------------------------------------------------------------------------------------------------

TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seq1f1b": (engines.section(), {}),
    "seq1f1b-zb": ({**PLAIN, "schedule": "seq1f1b-zb"}, {}),
    "interleaved": ({**PLAIN, "schedule": "seq1f1b-interleaved", "chunks_per_stage": 2}, {}),
    "chimera": (engines.section(schedule="chimera", slices=1), {}),
    "chimera-seq": ({**BOTH_WAYS, "verify": None}, {}),
    "chimera-seq, clipped": (BOTH_WAYS, {"gradient_clipping": 0.05}),
    "chimera-seq, ZeRO": (BOTH_WAYS, engines.ZERO1),
}


def job_trained(names: list[str], loss: type[nn.Module] = Temperature) -> dict[str, dict[str, float]]:
    found = {}
    for name in names:
        terapipe, options = TRAINED[name]
        options = {**options, "optimizer": engines.SMALL_STEPS} if options else {}
        dtype = "float32" if "zero_optimization" in options else "float64"
        layers, alone = functools.partial(engines.gpt_layers, dtype), stock_run(name if options else "", dtype)
        ours = engines.run_training(layers, terapipe, engines.batches(2), loss_fn=loss(dtype), **options)
        found[name] = engines.differences(ours, alone)
        assert any("loss_fn.log_t" in gradients for gradients in alone.gradients)
    return found


@functools.cache
def stock_run(name: str, dtype: str) -> engines.Run:
    """Train by one stage of the stock engine, with the options of a case, or with none for all that have none."""
    options = {**TRAINED[name][1], "optimizer": engines.SMALL_STEPS} if name else {}
    layers = functools.partial(engines.gpt_layers, dtype)
    return engines.run_training(layers, None, engines.batches(2), loss_fn=OnOneRank(dtype), stages=1, **options)


# in bf16 DeepSpeed's own engine trains a loss only with this option
IMMEDIATE = {"enabled": True, "immediate_grad_update": True}


def job_trained_in_bf16(bf16: dict[str, Any]) -> dict[str, list[float]]:
    """Return the temperature after each of two steps: the stock engine's, then ours."""
    ours = {name: temperatures(name, 2, **bf16) for name in ("seq1f1b", "chimera-seq")}
    return {"stock": temperatures("", 1, **IMMEDIATE), **ours}


@functools.cache
def temperatures(name: str, stages: int, **bf16: bool) -> list[float]:
    loss, terapipe = OnOneRank("float32"), TRAINED[name][0] if name else None
    layers = engines.gpt_layers("float32")
    with engines.engine_of(layers, terapipe, stages=stages, loss_fn=loss, bf16=bf16) as engine:
        return [float(loss.log_t) for _ in range(2) if engines.train(engine, engines.batches(1))]


class TestLossParameters:
    def test_they_train_as_in_one_stage_under_every_schedule(self) -> None:
        self.compare([name for name in TRAINED if "ZeRO" not in name], 2, Temperature)

    def test_of_replicas_that_share_states(self) -> None:
        self.compare(["seq1f1b", "chimera-seq, ZeRO"], 4, OnOneRank)

    def compare(self, names: list[str], ranks: int, loss: type[nn.Module]) -> None:
        found = rank_pool(ranks).run(job_trained, names=names, loss=loss)
        for name in names:
            limit = 1e-5 if "ZeRO" in name else 1e-6 if "clipped" in name else 1e-10  # fp32, DeepSpeed's norm in fp32
            assert engines.violations([rank[name] for rank in found], limit) == {}, name

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("bf16", [{"enabled": True}, IMMEDIATE])
    def test_in_bf16(self, bf16: dict[str, Any]) -> None:
        """Without the option the stock engine clears the gradients of the loss in each backward."""
        of_ranks = rank_pool(2).run(job_trained_in_bf16, bf16=bf16)
        for name in ("seq1f1b", "chimera-seq"):
            (ours,) = {tuple(rank[name]) for rank in (of_ranks if name == "chimera-seq" else of_ranks[1:])}
            assert len(set(ours)) == 2 and ours == pytest.approx(of_ranks[0]["stock"], abs=2**-10)  # two roundings


# -- checkpoints ---------------------------------------------------------------------------------------------


def job_resumed(terapipe: dict[str, Any], folder: str, **options: Any) -> dict[str, Any]:
    dtype = "float32" if options else "float64"
    with engines.engine_of(engines.gpt_layers(dtype), terapipe, loss_fn=Temperature(dtype), **options) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder, exclude_frozen_parameters=False)
        saved, expected = states_with_loss(engine), engines.train(engine, engines.batches(2, first_seed=70)).returned
    with engines.engine_of(engines.gpt_layers(dtype), terapipe, loss_fn=Temperature(dtype), **options) as engine:
        engines.train(engine, engines.batches(1, first_seed=900))
        engine.load_checkpoint(folder)
        error, losses = (
            engines.error_of(states_with_loss(engine), saved),
            engines.train(engine, engines.batches(2, first_seed=70)).returned,
        )
    with engines.engine_of(engines.gpt_layers(dtype), PLAIN, loss_fn=Temperature(dtype), **options) as engine:
        other = engines.raised_by(lambda: engine.load_checkpoint(folder))[1]
        engine.load_checkpoint(folder, load_module_only=True)
        value = float(engine.module.loss_fn.log_t)
    return {"error": error, "losses": [losses, expected], "other": other, "value": value, "saved": saved}


def states_with_loss(engine: Any) -> dict[str, Any]:
    """Return states of trained parameters; the copy of a loss that computes nothing has no moments."""
    untrained = {name for name, each in engine.module.named_parameters() if not each.requires_grad}
    if engine.stage_id not in engine._layout.stages_with_end(first=False):
        untrained |= {f"loss_fn.{name}" for name, _ in engine.module.loss_fn.named_parameters()}
    for name, each in engine.module.named_parameters():
        if name not in untrained and not hasattr(each, "_hp_mapping"):
            assert engine.optimizer.state[each], name
    return {name: state for name, state in states_of(engine).items() if name not in untrained}


def job_without_loss(folder: str) -> list[Any]:
    """Load a checkpoint of the stock engine, which has no values of a loss."""
    with engines.engine_of(engines.gpt_layers(), None, loss_fn=Temperature()) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with engines.engine_of(engines.gpt_layers(), engines.section(), loss_fn=Temperature()) as engine:
        strict = engines.raised_by(lambda: engine.load_checkpoint(folder))
        engine.load_checkpoint(folder, load_module_strict=False)
        return [*strict, float(engine.module.loss_fn.log_t)]


class TestCheckpoints:
    @pytest.mark.parametrize(("system", "zero"), [(PLAIN, {}), (BOTH_WAYS, {}), (BOTH_WAYS, engines.ZERO1)])
    def test_a_resume_has_the_loss_bit_by_bit(self, system: Any, zero: dict[str, Any], tmp_path: Path) -> None:
        for rank in rank_pool(2).run(job_resumed, terapipe=system, folder=str(tmp_path), **zero):
            assert rank["error"] == 0.0
            assert rank["losses"][0] == rank["losses"][1]
            trained = rank["saved"].get("loss_fn.log_t", {"value": rank["value"]})["value"]
            assert rank["value"] == float(trained) != 0.1
            if system is BOTH_WAYS:
                assert "loss_fn.log_t is no parameter of a layer" in rank["other"]

    def test_one_without_the_loss_is_refused_by_name(self, tmp_path: Path) -> None:
        for index, rank in enumerate(rank_pool(2).run(job_without_loss, folder=str(tmp_path))):
            kind, text, value = rank
            assert kind == "CheckpointError" and "loss_fn.log_t" in text and "load_module_strict=False" in text
            assert value == pytest.approx(0.1 * index)


# -- what is refused -----------------------------------------------------------------------------------------

COUNTED = {"calls": 0}


class Keeping(nn.Module):
    """Compute a loss, and keep something."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.keep, self.calls, self.seen, self.name, self.table = keep, 0, [], "", {}
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("constant", torch.full((1,), float("nan")))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.keep(self)
        return gpt_loss(logits, labels)


def count_globally(_: Any) -> None:
    COUNTED["calls"] += 1


def loss_that_counts(logits: Tensor, labels: Tensor) -> Tensor:
    COUNTED["calls"] += 1
    return gpt_loss(logits, labels)


KEPT: dict[str, Any] = {
    "nothing": Keeping(lambda it: None),
    "loss_fn.calls": Keeping(lambda it: setattr(it, "calls", it.calls + 1)),
    "loss_fn.seen": Keeping(lambda it: it.seen.append(1)),
    "loss_fn.name": Keeping(lambda it: setattr(it, "name", "seen")),
    "loss_fn.table.first": Keeping(lambda it: it.table.setdefault("first", 1)),
    "loss_fn.mean": Keeping(lambda it: it.mean.add_(1)),
    "global variable COUNTED": loss_that_counts,
}


def keep_all_but_a_buffer(it: Any) -> None:
    for name, loss_fn in KEPT.items():
        if isinstance(loss_fn, Keeping) and name != "loss_fn.mean":
            loss_fn.keep(it)
    count_globally(it)


TOGETHER = {"all others": Keeping(keep_all_but_a_buffer), "loss_fn.mean": KEPT["loss_fn.mean"]}


REPORTED = Keeping(lambda it: setattr(it, "reported", torch.ones(())))


class Scaled(PipelineModule):
    """Scale the last stage's output by a number of the module's own, and count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.unused = nn.Linear(2, 2).double()  # which has no gradient and is none of our business
        self.calls = 0

    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        return (
            super().forward(inputs) * self.scale
            if self._local_stop == len(self._layer_specs)
            else super().forward(inputs)
        )


class Counting(Scaled):
    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        return PipelineModule.forward(self, inputs)


class Reporting(PipelineModule):
    """Read after each call the values that the loss keeps."""

    def get_additional_losses(self) -> dict[str, Tensor]:
        return {"mean": self.loss_fn.reported}


def job_refused(terapipe: dict[str, Any], one_by_one: bool) -> dict[str, str]:
    found = {}
    for name, loss_fn in (KEPT if one_by_one else TOGETHER).items():
        with engines.engine_of(engines.gpt_layers(), terapipe, loss_fn=loss_fn) as engine:
            found[name] = engines.step_error(engine)[1]
    with engines.engine_of(engines.gpt_layers(), terapipe, loss_fn=REPORTED, module_class=Reporting) as engine:
        found["reported"] = engines.step_error(engine)[1]
    for kind in (Scaled, Counting):
        with engines.engine_of(engines.gpt_layers(), terapipe, module_class=kind) as engine:
            found[kind.__name__] = engines.step_error(engine)[1]
    return found


def job_cut_later() -> list[str]:
    terapipe = engines.unchecked(slices=1)
    with engines.engine_of(engines.gpt_layers(), terapipe, loss_fn=KEPT["loss_fn.mean"]) as engine:
        whole = engines.step_error(engine)[1]
        engine.use_slice_plan(terapipe_ds.SlicePlan((11, 12)))
        return [whole, engines.step_error(engine)[1]]


class TestRefused:
    def test_a_buffer_of_the_loss_with_slices_that_are_set_later(self) -> None:
        for whole, cut in rank_pool(2).run(job_cut_later):
            assert whole == "" and "loss_fn.mean: a buffer outside the layers changes" in cut

    def test_what_a_loss_keeps_under_chimera(self) -> None:
        for found in rank_pool(2).run(job_refused, terapipe=BOTH_WAYS, one_by_one=True):
            assert found.pop("nothing") == found.pop("reported") == ""
            assert "scale: a parameter of the PipelineModule that is in no layer" in found.pop("Scaled")
            assert "calls: state outside the layers" in found.pop("Counting")
            assert [name for name, text in found.items() if name not in text] == []

    def test_of_other_schedules_parameters_and_buffers_alone(self) -> None:
        for found in rank_pool(2).run(job_refused, terapipe=PLAIN, one_by_one=False):
            assert "loss_fn.mean: a buffer outside the layers changes" in found.pop("loss_fn.mean")
            assert "scale: a parameter of the PipelineModule" in found.pop("Scaled")
            assert set(found.values()) == {""}


# -- parameters that reach the optimizer by hand --------------------------------------------------------------


def job_by_hand(ways: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each way to train the weights of a loss *function* raises."""
    inner = Temperature()
    model = engines.pipeline_module(engines.gpt_layers(), loss_fn=lambda logits, labels: inner(logits, labels))
    listed = [*model.parameters(), inner.log_t]
    options = {
        "model_parameters": {"model_parameters": listed},
        "groups": {"model_parameters": [{"params": listed[:-1]}, {"params": listed[-1:]}]},
        "an optimizer": {"optimizer": torch.optim.Adam(listed)},
        "a function": {"optimizer": lambda parameters: torch.optim.Adam([*parameters, inner.log_t])},
    }
    model_and_config = {"model": model, "config": engines.config(terapipe=engines.section())}
    return [
        engines.raised_by(functools.partial(terapipe_ds.initialize, **model_and_config, **options[way])) for way in ways
    ]


class TestByHand:
    def test_a_parameter_of_a_loss_function_is_refused(self) -> None:
        for rank in rank_pool(2).run(job_by_hand, ways=["model_parameters", "groups", "an optimizer", "a function"]):
            for kind, text in rank:
                assert kind == "TeraPipeConfigError" and "not in the PipelineModule: 1, of shape [1]" in text, text
