"""Layers that cannot be trained in slices, found where the model is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.runtime.checks import problem_of_layers


def problem(module: nn.Module, slices: Any = 4, has_moe_layers: bool = False) -> str | None:
    config = TeraPipeConfig(enabled=True, slices=slices)
    return problem_of_layers(
        SimpleNamespace(module=nn.Sequential(nn.Linear(4, 4), module), terapipe_config=config,
                        has_moe_layers=has_moe_layers)
    )  # fmt: skip


@pytest.mark.parametrize(
    "layer", [nn.GRU(4, 4), nn.LSTM(4, 4), nn.RNN(4, 4), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.InstanceNorm1d(4)]
)
def test_layers_that_mix_tokens_are_named(layer: nn.Module) -> None:
    name = type(layer).__name__
    for slices in (4, [3, 1]):
        found = problem(nn.Sequential(layer), slices)
        assert found is not None
        assert f"1.0 ({name})" in found and "set terapipe.slices to 1" in found
    assert problem(layer, slices=1) is None, "a whole sequence in one slice"
    assert problem(layer, slices=[7]) is None


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.Embedding(4, 4), nn.Conv1d(4, 4, 1), nn.Dropout()]
)
def test_token_local_layers_are_no_problem(layer: nn.Module) -> None:
    assert problem(layer) is None


def test_only_a_few_are_named() -> None:
    found = problem(nn.Sequential(*[nn.GRU(4, 4) for _ in range(9)]))
    assert found is not None
    assert found.count("(GRU)") == 4 and "and more" in found


def test_experts_are_refused_whatever_the_slices() -> None:
    for slices in (1, 4):
        assert "deepspeed.moe" in str(problem(nn.Linear(4, 4), slices, has_moe_layers=True))
