"""Adapters of peft train on stages as in one process, where a stage has none as well."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_adapters import train_adapters


@pytest.mark.sample(3)
@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [0], [3]], ids=["everywhere", "first stage", "last stage"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
def test_adapters_equal_one_process(schedule: str, layers: list[int], tmp_path: Path) -> None:
    """To 1e-10 in fp64; peft reads what is saved, with the same values."""
    section = engines.section(slices=[7, 3, 6], schedule=schedule)
    errors = rank_pool(2).run(train_adapters, family="llama", terapipe=section, layers=layers, folder=str(tmp_path))
    assert not engines.violations(errors)


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp64", "bf16 with ZeRO-1"])
def test_three_stages_with_one_that_is_frozen(is_bf16: bool, tmp_path: Path) -> None:
    """fp64 to 1e-10; losses in bf16 to 1e-2."""
    given = {"family": "llama", "terapipe": engines.section(slices=[7, 3, 6]), "layers": [0, 5]}
    errors = rank_pool(3).run(train_adapters, folder=str(tmp_path), stages=3, is_bf16=is_bf16, **given)
    assert not engines.violations(errors, 1e-2 if is_bf16 else engines.EXACT)


def test_frozen_weights_that_are_tied(tmp_path: Path) -> None:
    """Embedding and output matrix are one, on two stages, and have no gradients to sum."""
    given = {"family": "gemma", "terapipe": engines.section(slices=[7, 3, 6]), "layers": [0, 3]}
    bf16 = {"is_bf16": True, "gradients_in": "fp32"}
    assert not engines.violations(rank_pool(2).run(train_adapters, folder=str(tmp_path), **given, **bf16), 1e-2)
