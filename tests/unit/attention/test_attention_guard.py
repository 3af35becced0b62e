"""Plain self-attention on a part of a sequence raises instead of seeing only that part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import (
    ActiveSlice,
    GuardCapturedNames,
    PlainAttentionError,
    active_slice,
    allow_attention_within_slice,
    guard_plain_attention,
    push_slice,
)

PART = ActiveSlice(4, 8, 12)
X = torch.ones(2, 3, 4, 8)  # four tokens, as PART has


def test_self_attention_on_a_slice() -> None:
    message = (
        r"slice \[4, 8\) of a sequence of 12 tokens, with queries of shape \[2, 3, 4, 8\] and keys of shape "
        r"\[2, 3, 4, 8\].*sliced_attention\(q, k, v, layer\).*with "
        r"terapipe_ds.attention.allow_attention_within_slice\(\):.*not causal cannot be sliced.*'slices': 1"
    )
    for causal in (True, False):
        with guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError, match=message):
            F.scaled_dot_product_attention(query=X, key=X, value=X, is_causal=causal)
    with guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError):
        F.scaled_dot_product_attention(X, X[:, :1], X[:, :1], enable_gqa=True)


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 7, 8), (1, 3, 8, 8), (4, 3, 2, 8), (2, 3, 1, 8), (2, 4, 8)],
    ids=["register tokens", "packed rows", "windows", "one token", "without heads"],
)
@pytest.mark.parametrize("guard", [guard_plain_attention, GuardCapturedNames])
def test_self_attention_over_any_number_of_tokens(guard: Callable[[], Any], shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    with guard(), push_slice(PART), pytest.raises(PlainAttentionError, match=f"queries of shape .{str(shape)[1:-1]}"):
        F.scaled_dot_product_attention(x, x, x)


def attend() -> torch.Tensor:
    return F.scaled_dot_product_attention(X, X, X)


def test_what_passes() -> None:
    expected, memory, module = attend(), torch.ones(2, 3, 7, 8), torch.nn.MultiheadAttention(8, 2)
    with guard_plain_attention():
        assert torch.equal(attend(), expected)
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(attend(), expected)
        with push_slice(PART):  # cross-attention
            assert F.scaled_dot_product_attention(X, memory, memory).shape == X.shape
            assert module(torch.ones(4, 3, 8), *[torch.ones(7, 3, 8)] * 2)[0].shape == (4, 3, 8)


@pytest.mark.parametrize("guard", [guard_plain_attention, GuardCapturedNames])
def test_what_is_allowed_inside_and_outside(guard: Callable[[], Any]) -> None:
    expected, module, x = attend(), torch.nn.MultiheadAttention(8, 2), torch.ones(4, 3, 8)
    with guard(), push_slice(PART):
        with allow_attention_within_slice():
            assert torch.equal(attend(), expected)
            assert module(x, x, x)[0].shape == x.shape
            with allow_attention_within_slice():
                attend()
            attend()
        with pytest.raises(PlainAttentionError):
            attend()
        with pytest.raises(KeyError), allow_attention_within_slice():
            raise KeyError
        with pytest.raises(PlainAttentionError):
            attend()


@pytest.mark.parametrize("guard", [guard_plain_attention, GuardCapturedNames])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_allowed_in_a_forward_that_is_recomputed(guard: Callable[[], Any], use_reentrant: bool) -> None:
    """Twice: in the forward, and in the one inside the backward, which is refused without it."""
    modes: list[str] = []

    def run(x: torch.Tensor, allowed: tuple[str, ...]) -> torch.Tensor:
        active = active_slice()
        assert active is not None
        modes.append(active.mode)
        with allow_attention_within_slice() if active.mode in allowed else nullcontext():
            return F.scaled_dot_product_attention(x, x, x)

    def train(*allowed: str) -> torch.Tensor | None:
        leaf = start.clone().requires_grad_()
        with guard_plain_attention(), guard():
            with push_slice(PART):
                out = checkpoint(run, leaf, allowed, use_reentrant=use_reentrant)
            with push_slice(PART.replace(mode="recompute")):
                out.square().sum().backward()
        return leaf.grad

    start = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    x = start.clone().requires_grad_()
    F.scaled_dot_product_attention(x, x, x).square().sum().backward()
    torch.testing.assert_close(train("train", "recompute"), x.grad)
    assert modes == ["train", "recompute"]
    with pytest.raises(PlainAttentionError):
        train("train")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_attention_module_of_torch(batch_first: bool, need_weights: bool, training: bool) -> None:
    """With and without weights, and in evaluation, where torch takes a shortcut around its own functions."""
    module = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first).train(training)
    x = torch.ones((3, 4, 8) if batch_first else (4, 3, 8))
    with torch.no_grad(), guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError):
        module(x, x, x, need_weights=need_weights)


def test_the_encoder_layer_of_torch_in_evaluation() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with torch.no_grad(), guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError):
        layer(torch.ones(3, 4, 8))


def test_what_was_there_comes_back() -> None:
    before = F.scaled_dot_product_attention, F.multi_head_attention_forward
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with guard_plain_attention():
        with guard_plain_attention():
            pass
        with push_slice(PART), pytest.raises(PlainAttentionError):
            F.scaled_dot_product_attention(X, X, X)
    with pytest.raises(KeyError), guard_plain_attention():
        raise KeyError
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_a_name_that_was_bound_before() -> None:
    captured, multi_head = F.scaled_dot_product_attention, F.multi_head_attention_forward
    expected = captured(X, X, X)
    with GuardCapturedNames(), guard_plain_attention():
        with push_slice(PART):
            for call in (captured, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu):
                for names in ((), ("key", "value"), ("query", "key", "value")):
                    with pytest.raises(PlainAttentionError, match="sliced_attention"):
                        call(*[X] * (3 - len(names)), **dict.fromkeys(names, X))
            captured(X, torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 8))  # cross-attention
            with pytest.raises(PlainAttentionError):  # with weights it calls nothing that could be guarded
                x, module = torch.ones(4, 3, 8), torch.nn.MultiheadAttention(8, 2)
                weights, out = (module.in_proj_weight, module.in_proj_bias), module.out_proj
                multi_head(x, x, x, 8, 2, *weights, None, None, False, 0.0, out.weight, out.bias)
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(captured(X, X, X), expected)
