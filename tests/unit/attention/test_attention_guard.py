"""Plain self-attention on a part of a sequence raises instead of seeing only that part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import largest_error, random_inputs, run_plain, run_sliced

from terapipe_ds.attention import (
    ActiveSlice,
    GuardCapturedNames,
    PlainAttentionError,
    SliceStore,
    guard_plain_attention,
    push_slice,
)

PART = ActiveSlice(4, 8, 12)
X = torch.ones(2, 3, 4, 8)  # four tokens, as PART has


def test_self_attention_on_a_slice() -> None:
    message = r"slice \[4, 8\) of a sequence of 12.*sliced_attention.*not causal cannot be sliced"
    for causal in (True, False):
        with guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError, match=message):
            F.scaled_dot_product_attention(X, X, X, is_causal=causal)


def test_arguments_by_name() -> None:
    with guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError):
        F.scaled_dot_product_attention(query=X, key=X, value=X)


def test_what_passes() -> None:
    expected = F.scaled_dot_product_attention(X, X, X)
    memory = torch.ones(2, 3, 7, 8)
    with guard_plain_attention():
        assert torch.equal(F.scaled_dot_product_attention(X, X, X), expected)
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(F.scaled_dot_product_attention(X, X, X), expected)
        with push_slice(PART):
            F.scaled_dot_product_attention(X, memory, memory)  # cross-attention
            F.scaled_dot_product_attention(memory, memory, memory)  # over something else than tokens


def test_without_the_guard_nothing_is_checked() -> None:
    with push_slice(PART):
        F.scaled_dot_product_attention(X, X, X)


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


def test_sliced_attention_passes_the_guard() -> None:
    inputs = random_inputs()
    with guard_plain_attention():
        for plan in ((9, 11), (20,)):
            assert largest_error(run_sliced(inputs, plan, SliceStore()), run_plain(inputs)) <= 1e-12


def test_a_name_that_was_bound_before() -> None:
    captured = F.scaled_dot_product_attention
    expected = captured(X, X, X)
    with GuardCapturedNames(), guard_plain_attention():
        with push_slice(PART):
            by_name = {"query": X, "key": X, "value": X}
            for call in (lambda: captured(X, X, X), lambda: captured(X, key=X, value=X), lambda: captured(**by_name)):
                with pytest.raises(PlainAttentionError, match="sliced_attention"):
                    call()
            captured(X, torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 8))  # cross-attention
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(captured(X, X, X), expected)


def test_sliced_attention_passes_the_closer_guard() -> None:
    inputs = random_inputs()
    with GuardCapturedNames():
        for plan in ((9, 11), (20,)):
            assert largest_error(run_sliced(inputs, plan, SliceStore()), run_plain(inputs)) <= 1e-12
