"""`"verify": "first_batch"` in a pipeline: all ranks hear of a fault, and without one training is as without it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec

from terapipe_ds.runtime.verify import VerifyError
from tests.distributed import faulty_layers, tuple_models
from tests.distributed.engines import Run, batches, engine_of, gpt_layers, section, train
from tests.distributed.harness import rank_pool
from tests.distributed.mutations import MUTATIONS

VERIFY = section(verify="first_batch", slices=[9, 5, 9])
PLAIN = section(slices=[9, 5, 9])


def with_fault(fault: str) -> list[Any]:
    """A decoder with a faulty layer, the first one of the second of two stages."""
    layers = gpt_layers("float32")
    return [*layers[:4], LayerSpec(getattr(faulty_layers, fault)), *layers[4:]]


def fault_of(fault: str) -> tuple[str, str]:
    """The type and the text of the error, on each rank."""
    with engine_of(with_fault(fault), VERIFY) as engine:
        try:
            engine.train_batch(iter(batches(1)[0]))
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def mutated_weights() -> str:
    """The engine weights the slices' losses alike; labels are masked. The text of the error."""
    with MUTATIONS["unweighted_losses"](), engine_of(gpt_layers(), VERIFY) as engine:
        try:
            engine.train_batch(iter(batches(1)[0]))
        except VerifyError as error:
            return str(error)
    return ""


def trainings(case: str) -> list[Run]:
    """Three steps with and without the check."""
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
    "passengers": (tuple_models.guided_layers, {}, _tuple_batches(tuple_models.guided_micro_batch)),
    "auxiliary loss on its way": (
        tuple_models.summing_layers,
        {"engine": {"loss_fn": tuple_models.summed_loss}, "section": {"loss_reduction": "mean"}},
        lambda: batches(3, masked=False),
    ),
    "flat logits": (tuple_models.flat_layers, {"engine": {"loss_fn": tuple_models.flat_loss}}, lambda: batches(3)),
    "frozen": (lambda: tuple_models.frozen_layers("whole stage"), {}, lambda: batches(3)),
    "own loss": (
        tuple_models.own_loss_layers,
        {"engine": {"loss_fn": None}, "section": {"loss_reduction": "mean"}},
        _tuple_batches(tuple_models.own_loss_micro_batch),
    ),
}


class TestTwoRanks:
    def test_wrong_weights_of_the_losses(self) -> None:
        texts = set(rank_pool(2).run(mutated_weights))
        assert len(texts) == 1
        assert "\n  loss_fn: the loss differs by " in texts.copy().pop()

    @pytest.mark.parametrize("fault", ["HiddenPlainAttention", "WrongOwnBackward"])
    def test_every_rank_names_the_layer(self, fault: str) -> None:
        told = rank_pool(2).run(fault_of, fault=fault)
        assert {kind for kind, _ in told} == {"VerifyError"}
        texts = {text for _, text in told}
        assert len(texts) == 1
        text = texts.pop()
        assert text.startswith(
            "verify: 3 slices (9 + 5 + 9) of a sequence of 23 tokens do not give what the whole sequence gives:\n"
            f"  layer 4 ({fault}): "
        )
        assert faulty_layers.LAYERS[getattr(faulty_layers, fault)][1] in text

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.sample(4)
    def test_training_is_bit_for_bit_what_it_is_without(self, case: str) -> None:
        for plain, verified in rank_pool(2).run(trainings, case=case):
            assert verified.losses == plain.losses and verified.returned == plain.returned
            assert all(torch.equal(verified.parameters[name], p) for name, p in plain.parameters.items())
            for a, b in zip(verified.gradients, plain.gradients, strict=True):
                assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- megatron-core layers, with tensor parallelism -------------------------------------------------------------------

MEGATRON = {
    "sequence parallel": ("tp2_sp", {"positions": "learned", "block": "gelu"}),
    "sequence parallel, mixture of experts": ("tp2_sp", {"block": "moe"}),
    "two stages, recompute": ("pp2", {"recompute": "uniform", "tied": True}),
}
SIZES = {"tp2_sp": (2, 1, 1, True), "pp2": (1, 2, 1, False)}


def megatron_trainings(case: str) -> list[tuple[list[float], dict[str, torch.Tensor], str]]:
    """Two steps with and without the check: losses, parameters, and what the check said against."""
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
            losses, said = [], ""
            try:
                for step in range(2):
                    data = [megatron_models.micro_batch(found, 0, step, 0)]
                    losses.append(float(engine.train_batch(iter(data))))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                engine.destroy()
            results.append((losses, {n: p.detach().clone() for n, p in model.named_parameters()}, said))
    return results


def megatron_positions_from_zero(case: str) -> str:
    from terapipe_ds.models.megatron import layers

    with mock.patch.object(layers, "first_position", lambda: 0):
        return megatron_trainings(case)[1][2]


class TestMegatron:
    @pytest.mark.parametrize("case", MEGATRON)
    def test_healthy(self, case: str) -> None:
        for plain, verified in rank_pool(2).run(megatron_trainings, case=case):
            assert verified[2] == "" and verified[0] == plain[0]
            assert all(torch.equal(verified[1][name], p) for name, p in plain[1].items())

    @pytest.mark.parametrize(
        ("case", "layer", "token"),
        [
            ("sequence parallel", "layer 0 (MegatronEmbedding)", 6),
            ("two stages, recompute", "layer 1 (MegatronLayer)", 6),
        ],
    )
    def test_positions_from_the_own_length(self, case: str, layer: str, token: int) -> None:
        texts = set(rank_pool(2).run(megatron_positions_from_zero, case=case))
        assert len(texts) == 1
        text = texts.pop()
        assert text.startswith("VerifyError: ") and f"\n  {layer}: output of tokens {token}.. differs by " in text
        assert "their positions start at 0" in text
