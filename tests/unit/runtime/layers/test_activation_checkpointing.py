"""Checkpointed ranges whose inputs need no gradient still train their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn

from terapipe_ds.runtime.layers.activation_checkpointing import checkpoint_with_gradients

TOKENS = torch.tensor([[1, 2], [0, 1]])


class Spy:
    """DeepSpeed's reentrant checkpoint, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, function: Any, *inputs: Any) -> Any:
        self.calls += 1
        return ds_checkpointing.checkpoint(function, *inputs)


def run(checkpoint: Any) -> nn.Embedding:
    """An embedding in one range, a layer in the next one, both checkpointed."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(4, 3), nn.Linear(3, 3)
    checkpoint(layer, checkpoint(embedding, TOKENS)).sum().backward()
    assert layer.weight.grad is not None
    return embedding


def test_the_embedding_gets_its_gradient() -> None:
    spy = Spy()
    found = run(checkpoint_with_gradients(spy)).weight.grad
    expected = run(lambda function, *inputs: function(*inputs)).weight.grad
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert spy.calls == 1, "the second range is checkpointed as it was asked for"


def test_without_it_the_embedding_is_cut_off() -> None:
    """Why this exists. When it fails, DeepSpeed is mended."""
    with pytest.raises(RuntimeError, match="does not require grad"):
        run(ds_checkpointing.checkpoint)


@pytest.mark.parametrize("grad", [True, False])
def test_a_single_input_with_a_gradient_is_enough(grad: bool) -> None:
    spy = Spy()
    hidden = torch.randn(2, 3, requires_grad=True)
    with torch.set_grad_enabled(grad):
        checkpoint_with_gradients(spy)(lambda tokens, hidden: hidden * 2, TOKENS, hidden)
    assert spy.calls == 1
