"""Test that models of transformers train over stages and tensor-parallel ranks as their own classes do alone."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.conftest import FULL
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_tensor_jobs import (
    by_strategy,
    read_checkpoint,
    refusal,
    refusal_of_plain_layers,
    through_folders,
    train_adapters,
    train_divided,
    write_checkpoint,
)
from tests.distributed.test_strategy_runs import strategy_of

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "olmo", "olmo2", "phi", "gpt_neox", "glm",
    "mixtral", "deepseek_v3", "qwen3_next",
)  # fmt: skip
BOTH = (2, 1, 2)
CASES: dict[str, dict[str, Any]] = {
    # fewer key and value heads than ranks, and norms whose gradients the ranks sum
    "shared heads": {"family": "qwen3", "grid": (1, 1, 4)},
    # tied embeddings: one rank has more of them than the other
    "odd vocabulary, clipping": {"family": "gemma2", "grid": BOTH, "fields": {"vocab_size": 67}, "clipping": 0.01},
    # biases beside divided weights, which count once in the norm; DeepSpeed's norm is fp32
    "biases, clipping": {"family": "phi", "grid": BOTH, "clipping": 0.01},
    "zero bubble": {"family": "gpt_neox", "grid": BOTH, "schedule": "seq1f1b-zb"},
    **{family: {"family": family, "grid": BOTH} for family in FAMILIES},
    **{f"{family} in bf16": {"family": family, "grid": BOTH, "is_bf16": True} for family in FAMILIES},
    "one shared head": {"family": "gemma", "grid": BOTH, "fields": {"num_key_value_heads": 1}},
    "odd, tied": {"family": "gemma2", "grid": BOTH, "fields": {"vocab_size": 67}},
    "odd, untied": {"family": "llama", "grid": BOTH, "fields": {"vocab_size": 67}},
    "all logits": {"family": "llama", "grid": BOTH, "all_logits": True},
    "all logits, tied": {"family": "gemma2", "grid": BOTH, "all_logits": True, "fields": {"vocab_size": 67}},
    "replicas": {"family": "phi", "grid": (1, 2, 2)},
    "zbv": {"family": "llama", "grid": BOTH, "schedule": "zbv"},
    "copies": {"family": "qwen3", "grid": BOTH, "schedule": "chimera-seq"},
    "measured": {"family": "llama", "grid": BOTH, "slices": "auto"},
    "finite": {"family": "llama", "grid": BOTH, "check_finite": "every_step"},
}
BY_DEFAULT = ("shared heads", "odd vocabulary, clipping", "qwen3 in bf16")


@pytest.mark.parametrize("case", [pytest.param(k, marks=() if k in BY_DEFAULT else pytest.mark.full) for k in CASES])
def test_a_step_is_that_of_the_whole_model(case: str) -> None:
    """Loss, gradients and parameters of two steps of two micro-batches in three slices: to 1e-10 in fp64."""
    given = CASES[case]
    errors = rank_pool(4).run(train_divided, **given)
    kept = [each.pop("kept", 0) for each in errors]
    assert all(kept) or not given.get("schedule", "").endswith("zb")
    limit = 1e-2 if given.get("is_bf16") else engines.EXACT
    if "clipping" in given:
        limit, errors = 1e-6, [{key: each[key] for key in ("loss", "parameter")} for each in errors]
    assert not engines.violations(errors, limit)


@pytest.mark.parametrize(
    ("grid", "fields"),
    [
        (BOTH, {}),
        pytest.param((1, 1, 4), {}, marks=pytest.mark.full),
        pytest.param(BOTH, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}, marks=pytest.mark.full),
        pytest.param((2, 2, 1), {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_adapters_train_and_are_saved_whole(grid: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    assert not engines.violations(rank_pool(4).run(train_adapters, grid=grid, folder=str(tmp_path), **fields))


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.full)])
def test_weights_are_read_in_shares_and_written_whole(family: str, tmp_path: Path) -> None:
    grids = [BOTH, (1, 1, 4)]
    for found in rank_pool(4).run(through_folders, family=family, folder=str(tmp_path), grids=grids):
        assert found["read 0"] and found["read 1"] and found["evaluation"] <= 1e-5
        assert found["largest share 0"] == 0.5


@pytest.mark.parametrize(
    ("family", "fields", "grid_of_writer"),
    [
        ("qwen3", {}, BOTH),
        pytest.param("qwen3", {}, (2, 2, 1), marks=pytest.mark.full),
        pytest.param("gemma2", {}, BOTH, marks=pytest.mark.full),
        pytest.param("llama", {"target_modules": "all-linear"}, BOTH, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_checkpoint_moves_to_another_layout(
    family: str, fields: dict[str, Any], grid_of_writer: tuple[int, int, int], tmp_path: Path
) -> None:
    pool, folder = rank_pool(4), str(tmp_path)
    expected = pool.run(write_checkpoint, family=family, grid=grid_of_writer, folder=folder, **fields)[0]
    grids = [(1, 1, 4), *([BOTH, (2, 2, 1), (4, 1, 1)] if FULL else [])]
    for grid, universal in [*((grid, True) for grid in grids), *([(grid_of_writer, False)] if FULL else [])]:
        options = {"family": family, "grid": grid, "folder": folder, "universal": universal}
        for losses in pool.run(read_checkpoint, **options, **fields):
            assert losses == pytest.approx(expected, rel=1e-5), grid


def test_a_strategy_runs_by_its_config_and_its_topology() -> None:
    strategy = strategy_of(
        dims=[2, 1, 2], devices_per_node=4, partition=[0, 3, 7], slices=[7, 3, 6], accumulation=2, zero_stage=1
    )
    for config, errors in rank_pool(4).run(by_strategy, family="llama", strategy=strategy.to_json()):
        assert config["tensor_parallel"] == {"autotp_size": 2}
        assert max(errors) <= 1e-5


PLAN = "layers.*.self_attn."
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 cannot be trained in stages and token slices: its config has no plan": (
        "ModelRefusedError", {"family": "gpt2"},
    ),
    "its 4 attention heads do not divide over 3": ("ModelRefusedError", {"grid": (1, 1, 3)}),
    "its 3 key and value heads do not divide by 2": (
        "ModelRefusedError", {"fields": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}},
    ),
    "has attention_dropout = 0.1": ("ModelRefusedError", {"fields": {"attention_dropout": 0.1}}),
    "LoraConfig has lora_dropout or use_dora": ("ModelRefusedError", {"adapter": {"lora_dropout": 0.1}}),
    "mlp.down_proj: 'diagonal'": ("ModelRefusedError", {"plan": {"layers.*.mlp.down_proj": "diagonal"}}),
    "cannot be divided over 2 tensor-parallel ranks by its plan": (
        "ModelRefusedError", {"plan": {f"{PLAN}q_norm": None, f"{PLAN}k_norm": None, f"{PLAN}o_proj": None}},
    ),
    "different gradients for 2 of 9 parameters": (
        "ReplicatedGradientError", {"plan": {f"{PLAN}q_norm": None}, "step": True},
    ),
    "the layers of the module are divided over 2 ranks": (
        "TeraPipeConfigError", {"tensor_parallel": {"autotp_size": 4}},
    ),
    "would not sum gradients over tensor-parallel ranks": ("ModelRefusedError", {"terapipe": None, "step": True}),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSALS)
def test_divisions_that_are_refused_on_all_ranks(text: str) -> None:
    kind, given = REFUSALS[text]
    defaults = {"family": "qwen3", "grid": (1, 1, 2), "fields": {}, "plan": {}, "step": False}
    grid = given.get("grid", (1, 1, 2))
    for error in rank_pool(grid[2]).run(refusal, **defaults | given):
        assert kind in " ".join(error) and text in error[1], error  # a peer may report the one that failed first


def test_the_size_is_refused_where_nothing_divides_layers() -> None:
    for kind, text in rank_pool(2).run(refusal_of_plain_layers):
        assert kind == "TeraPipeConfigError" and "AutoTP would replace layers without knowing of pipeline" in text
