"""Test that adapters of peft train on stages as in one process, also if a stage has none."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_adapters import (
    folders_of_adapters,
    models_in_memory,
    refusal_of_adapters,
    refusal_of_folders,
    refusal_on_one_rank,
    train_adapters,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [0], [3]], ids=["everywhere", "first stage", "last stage"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp64", "bf16 with ZeRO-1"])
def test_adapters_equal_one_process(is_bf16: bool, schedule: str, layers: list[int], tmp_path: Path) -> None:
    """To 1e-10 in fp64, where peft reads what is saved, with the same values; losses in bf16 to 1e-2."""
    section = engines.section(slices=[7, 3, 6], schedule=schedule)
    given = {"family": "llama", "terapipe": section, "layers_to_transform": layers, "is_bf16": is_bf16}
    errors = rank_pool(2).run(train_adapters, folder=str(tmp_path), **given)
    assert not engines.violations(errors, 1e-2 if is_bf16 else engines.EXACT)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"bias": "all"},
        {"bias": "lora_only", "layers_to_transform": [2]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["embed_tokens"], "layers_to_transform": [3]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"use_dora": True},
    ],
    ids=str,
)
def test_what_peft_trains_is_trained_and_saved(fields: dict[str, Any], tmp_path: Path) -> None:
    given = {"family": "qwen2", "terapipe": engines.section(slices=[7, 3, 6], schedule="zbv")}
    errors = rank_pool(2).run(train_adapters, folder=str(tmp_path), **given, **fields)
    assert not engines.violations(errors)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [3]], ids=["everywhere", "last stage"])
def test_gradients_are_clipped_by_the_norm_of_all_stages(layers: list[int], tmp_path: Path) -> None:
    """Norms are fp32 in DeepSpeed."""
    given = {"family": "llama", "terapipe": engines.section(slices=[7, 3, 6]), "layers_to_transform": layers}
    errors = rank_pool(2).run(train_adapters, folder=str(tmp_path), clipping=0.01, **given)
    assert not engines.violations([{key: each[key] for key in ("loss", "parameter")} for each in errors], 1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fields", [{}, {"modules_to_save": ["lm_head"], "bias": "all"}], ids=str)
def test_folders_of_adapters(fields: dict[str, Any], tmp_path: Path) -> None:
    """peft, transformers and a second run read what is saved, with the losses of the engine.

    So it is beside a model that the folder had before.
    """
    for found in rank_pool(2).run(folders_of_adapters, folder=str(tmp_path), **fields):
        assert found["config"] and found["moved"]
        assert all(found[name] <= 1e-5 for name in ("peft", "merged", "again", "alone", "restored")), found


@pytest.mark.sample(1)
@pytest.mark.parametrize("fields", [None, {}, {"modules_to_save": ["lm_head"], "bias": "all"}], ids=str)
def test_a_model_in_memory_is_cut(fields: dict[str, Any] | None) -> None:
    """As transformers has built it, or peft after that: the same weights, trained alike."""
    for found in rank_pool(2).run(models_in_memory, adapter_fields=fields):
        assert found["equal"] and found["same"] and found["loss"] <= 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "fields", "text"),
    [
        ("gpt2", {"target_modules": ["wte"]}, "leave both out of target_modules"),
        ("gpt2", {"modules_to_save": ["lm_head"]}, "leave both out of target_modules"),
        ("llama", {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ("llama", {"target_modules": ["nothing"]}, "not found in the base model"),
    ],
    ids=lambda each: str(each),
)
def test_adapters_that_are_refused(family: str, fields: dict[str, Any], text: str) -> None:
    for kind, message in rank_pool(2).run(refusal_of_adapters, family=family, **fields):
        assert kind == "ModelRefusedError" and text in message


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("base elsewhere", "'somebody/model' is no folder, and not on the hub or in its cache"),
        ("other adapters", "do not agree on"),
        ("two", "leave out adapter="),
        ("two folders", "has adapters (adapter_config.json), and others are given: leave out adapter="),
        ("other rank", "do not agree on"),
        ("merged", "call model.unmerge_adapter()"),
        ("quantized", "its weights are quantized"),
    ],
)
def test_folders_that_are_refused(case: str, text: str, tmp_path: Path) -> None:
    for kind, message in rank_pool(2).run(refusal_of_folders, folder=str(tmp_path), case=case):
        assert kind == "ModelRefusedError" and text in message


@pytest.mark.parametrize(
    ("case", "text"), [("no folder", "adapter_config.json"), ("no memory", "RuntimeError: out of")]
)
def test_what_one_rank_cannot_build_stops_all(case: str, text: str, tmp_path: Path) -> None:
    for kind, message in rank_pool(2).run(refusal_on_one_rank, folder=str(tmp_path), case=case):
        assert kind == "ModelRefusedError" and text in message


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp64", "bf16 with ZeRO-1"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
def test_three_stages_with_one_that_is_frozen(schedule: str, is_bf16: bool, tmp_path: Path) -> None:
    """fp64 to 1e-10; losses in bf16 to 1e-2. With zbv the ends of the model are on one stage, and two are frozen."""
    section = engines.section(slices=[7, 3, 6], schedule=schedule)
    given = {"family": "llama", "terapipe": section, "layers_to_transform": [0, 5]}
    errors = rank_pool(3).run(train_adapters, folder=str(tmp_path), stages=3, is_bf16=is_bf16, **given)
    assert not engines.violations(errors, 1e-2 if is_bf16 else engines.EXACT)


def test_frozen_weights_that_are_tied(tmp_path: Path) -> None:
    """Embedding and output matrix are one, on two stages, and have no gradients to sum."""
    given = {"family": "gemma", "terapipe": engines.section(slices=[7, 3, 6]), "layers_to_transform": [0, 3]}
    bf16 = {"is_bf16": True, "gradients_in": "fp32"}
    assert not engines.violations(rank_pool(2).run(train_adapters, folder=str(tmp_path), **given, **bf16), 1e-2)
