"""Checkpointed ranges whose inputs need no gradient still train their parameters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn

from terapipe_ds.runtime.layers.activation_checkpointing import checkpoint_with_gradients

TOKENS = torch.tensor([[1, 2], [0, 1]])


def run(checkpoint: Any) -> nn.Embedding:
    """An embedding in one range, a layer in the next one, both checkpointed."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(4, 3), nn.Linear(3, 3)
    checkpoint(layer, checkpoint(embedding, TOKENS)).sum().backward()
    assert layer.weight.grad is not None
    return embedding


def test_the_embedding_gets_its_gradient() -> None:
    reentrant = mock.Mock(wraps=ds_checkpointing.checkpoint)
    found = run(checkpoint_with_gradients(reentrant)).weight.grad
    expected = run(lambda function, *inputs: function(*inputs)).weight.grad
    assert found is not None and expected is not None
    assert torch.equal(found, expected)
    assert reentrant.call_count == 1, "the second range is checkpointed as it was asked for"


def test_without_it_the_embedding_is_cut_off() -> None:
    """Why this exists. When it fails, DeepSpeed is mended."""
    with pytest.raises(RuntimeError, match="does not require grad"):
        run(ds_checkpointing.checkpoint)
