"""Folders of transformers are read by stages, and written so that transformers reads them: bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_files import memory_of_reading, round_trip
from tests.hugging_face_families import CONFIGS

SAMPLE = ("gpt2", "mixtral", "deepseek_v3", "gpt_oss")
COMMON = {"config.json", "generation_config.json", "tokenizer.json"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in CONFIGS if name != "xglm"],
)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    """Read and written unchanged it is the same model; trained, it gives transformers the pipeline's evaluation."""
    for found in rank_pool(2).run(round_trip, family=family, folder=str(tmp_path)):
        assert found["read"] and found["keys"] and found["written"] and found["moved"]
        assert found["evaluation"] <= 1e-5
        shards = {f"model-0000{stage}-of-00002.safetensors" for stage in (1, 2)}
        assert set(found["files"]) == COMMON | shards | {"model.safetensors.index.json"}


def test_one_stage_writes_one_file(tmp_path: Path) -> None:
    for found in rank_pool(2).run(round_trip, family="llama", folder=str(tmp_path), stages=1):
        assert found["read"] and found["written"] and set(found["files"]) == COMMON | {"model.safetensors"}


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8000},
        pytest.param(
            {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "vocab_size": 16000},
            marks=pytest.mark.full,
        ),
    ],
    ids=["50 MB", "1 GB"],
)
def test_a_stage_reads_its_own_weights_alone(fields: dict[str, Any], tmp_path: Path) -> None:
    """A rank's private memory grows by 0.75 of the model at most, over two stages."""
    for grown, size in rank_pool(2).run(memory_of_reading, folder=str(tmp_path), **fields):
        assert grown <= 0.75 * size
