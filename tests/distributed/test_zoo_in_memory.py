"""Test a model of transformers in memory, changed by its owner: it trains as its own class, or is refused by name."""

import contextlib
import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

import torch
from torch import nn

import terapipe_ds
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_jobs import (
    batches,
    differences,
    engine_of,
    train_whole,
    tuples,
    weights_of_all_stages,
)
from tests.hugging_face_families import VOCAB_SIZE
from tests.unit.models.hugging_face.sliced_model import in_fp64
from tests.zoo.in_memory import NOT_FRESH, REFUSED, TRAINED, UNTRAINABLE, Kind, adapters, drop

PREFIX = "base_model.model."


def train(name: str, schedule: str) -> tuple[dict[str, float], bool, int]:
    """Return the largest errors against the own class, whether frozen weights stayed, and the interval of
    recomputation."""
    is_recomputed = "checkpointing" in name  # which no mode reaches: see `in_fp64`
    with contextlib.nullcontext() if is_recomputed else in_fp64():
        kind = TRAINED[name]
        module, own = terapipe_ds.from_pretrained(kind.model(), num_stages=2), kind.model().train()
        names, data = module.checkpoint_names(), batches(own.config.vocab_size)
        theirs = {key.removeprefix(PREFIX): p for key, p in own.named_parameters()}
        frozen = {key: p.detach().clone() for key, p in theirs.items() if not p.requires_grad}
        interval = module.activation_checkpoint_interval
        with engine_of(module, engines.section(slices=[7, 3, 6], schedule=schedule)) as engine:
            run = engines.train(engine, tuples(module, data))
            names = module.checkpoint_names()
        losses, gradients, _ = train_whole(own, data)
        stayed = all(torch.equal(run.parameters[key], frozen[n]) for key, n in names.items() if n in frozen)
        return differences(run, names, losses, gradients, theirs), stayed, interval


def refusals() -> dict[str, tuple[str, str]]:
    give = functools.partial(terapipe_ds.from_pretrained, num_stages=2)
    kinds = {**REFUSED, **UNTRAINABLE}
    return {name: engines.raised_by(functools.partial(give, kind.model())) for name, kind in kinds.items()}


def carried() -> dict[str, Any]:
    """Return the dtypes and dropout of this rank, of a model in bf16 with adapters and norms in fp32."""
    kind = Kind(adapters(drop(0.25), lora_dropout=0.5))
    model = kind.model(torch.bfloat16)
    for layer in model.base_model.model.model.layers:
        layer.input_layernorm.float()
    found = {}
    for dtype in (None, torch.float64):
        module = terapipe_ds.from_pretrained(model, num_stages=2, dtype=dtype)
        of_adapters = {p.dtype for name, p in module.named_parameters() if "lora_" in name}
        found[dtype] = of_adapters, {p.dtype for name, p in module.named_parameters() if "lora_" not in name}
    drops = {each.p for each in module.modules() if isinstance(each, nn.Dropout)}
    drops |= {each.attention_dropout for each in module.modules() if hasattr(each, "attention_dropout")}
    return {"dtypes": found, "dropout": drops}


def released() -> tuple[bool, bool]:
    """Return whether a deleted model stays in memory, and whether a second engine, in another layout, has values."""
    model, array = Kind(lambda model: None).model(), np.zeros((64, 32))
    model.lm_head.weight.data = torch.from_numpy(array)
    array = weakref.ref(array)
    module = terapipe_ds.from_pretrained(model, num_stages=2)
    del model
    with engine_of(module, engines.unchecked()) as engine:
        engines.train(engine, tuples(module, batches(VOCAB_SIZE)))
        gc.collect()
        is_held, trained = array() is not None, weights_of_all_stages(module)
    with engine_of(module, engines.unchecked(schedule="zbv")):
        moved = weights_of_all_stages(module)
    return is_held, all(torch.equal(moved[key], value) for key, value in trained.items())


def lost_norms(folder: str) -> tuple[tuple[str, str], bool]:
    """Return the error of saving only adapters if norms are trained beside them; and whether a merged save has all."""
    module = terapipe_ds.from_pretrained(TRAINED["adapters and norms"].model(), num_stages=2)
    with engine_of(module, engines.section()) as engine:
        raised = engines.raised_by(lambda: terapipe_ds.save_pretrained(engine, folder))
        terapipe_ds.save_pretrained(engine, folder, merge=True)
    return raised, bool(terapipe_ds.from_pretrained(folder, num_stages=2))


@functools.cache
def all_refusals() -> list[dict[str, tuple[str, str]]]:
    found: list[dict[str, tuple[str, str]]] = rank_pool(2).run(refusals)
    return found


class TestModelsInMemory:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("name", TRAINED)
    def test_it_trains_as_its_own_class(self, name: str) -> None:
        """In fp64, with gradients of exactly the parameters that have one there; frozen ones do not move."""
        schedule = "zbv" if "frozen" in name else "seq1f1b"
        errors, stayed, intervals = zip(*rank_pool(2).run(train, name=name, schedule=schedule), strict=True)
        assert not engines.violations(errors)
        assert all(stayed)
        assert set(intervals) == {int("checkpointing" in name)}

    @pytest.mark.parametrize("name", [*REFUSED, *UNTRAINABLE])
    def test_it_is_refused_by_name(self, name: str) -> None:
        for kind, text in (each[name] for each in all_refusals()):
            assert kind == "ModelRefusedError", text
            assert {**REFUSED, **UNTRAINABLE}[name].says in text
            assert (NOT_FRESH in text) == (name in REFUSED)
            assert "cannot be trained in stages" not in text

    def test_dropout_and_dtypes_are_those_of_the_object(self) -> None:
        for found in rank_pool(2).run(carried):
            assert found["dropout"] == {0.25}
            assert found["dtypes"][None] == ({torch.float32}, {torch.bfloat16, torch.float32})
            assert found["dtypes"][torch.float64] == ({torch.float64}, {torch.float64})

    def test_its_whole_weights_are_freed(self) -> None:
        assert rank_pool(2).run(released) == [(False, True)] * 2

    def test_norms_beside_adapters_are_not_lost_in_a_save(self, tmp_path: Any) -> None:
        for (kind, text), is_read in rank_pool(2).run(lost_norms, folder=str(tmp_path)):
            assert kind == "ValueError" and "trained beside the adapters" in text and "merge=True" in text
            assert is_read
