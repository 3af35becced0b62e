"""Test `"verify": "first_batch"` in a pipeline: all ranks report a fault; without one, training is unaffected."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec

from tests.distributed.engines import (
    Run,
    batches,
    engine_of,
    error_of,
    gpt_layers,
    of_rank_0,
    raised_by,
    section,
    step_error,
    train,
)
from tests.distributed.faults import FAULTS
from tests.distributed.harness import rank_pool
from tests.small_models import faulty, tuples

VERIFY = section(verify="first_batch", slices=[9, 5, 9])
PLAIN = section(slices=[9, 5, 9])


def with_fault(fault: str) -> list[Any]:
    """Return a decoder with a faulty layer, the first one of the second of two stages."""
    layers = gpt_layers("float32")
    return [*layers[:4], LayerSpec(getattr(faulty, fault)), *layers[4:]]


def fault_of(fault: str) -> tuple[str, str]:
    """Return the type and the text of the error, on each rank."""
    with engine_of(with_fault(fault), VERIFY) as engine:
        return step_error(engine)


def mutated_weights() -> tuple[str, str]:
    """Return the same if the engine weighs the slices' losses alike; labels are masked."""
    with FAULTS["unweighted_losses"].broken(), engine_of(gpt_layers(), VERIFY) as engine:
        return step_error(engine)


def one(told: list[tuple[str, str]]) -> str:
    """Return the report."""
    kind, text = of_rank_0(told)
    assert kind == "VerifyError"
    return str(text)


def trainings(case: str) -> list[Run]:
    """Make three steps with and without the check."""
    layers, options, data = CASES[case]
    runs = []
    for terapipe in (PLAIN, VERIFY):
        torch.manual_seed(17)
        with engine_of(layers(), {**terapipe, **options.get("section", {})}, **options.get("engine", {})) as engine:
            before = torch.get_rng_state()
            runs.append(train(engine, data()))
            runs[-1].parameters["random state"] = torch.get_rng_state()
            assert not torch.equal(before, torch.get_rng_state()) or "dropout" not in case
            assert engine.slice_store.live_bytes() == 0
    return runs


def _tuple_batches(micro_batch: Any) -> Any:
    return lambda: [[micro_batch(10 * step + i) for i in range(2)] for step in range(3)]


CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "dropout, checkpointing": (
        lambda: gpt_layers("float32", dropout=0.2),
        {"engine": {"module": {"activation_checkpoint_interval": 1}}},
        lambda: batches(3),
    ),
    "tied, bf16": (
        lambda: gpt_layers("bfloat16", tied_embedding=True),
        {"engine": {"bf16": {"enabled": True}}},
        lambda: batches(3),
    ),
    "passengers": (tuples.guided_layers, {}, _tuple_batches(tuples.guided_micro_batch)),
    "auxiliary loss on its way": (
        tuples.summing_layers,
        {"engine": {"loss_fn": tuples.summed_loss}, "section": {"loss_reduction": "mean"}},
        lambda: batches(3, masked=False),
    ),
    "flat logits": (tuples.flat_layers, {"engine": {"loss_fn": tuples.flat_loss}}, lambda: batches(3)),
    "frozen": (lambda: tuples.frozen_layers("whole stage"), {}, lambda: batches(3)),
    "own loss": (
        tuples.own_loss_layers,
        {"engine": {"loss_fn": None}, "section": {"loss_reduction": "mean"}},
        _tuple_batches(tuples.own_loss_micro_batch),
    ),
}


class TestTwoRanks:
    def test_wrong_weights_of_the_losses(self) -> None:
        assert "\n  loss_fn: the loss differs by " in one(rank_pool(2).run(mutated_weights))

    @pytest.mark.parametrize("fault", ["HiddenPlainAttention", "WrongOwnBackward"])
    def test_every_rank_names_the_layer(self, fault: str) -> None:
        text = one(rank_pool(2).run(fault_of, fault=fault))
        assert text.startswith(
            "verify: 3 slices (9 + 5 + 9) of a sequence of 23 tokens do not give what the whole sequence gives:\n"
            f"  layer 4 ({fault}): "
        )
        assert faulty.LAYERS[getattr(faulty, fault)][1] in text

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.sample(2)
    def test_training_is_bit_for_bit_what_it_is_without(self, case: str) -> None:
        for plain, verified in rank_pool(2).run(trainings, case=case):
            assert error_of(vars(verified), vars(plain)) == 0.0


# -- megatron-core layers, with tensor parallelism -------------------------------------------------------------------

MEGATRON = {
    "sequence parallel": ("tp2_sp", {"positions": "learned", "block": "gelu"}),
    "sequence parallel, mixture of experts": ("tp2_sp", {"block": "moe"}),
    "two stages, recompute": ("pp2", {"recompute": "uniform", "tied": True}),
}
SIZES = {"tp2_sp": (2, 1, 1, True), "pp2": (1, 2, 1, False)}


def megatron_trainings(case: str) -> list[tuple[list[float], dict[str, torch.Tensor], tuple[str, str]]]:
    """Make two steps with and without the check; return losses, parameters, and the check's objections."""
    from tests.distributed import megatron_models
    from tests.distributed.megatron_cases import LAYOUTS, Case

    layout, fields = MEGATRON[case]
    results = []
    with mock.patch.dict(LAYOUTS, SIZES):
        found = Case(layout=layout, **fields)
        for verify in ("off", "first_batch"):
            model = megatron_models.build_model(found)
            megatron_models.draw_weights(model)
            terapipe = {"enabled": True, "slices": [6, 10, 2, 6], "granularity_tokens": 1, "verify": verify}
            engine = megatron_models.build_engine(model, found, terapipe=terapipe)
            data = iter([megatron_models.micro_batch(found, 0, step, 0) for step in range(2)])
            losses: list[float] = []
            error = raised_by(lambda: losses.extend(float(engine.train_batch(data)) for _ in range(2)))  # noqa: B023
            engine.destroy()
            results.append((losses, {n: p.detach().clone() for n, p in model.named_parameters()}, error))
    return results


def megatron_positions_from_zero(case: str) -> tuple[str, str]:
    from terapipe_ds.models.megatron import layers

    with mock.patch.object(layers, "first_position", lambda: 0):
        return megatron_trainings(case)[1][2]


class TestMegatron:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("case", MEGATRON)
    def test_healthy(self, case: str) -> None:
        for plain, verified in rank_pool(2).run(megatron_trainings, case=case):
            assert verified[2] == ("", "") and error_of(verified, plain) == 0.0

    @pytest.mark.parametrize(
        ("case", "layer"),
        [("sequence parallel", "layer 0 (MegatronEmbedding)"), ("two stages, recompute", "layer 1 (MegatronLayer)")],
    )
    def test_positions_from_the_own_length(self, case: str, layer: str) -> None:
        text = one(rank_pool(2).run(megatron_positions_from_zero, case=case))
        assert f"\n  {layer}: output of tokens 6.. differs by " in text
        assert "their positions start at 0" in text
