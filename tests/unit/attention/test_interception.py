"""Plain causal attention on a slice becomes sliced attention; whatever else it may be is refused with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Result, Tensor, largest_error, random_inputs, run_plain, run_sliced
from torch import nn
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import (
    ActiveSlice,
    GuardCapturedNames,
    PlainAttentionError,
    SliceStore,
    SliceStoreError,
    allow_attention_within_slice,
    guard_plain_attention,
    plain_attention_guard,
    push_slice,
)

PLAN = (9, 10, 1)
PART = ActiveSlice(4, 8, 12)
X = torch.ones(2, 3, 4, 8)  # four tokens, as PART has


class Plain(nn.Module):
    """Attends as models do, `calls` times, each to what the one before gave."""

    def __init__(self, calls: int = 1, scale: float | None = None) -> None:
        super().__init__()
        self.calls, self.scale = calls, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(self.calls):
            v = F.scaled_dot_product_attention(
                q * 1.0, k * 1.0, v * 1.0, is_causal=True, scale=self.scale, enable_gqa=True
            )
        return v


def run(inputs: list[Tensor], attend: Callable[..., Tensor]) -> Result:
    store = SliceStore()
    with guard_plain_attention(intercept=True), GuardCapturedNames():
        return run_sliced(inputs, PLAN, store, attend=attend)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_is_exact(kv_heads: int, scale: float | None) -> None:
    inputs = random_inputs((2, 4, kv_heads, 20, 8))
    assert largest_error(run(inputs, Plain(scale=scale)), run_plain(inputs, scale)) <= 1e-12


def formula(inputs: list[Tensor], calls: int) -> Result:
    *qkv, grad = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    q, k, v = leaves
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    for _ in range(calls):
        v = weights @ v
    return Result(v.detach(), *torch.autograd.grad(v, leaves, grad))


@pytest.mark.parametrize("kind", ["kept", "reentrant", "non-reentrant", "nested"])
def test_calls_of_one_module_have_names_of_their_own(kind: str) -> None:
    """Also where a forward is recomputed, or recomputed in a recomputation."""
    inputs, module = random_inputs(), Plain(calls=3)

    def again(*qkv: Tensor) -> Tensor:
        return checkpoint(module, *qkv, use_reentrant=False)

    attend: dict[str, Callable[..., Tensor]] = {
        "kept": module,
        "reentrant": lambda *qkv: checkpoint(module, *qkv, use_reentrant=True),
        "non-reentrant": again,
        "nested": lambda *qkv: checkpoint(again, *qkv, use_reentrant=False),
    }
    assert largest_error(run(inputs, attend[kind]), formula(inputs, 3)) <= 1e-12
    assert not module._forward_pre_hooks


def test_one_name_for_two_calls_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention_guard, "CallName", lambda module, number: (module, 0))
    with pytest.raises(SliceStoreError):
        run(random_inputs(), Plain(calls=2))


def test_a_module_that_runs_twice_is_refused() -> None:
    module = Plain()
    with pytest.raises(SliceStoreError, match="Plain, call 0"):
        run(random_inputs(), lambda q, k, v: module(q, k, module(q, k, v)))


class Calls(nn.Module):
    """A module that runs whatever it is given."""

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


LONG = torch.ones(2, 3, 7, 8)
MULTI = nn.MultiheadAttention(8, 2)
TOKENS = torch.ones(4, 3, 8)
REFUSED: dict[str, Callable[[], Any]] = {
    "it has an attn_mask": lambda: F.scaled_dot_product_attention(X, X, X, torch.ones(4, 4, dtype=torch.bool)),
    "is_causal is False": lambda: F.scaled_dot_product_attention(X, X, X),
    "do not have 4 tokens": lambda: F.scaled_dot_product_attention(LONG, LONG, LONG, is_causal=True),
    "more or fewer keys than queries": lambda: F.scaled_dot_product_attention(X, LONG, LONG, is_causal=True),
    "pass enable_gqa=True": lambda: F.scaled_dot_product_attention(X, X[:, :1], X[:, :1], is_causal=True),
    "pass need_weights=False": lambda: MULTI(TOKENS, TOKENS, TOKENS),
    "is_causal=True beside": lambda: MULTI(TOKENS, TOKENS, TOKENS, need_weights=False),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_what_is_not_plain_causal_attention(cause: str) -> None:
    with guard_plain_attention(True), push_slice(PART), pytest.raises(PlainAttentionError, match=cause):
        Calls()(REFUSED[cause])


def test_a_function_has_no_name() -> None:
    with guard_plain_attention(True), push_slice(PART), pytest.raises(PlainAttentionError, match="but a function"):
        F.scaled_dot_product_attention(X, X, X, is_causal=True)


def test_what_passes_as_it_is() -> None:
    expected = F.scaled_dot_product_attention(X, X, X, is_causal=True)
    with guard_plain_attention(True):
        assert torch.equal(F.scaled_dot_product_attention(X, X, X, is_causal=True), expected)
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(F.scaled_dot_product_attention(X, X, X, None, 0.0, True), expected)
        with push_slice(PART), allow_attention_within_slice():
            assert torch.equal(F.scaled_dot_product_attention(X, X, X, is_causal=True), expected)
        with push_slice(PART):  # cross-attention
            assert F.scaled_dot_product_attention(X, LONG, LONG).shape == X.shape


def test_dropout_acts() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 8)
    first = ActiveSlice(0, 4, 12, store=SliceStore())
    call = lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)  # noqa: E731
    with guard_plain_attention(True), torch.no_grad(), push_slice(first):
        assert not torch.allclose(Calls()(call), F.scaled_dot_product_attention.__wrapped__(x, x, x, is_causal=True))
