"""Plain self-attention on a part of a sequence is refused, or becomes sliced attention where it is plainly causal."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Result, Tensor, largest_error, random_inputs, run_plain, run_sliced
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import (
    ActiveSlice,
    GuardCapturedNames,
    PlainAttentionError,
    SliceStore,
    SliceStoreError,
    active_slice,
    allow_attention_within_slice,
    guard_plain_attention,
    plain_attention_guard,
    push_slice,
)
from terapipe_ds.attention.document_edges import Documents

PART = ActiveSlice(4, 8, 12)
X, LONG = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 7, 8)  # four tokens, as PART has, and seven
TOKENS = torch.ones(4, 3, 8)


def test_self_attention_on_a_slice() -> None:
    message = (
        r"slice \[4, 8\) of a sequence of 12 tokens, at .*test_plain_attention_guard.py:\d+ \(test_self_.*"
        r"queries of shape \[2, 3, 4, 8\], keys of shape \[2, 3, 4, 8\].*sliced_attention\(q, k, v, layer\).*"
        r"not causal cannot be sliced.*\"slices\": 1.*with terapipe_ds.attention.allow_attention_within_slice\(\):"
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


def attend() -> Tensor:
    return F.scaled_dot_product_attention(X, X, X)


@pytest.mark.parametrize("intercept", [False, True])
def test_what_passes_as_it_is(intercept: bool) -> None:
    def causal() -> Tensor:
        return F.scaled_dot_product_attention(X, X, X, None, 0.0, True)

    expected, module = causal(), nn.MultiheadAttention(8, 2)
    with guard_plain_attention(intercept):
        assert torch.equal(causal(), expected)
        assert attend().shape == X.shape  # outside of a slice attention need not be causal
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(causal(), expected)
        with push_slice(PART), allow_attention_within_slice():
            assert torch.equal(causal(), expected)
        with push_slice(PART):  # cross-attention
            assert F.scaled_dot_product_attention(X, LONG, LONG).shape == X.shape
            assert module(TOKENS, *[torch.ones(7, 3, 8)] * 2)[0].shape == TOKENS.shape


@pytest.mark.parametrize("guard", [guard_plain_attention, GuardCapturedNames])
def test_what_is_allowed_inside_and_outside(guard: Callable[[], Any]) -> None:
    expected, module, x = attend(), nn.MultiheadAttention(8, 2), torch.ones(4, 3, 8)
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

    def run(x: Tensor, allowed: tuple[str, ...]) -> Tensor:
        active = active_slice()
        assert active is not None
        modes.append(active.mode)
        with allow_attention_within_slice() if active.mode in allowed else nullcontext():
            return F.scaled_dot_product_attention(x, x, x)

    def train(*allowed: str) -> Tensor | None:
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
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first).train(training)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=batch_first).train(training)
    x = torch.ones((3, 4, 8) if batch_first else (4, 3, 8))
    for call in (lambda: module(x, x, x, need_weights=need_weights), lambda: layer(x)):
        with torch.no_grad(), guard_plain_attention(), push_slice(PART), pytest.raises(PlainAttentionError):
            call()


def test_what_was_there_comes_back() -> None:
    before = F.scaled_dot_product_attention, F.multi_head_attention_forward
    with guard_plain_attention():
        with guard_plain_attention():
            pass
        with push_slice(PART), pytest.raises(PlainAttentionError):
            F.scaled_dot_product_attention(X, X, X)
    with pytest.raises(KeyError), guard_plain_attention():
        raise KeyError
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
    assert torch.backends.mha.get_fastpath_enabled()


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
                x, module = torch.ones(4, 3, 8), nn.MultiheadAttention(8, 2)
                weights, out = (module.in_proj_weight, module.in_proj_bias), module.out_proj
                multi_head(x, x, x, 8, 2, *weights, None, None, False, 0.0, out.weight, out.bias)
        with push_slice(ActiveSlice(0, 4, 4)):
            assert torch.equal(captured(X, X, X), expected)


def test_kernels_are_compared_by_their_tokens() -> None:
    """Which come before the heads in most packages, and after them in torch."""
    of_packages = "terapipe_tests::flash_attn_forward", "xformers_flash_tests::flash_fwd", "xformers_tests::dual_gemm"
    schema = "(Tensor q, Tensor k, Tensor v) -> Tensor"
    for name in of_packages:
        torch.library.custom_op(name, lambda q, k, v: q.clone(), mutates_args=(), schema=schema)
    q, long = (x.transpose(1, 2).contiguous() for x in (X, LONG))
    torch_s, package_s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.terapipe_tests
    of_xformers = torch.ops.xformers_flash_tests.flash_fwd
    with GuardCapturedNames(), push_slice(PART):
        for call, own, others in (
            (torch_s, X, LONG), (package_s.flash_attn_forward, q, long), (of_xformers, q, long)
        ):  # fmt: skip
            call(own, others, others)
            with pytest.raises(PlainAttentionError):
                call(own, own, own)
        for name in ("scaled_dot_product_cudnn_attention", "scaled_dot_product_fused_attention_overrideable"):
            with pytest.raises(PlainAttentionError):
                getattr(torch.ops.aten, f"_{name}")(X, X, X, None, False)
        with pytest.raises(PlainAttentionError):
            torch.ops.aten._cudnn_attention_forward(X, X, X, None, None, None, 4, 4, False)
        # no attention: products of xformers, norms of flash-attn
        torch.ops.xformers_tests.dual_gemm(X, X, X)
        package_s.flash_attn_forward(*[torch.ones(4, 4)] * 3)


# -- interception ---------------------------------------------------------------------------------------------------


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
        return run_sliced(inputs, (9, 10, 1), store, attend=attend)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_is_exact(kv_heads: int, scale: float | None) -> None:
    inputs = random_inputs((2, 4, kv_heads, 20, 8))
    assert largest_error(run(inputs, Plain(scale=scale)), run_plain(inputs, scale)) <= 1e-12


def test_it_is_exact_without_a_dimension_of_heads() -> None:
    inputs, module = random_inputs((2, 1, 1, 20, 8)), Plain()
    result = run(inputs, lambda *qkv: module(*(x.squeeze(1) for x in qkv)).unsqueeze(1))
    assert largest_error(result, run_plain(inputs)) <= 1e-12


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
    assert largest_error(run(inputs, attend[kind]), run_plain(inputs, calls=3)) <= 1e-12
    assert not module._forward_pre_hooks


def test_one_name_for_two_calls_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention_guard, "CallName", lambda module, number: (module, 0))
    with pytest.raises(SliceStoreError):
        run(random_inputs(), Plain(calls=2))


def test_a_module_that_runs_twice_is_refused() -> None:
    module = Plain()
    with pytest.raises(SliceStoreError, match="Plain, call 0.*runs twice in a slice, as a tied layer"):
        run(random_inputs(), lambda q, k, v: module(q, k, module(q, k, v)))


class Calls(nn.Module):
    """A module that runs whatever it is given."""

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


MULTI = nn.MultiheadAttention(8, 2)
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


def test_whole_rows_of_documents() -> None:
    """Plain causal attention would mix the documents of a row, in one slice too. A mask is the caller's own."""
    q, k, v = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    multi, x = nn.MultiheadAttention(8, 2).double(), torch.randn(7, 1, 8, dtype=torch.float64)
    options = {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False}
    plain = lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True)  # noqa: E731
    whole = ActiveSlice(0, 7, 7, documents=Documents(((0, 3),), 0, 7))
    with guard_plain_attention(True), GuardCapturedNames(), push_slice(whole):
        out = Calls()(lambda: plain(q, k, v))
        out_multi, _ = multi(x, x, x, **options)
    expected = [plain(*(each[:, :, part] for each in (q, k, v))) for part in (slice(3), slice(3, 7))]
    assert torch.allclose(out, torch.cat(expected, 2), rtol=0, atol=1e-12)
    alone = [
        multi(part, part, part, **options | {"attn_mask": options["attn_mask"][: len(part), : len(part)]})[0]
        for part in (x[:3], x[3:])
    ]
    assert torch.allclose(out_multi, torch.cat(alone), rtol=0, atol=1e-12)

    captured, mask = F.scaled_dot_product_attention, torch.ones(7, 7, dtype=torch.bool).tril()
    for guard in (guard_plain_attention, GuardCapturedNames):
        with guard(), push_slice(whole), pytest.raises(PlainAttentionError, match="other documents of its row"):
            plain(q, k, v)
    with guard_plain_attention(True), GuardCapturedNames(), push_slice(whole):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), captured(q, k, v, mask))
    with guard_plain_attention(True), push_slice(whole.replace(documents=Documents(((0,),), 0, 7))):
        assert torch.equal(Calls()(lambda: plain(q, k, v)), captured(q, k, v, is_causal=True))


def test_dropout_acts() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 8)
    first = ActiveSlice(0, 4, 12, store=SliceStore())
    call = lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)  # noqa: E731
    with guard_plain_attention(True), torch.no_grad(), push_slice(first):
        assert not torch.allclose(Calls()(call), F.scaled_dot_product_attention.__wrapped__(x, x, x, is_causal=True))


class Passing(TorchDispatchMode):
    """Do nothing: torch's compiler gives up a function that first runs under such a mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_function_that_torch_does_not_compile_has_its_own_results() -> None:
    """The compiler made a graph of the mode's own function, and left an argument out in operations that came later."""

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1 + 0.045 * x * x)))

    compiled, x = torch.compile(gelu, backend="eager"), torch.randn(5, 3)
    with Passing():
        compiled(x)
    with GuardCapturedNames():
        torch.testing.assert_close(compiled(x), gelu(x))
