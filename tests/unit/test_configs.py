"""Every ready config loads, with DeepSpeed's own checks and with ours."""

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from terapipe_ds.config import TeraPipeConfig

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in FOLDER.glob("*") if path.stem != "trainer")  # whose sizes Trainer fills in


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_loads(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    deepspeed_config = DeepSpeedConfig(config)
    is_short = "gpt_tp2" in file.name or file.stem == "hf_tiny"  # for sequences of 512 tokens at most
    assert deepspeed_config.train_micro_batch_size_per_gpu == (4 if is_short else 1)
    assert deepspeed_config.optimizer_name == "adamw"
    section = TeraPipeConfig.from_deepspeed(config)
    assert section.enabled == ("terapipe" in config)
    if section.enabled and section.slices != "auto":
        slices = 4 if is_short else 8
        assert section.plan_for(512 if is_short else 1024).num_slices == slices
        assert section.plan_for(2048).num_slices == slices


@pytest.mark.parametrize(("stock", "sliced"), [("stock", "sliced_8"), ("stock", "auto"), ("demo_stock", "demo_sliced")])
def test_the_sliced_config_is_the_stock_one_and_a_section(stock: str, sliced: str) -> None:
    config = load(sliced)
    assert config.pop("terapipe")["enabled"] is True
    assert config == load(stock)


def test_precision_and_zero_are_all_that_the_two_of_megatron_differ_in() -> None:
    config = load("gpt_tp2_pp2_bf16_zero1")
    for key in ("bf16", "data_types", "zero_optimization"):
        config.pop(key)
    assert config == load("gpt_tp2_pp2")


def test_adapters_take_another_learning_rate_and_nothing_else() -> None:
    text = (FOLDER / "finetune_hf.json").read_text()
    assert text.replace("1e-5", "2e-4") == (FOLDER / "finetune_hf_lora.json").read_text() != text


def test_what_the_names_promise() -> None:
    for name in ("zero1_bf16", "gpt_tp2_pp2_bf16_zero1", "finetune_hf", "finetune_hf_lora"):
        deepspeed_config = DeepSpeedConfig(load(name))
        assert deepspeed_config.zero_optimization_stage == 1
        assert deepspeed_config.bfloat16_config.enabled
    pipeline = DeepSpeedConfig(load("activation_checkpointing")).pipeline
    assert pipeline["activation_checkpoint_interval"] == 1
    assert pipeline["use_reentrant"] is False
    assert load("auto")["terapipe"]["slices"] == load("auto")["terapipe"]["schedule"] == "auto"
    assert load("demo_stock")["gradient_accumulation_steps"] == 1
