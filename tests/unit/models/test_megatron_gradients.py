"""Which gradient counts, where parameters carry several; what DeepSpeed's converter is told of names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")


from terapipe_ds.models.megatron.gradients import gradient_reader
from terapipe_ds.models.megatron.module import _SIZES_KEY, _patterns
from terapipe_ds.runtime.checkpoints.compatibility import MODEL_SIZES


def test_what_another_engine_left_on_a_parameter_is_not_read() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter._hp_grad, parameter.grad_accum = torch.ones(3), torch.ones(3)  # type: ignore[attr-defined]
    read = gradient_reader(torch.optim.SGD([parameter], lr=1.0))
    assert read(parameter) is None
    parameter.grad = torch.full((3,), 2.0)
    assert read(parameter) is parameter.grad


def test_patterns_match_every_layer_and_nothing_else() -> None:
    names = [f"{layer}.layer.mlp.linear_fc1.weight" for layer in (1, 2, 13)]
    (pattern,) = _patterns(names)
    assert all(re.match(pattern, name) for name in [*names, "99.layer.mlp.linear_fc1.weight"])
    for other in (
        "1.layer.mlp.linear_fc1.weight2",
        "1.layer.mlp.linear_fc2.weight",
        "1.layerxmlp.linear_fc1.weight",
        "1.layer.mlp.experts.local_experts.0.linear_fc1.weight",
    ):
        assert not re.match(pattern, other), other


def test_the_engine_looks_where_the_model_writes() -> None:
    assert _SIZES_KEY == MODEL_SIZES
