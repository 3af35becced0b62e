"""Activation checkpointing runs a slice's forward again inside its backward: same result, nothing appended twice."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Result, Tensor, forced, largest_error, random_inputs, run_plain, run_sliced
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import SliceStore, sliced_attention

PLAN = (9, 10, 1)


def _without_early_stop(function: Callable[..., Any], *inputs: Any) -> Any:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(function, *inputs, use_reentrant=False)


KINDS: dict[str, Callable[..., Any]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "non-reentrant, no early stop": _without_early_stop,
    "deepspeed": checkpointing.checkpoint,
    "deepspeed non-reentrant": checkpointing.non_reentrant_checkpoint,
}


class Attend:
    """Attention with something before and after it, as in a layer; counts how often it runs."""

    def __init__(self, dropout_p: float = 0.0) -> None:
        self.dropout_p, self.runs = dropout_p, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.runs += 1
        return sliced_attention(q * 1.0, k * 1.0, v * 1.0, "layer", dropout_p=self.dropout_p) * 1.0


def run(kind: str | None, inputs: list[Tensor], attend: Attend, store: SliceStore) -> Result:
    def wrapped(*qkv: Tensor) -> Tensor:
        outputs = KINDS[kind](attend, *qkv) if kind else attend(*qkv)
        return outputs if torch.is_tensor(outputs) else outputs[0]

    return run_sliced(inputs, PLAN, store, attend=wrapped)


@pytest.mark.parametrize("backend", ["cpu_flash", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_result_and_same_memory(kind: str, backend: str) -> None:
    inputs, attend, store = random_inputs((2, 4, 2, 20, 8)), Attend(), SliceStore()
    with forced(backend):
        result = run(kind, inputs, attend, store)
    assert attend.runs == 2 * len(PLAN)
    assert largest_error(result, run_plain(inputs)) <= 1e-12
    assert store.pool.peak_bytes == 2 * (2 * 2 * 20 * 2 * 8) * 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_forward_replays_its_dropout(kind: str) -> None:
    """Gradients with and without checkpointing are the same to the last bit, and dropout was really on."""
    inputs = random_inputs((2, 4, 2, 20, 8))
    results = []
    for each in (None, kind):
        torch.manual_seed(5)
        results.append(run(each, inputs, Attend(dropout_p=0.4), SliceStore()))
    assert largest_error(results[1], results[0]) <= 1e-14
    assert largest_error(results[0], run_plain(inputs)) > 0.1


def test_offloaded_activations() -> None:
    """Saved tensors may be packed away and brought back as copies."""
    inputs = random_inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        assert largest_error(run_sliced(inputs, PLAN), run_plain(inputs)) <= 1e-12
